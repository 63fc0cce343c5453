"""Has upstream load one rank's share of a model: what it shards, and where, in what it does not know or does wrong."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelNotUsable


def _layer_plan(**parts: Mapping[str, str]) -> dict[str, str]:
    """Upstream's plan of Llama's attention, and of these parts of the layers."""
    attention = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    return {
        f"model.language_model.layers.*.{part}.{name}": how
        for part, named in {"self_attn": attention, **parts}.items()
        for name, how in named.items()
    }


_GATED = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
_TWO_IN_ONE = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
"""A product and the one behind it, where upstream leaves the first to be gathered: every rank has its part of both."""
_EXPERTS = {f"experts.{name}": how for name, how in _TWO_IN_ONE.items()}
_RECURRING = {"in_proj_z": "colwise", "in_proj_a": "colwise", "in_proj_b": "colwise", "out_proj": "rowwise"}
"""Of linear attention, whose queries, keys and values are one product, which `shards.localise` cuts by heads."""
_OWN_PLANS: Mapping[str, dict[str, str]] = {
    "glm46v": _layer_plan(mlp=_TWO_IN_ONE),
    "glm4v": _layer_plan(mlp=_TWO_IN_ONE),
    "glm4v_moe": _layer_plan(**{"mlp": _GATED | _EXPERTS, "mlp.shared_experts": _GATED}),
    "qwen3_5": _layer_plan(mlp=_GATED, linear_attn=_RECURRING),
    "qwen3_5_moe": _layer_plan(**{"mlp": _EXPERTS, "mlp.shared_expert": _GATED, "linear_attn": _RECURRING}),
    "qwen3_vl": _layer_plan(mlp=_GATED),
    "qwen3_vl_moe": _layer_plan(mlp=_EXPERTS),
}
"""Of families for which upstream has none, or one that does not fit. Norms of queries and keys are of one head each."""
_TURNED = {"qwen3_vl_moe"}
"""Families whose repositories have the matrices of experts the other way round than upstream's model. It would turn
each behind its sharding, which is along the wrong axis then."""


def placement(model_type: str, size: int) -> dict[str, Any]:
    """Keywords of `from_pretrained` for this rank's share of a model. Raises `ModelNotUsable`."""
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        raise ModelNotUsable("a model over several devices needs transformers 5.17 or later") from None
    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan=_OWN_PLANS.get(model_type))}


@contextmanager
def shards_on(device: torch.device, model_type: str) -> Iterator[None]:
    """Has upstream shard what it loads of such a model on this device, and as it lies in the checkpoint."""
    with ExitStack() as entered:
        if device.type == "cpu":
            entered.enter_context(_mesh_on(device))
        if model_type in _TURNED:
            entered.enter_context(_turning_experts(model_type))
        yield


@contextmanager
def _mesh_on(device: torch.device) -> Iterator[None]:
    """Upstream has no option for a CPU: its mesh and the weights go to the accelerator that torch is built for
    (`initialize_distributed_mesh`), whether or not there is one, and to whom it belongs."""
    upstreams: Any = torch._C
    built_for = upstreams._get_accelerator
    upstreams._get_accelerator = lambda *_: device
    try:
        yield
    finally:
        upstreams._get_accelerator = built_for


@contextmanager
def _turning_experts(model_type: str) -> Iterator[None]:
    """Experts are read and turned piece by piece; upstream turns none."""
    from transformers import conversion_mapping, core_model_loading
    from transformers.distributed.sharding_utils import DtensorShardOperation

    class EitherWay(DtensorShardOperation):  # type: ignore[misc, unused-ignore]
        def __init__(self, param: Any) -> None:
            super().__init__(param)
            self._shape = list(param.shape)

        def shard_tensor(self, source: Any, *args: Any, **options: Any) -> Tensor | None:
            if len(self._shape) == 3 and list(source.get_shape()) != self._shape:
                source = _Turned(source)
            shard: Tensor | None = super().shard_tensor(source, *args, **options)
            return shard

    upstreams: Any = core_model_loading
    usual = conversion_mapping.get_checkpoint_conversion_mapping(model_type)
    conversion_mapping.register_checkpoint_conversion_mapping(model_type, [], overwrite=True)
    upstreams.DtensorShardOperation = EitherWay
    try:
        yield
    finally:
        upstreams.DtensorShardOperation = DtensorShardOperation
        conversion_mapping.register_checkpoint_conversion_mapping(model_type, usual, overwrite=True)


class _Turned:
    """A matrix of a checkpoint for each expert, [experts, n, m], read as [experts, m, n]."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def get_shape(self) -> list[int]:
        """Of all of it."""
        experts, rows, columns = self._source.get_shape()
        return [experts, columns, rows]

    def __getitem__(self, piece: tuple[slice, slice, slice]) -> Tensor:
        experts, rows, columns = piece
        read: Tensor = self._source[experts, columns, rows]
        return read.transpose(1, 2).contiguous()
