"""One rank's share of a model: upstream shards the weights while it loads them, and here its hooks are replaced by
plain modules on local tensors: one sum over the ranks behind attention and one behind the MLP (Megatron-LM, section 3).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear
from transformers import AutoConfig, PreTrainedModel

from slipstream.engine.checkpoint import Checkpoint
from slipstream.errors import ModelNotUsable

MOST_ORDERED_ROWS = 64
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on


def check_checkpoint(ref: str, size: int) -> None:
    """Raises `ModelNotUsable` where `size` ranks cannot share it. One of the hub is on this machine then."""
    config = AutoConfig.from_pretrained(Checkpoint.open(ref).path)
    check_split(ref, config.get_text_config(), size)


def check_split(ref: str, config: Any, size: int) -> None:
    """Raises `ModelNotUsable` for a text model that `size` ranks cannot share evenly."""
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise ModelNotUsable(f"{ref}: has linear attention, and runs on one device only; leave out --gpus and --ranks")
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        raise ModelNotUsable(f"{ref}: a mixture of experts runs on one device only; leave out --gpus and --ranks")
    if any("gather" in how for how in (getattr(config, "base_model_tp_plan", None) or {}).values()):
        raise ModelNotUsable(
            f"{ref}: its MLPs have two matrices in one, which ranks cannot share evenly; it runs on one device only:"
            " leave out --gpus and --ranks"
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    possible = [n for n in range(2, kv_heads + 1) if not (kv_heads % n or heads % n or config.intermediate_size % n)]
    if size not in possible:
        words = f"take {' or '.join(map(str, possible))}" if possible else "it runs on one device only"
        raise ModelNotUsable(f"{ref}: {size} ranks cannot share its {kv_heads} key and value heads evenly; {words}")


_OWN_PLANS = {
    "qwen3_vl": {
        "model.language_model.layers.*.self_attn.q_proj": "colwise",
        "model.language_model.layers.*.self_attn.k_proj": "colwise",
        "model.language_model.layers.*.self_attn.v_proj": "colwise",
        "model.language_model.layers.*.self_attn.o_proj": "rowwise",
        "model.language_model.layers.*.mlp.gate_proj": "colwise",
        "model.language_model.layers.*.mlp.up_proj": "colwise",
        "model.language_model.layers.*.mlp.down_proj": "rowwise",
    }
}
"""Of families for which upstream has none: that of its Qwen3, whose norms of queries and keys are of one head each."""


def placement(model_type: str, size: int) -> dict[str, Any]:
    """Keywords of `from_pretrained` for this rank's share of a model. Raises `ModelNotUsable`."""
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        raise ModelNotUsable("a model over several devices needs transformers 5.17 or later") from None
    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan=_OWN_PLANS.get(model_type))}


@contextmanager
def shards_on(device: torch.device) -> Iterator[None]:
    """Has upstream shard on a CPU while it loads, if that is the device. It has no option for it: its mesh and the
    weights go to the accelerator that torch is built for (`initialize_distributed_mesh`), whether or not there is one,
    and to whom it belongs."""
    if device.type != "cpu":
        yield
        return
    upstreams: Any = torch._C
    built_for = upstreams._get_accelerator
    upstreams._get_accelerator = lambda *_: device
    try:
        yield
    finally:
        upstreams._get_accelerator = built_for


def localise(model: PreTrainedModel, size: int) -> None:
    """Make plain modules of what upstream has sharded over `size` ranks. All ranks do it together. Raises
    `ModelNotUsable` where it has not sharded every layer: each rank would hold, and compute, all of the others."""
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    words, is_tied = _whole(table.weight), head.weight is table.weight
    model.set_output_embeddings(GatheredLinear(*_share_of(words if is_tied else head.weight, size)))
    table.weight = _fixed(words if dist.get_rank() == 0 else words[:1].clone())  # the others are sent embeddings
    for module in (head, table):
        module.__dict__.pop("forward", None)
    num_summed = 0
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, nn.Linear) and isinstance(part.weight, DTensor):
                is_summed = part.weight.placements == (Shard(1),)
                _localise(part)
                if is_summed:
                    setattr(parent, name, SummedLinear(part))
                    num_summed += 1
    if num_summed != 2 * model.config.get_text_config().num_hidden_layers:
        raise ModelNotUsable(
            f"transformers {transformers.__version__} does not share the layers of {model.config.model_type!r} out"
            " among processes; leave out --gpus and --ranks"
        )


def _localise(part: nn.Linear) -> None:
    part.__dict__.pop("forward", None)  # upstream's, which exchanges the parameters at every call
    for name, weight in list(part.named_parameters()):
        setattr(part, name, _fixed(weight.to_local() if isinstance(weight, DTensor) else weight))


def _share_of(weight: Tensor, size: int) -> tuple[Tensor, int]:
    """This rank's outputs, and over how many ranks they are spread: one, where they cannot be shared evenly."""
    if weight.shape[0] % size:
        return _whole(weight), 1
    if isinstance(weight, DTensor):
        return weight.to_local(), size
    return weight.chunk(size)[dist.get_rank()].clone(), size


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()


def _fixed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


class SummedLinear(nn.Module):
    """A linear layer of which every rank has some of the inputs: the outputs are summed over all of them."""

    def __init__(self, part: nn.Linear) -> None:
        super().__init__()
        self.weight = part.weight
        self.bias = part.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., inputs of this rank] -> [..., outputs]."""
        outputs = sum_ranks(linear(inputs, self.weight))
        return outputs if self.bias is None else outputs + self.bias


class GatheredLinear(nn.Module):
    """A linear layer without bias of which each of `size` ranks has as many of the outputs: all are put together."""

    def __init__(self, weight: Tensor, size: int) -> None:
        super().__init__()
        self.weight = _fixed(weight)
        self.out_features = size * weight.shape[0]
        self._size = size

    def forward(self, inputs: Tensor) -> Tensor:
        """[n, inputs] -> [n, outputs of all ranks]."""
        outputs = linear(inputs, self.weight)
        return outputs if self._size == 1 else gather_last(outputs, self._size)


def gather_last(part: Tensor, size: int) -> Tensor:
    """The ranks' parts behind one another along the last axis."""
    return torch.cat(_gathered(part, size), dim=-1)


def sum_ranks(part: Tensor) -> Tensor:
    """The sum of the ranks' [..., rows, n]; `part` may be overwritten.

    A collective adds up the ranks in an order that depends on where in the tensor a number lies, so of more than two
    ranks a token would have other bits in a window than alone. Few rows are therefore gathered, which is one
    round as well but more to receive (`size` - 1 parts), and added up in one order.
    """
    size = dist.get_world_size()
    if size == 2 or part.numel() > MOST_ORDERED_ROWS * part.shape[-1]:
        dist.all_reduce(part)
        return part
    first, *others = _gathered(part, size)
    total = first.to(torch.promote_types(part.dtype, torch.float32))
    for other in others:
        total += other
    return total.to(part.dtype)


def _gathered(part: Tensor, size: int) -> list[Tensor]:
    """By rank; parts of one tensor, as a graph can record."""
    parts = part.new_empty(size * part.shape[0], *part.shape[1:])
    _gather(parts, part.contiguous())
    return list(parts.chunk(size))
