"""One rank's share of a model: upstream shards the weights while it loads them (`shard_loading`), and here its hooks
are replaced by plain modules on local tensors: one sum over the ranks behind attention and one behind the MLP
(Megatron-LM, section 3), or behind a mixture's experts and those that all tokens share, together.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear
from transformers import AutoConfig, PreTrainedModel

from slipstream.engine.checkpoint import Checkpoint
from slipstream.errors import ModelNotUsable

KEYS_AND_VALUES = ("k_proj", "v_proj")
MOST_ORDERED_ROWS = 64
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on


def check_checkpoint(ref: str, size: int) -> None:
    """Raises `ModelNotUsable` where `size` ranks cannot share it. One of the hub is on this machine then."""
    config = AutoConfig.from_pretrained(Checkpoint.open(ref).path)
    check_split(ref, config.get_text_config(), size)


def check_split(ref: str, config: Any, size: int) -> None:
    """Raises `ModelNotUsable` for a text model that `size` ranks cannot share evenly."""
    possible = even_sizes(config)
    if size not in possible:
        words = f"take {' or '.join(map(str, possible))}" if possible else "it runs on one device only"
        which = f"its {config.num_attention_heads} heads, on {config.num_key_value_heads} of keys and values,"
        raise ModelNotUsable(f"{ref}: {size} ranks cannot share {which} evenly; {words}")


def even_sizes(config: Any) -> list[int]:
    """How many ranks can share a text model evenly. Of more than there are heads of keys, several have the same one."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shared = (heads, *_other_sizes(config))
    even = [n for n in range(2, heads + 1) if not any(number % n for number in shared)]
    return [n for n in even if not (kv_heads % n and n % kv_heads)]


def _other_sizes(config: Any) -> Iterator[int]:
    """What else ranks share of a text model: inner sizes of its MLPs, of its experts, heads of its linear attention."""
    names = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "linear_num_key_heads")
    for name in names:
        if size := getattr(config, name, None):
            yield size


def localise(model: PreTrainedModel, size: int) -> None:
    """Make plain modules of what upstream has sharded over `size` ranks. All ranks do it together. Raises
    `ModelNotUsable` where it has not sharded every layer: each rank would hold, and compute, all of the others."""
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    num_heads: int = model.config.get_text_config().num_key_value_heads
    words, is_tied = _whole(table.weight), head.weight is table.weight
    model.set_output_embeddings(GatheredLinear(*_share_of(words if is_tied else head.weight, size)))
    table.weight = _fixed(words if dist.get_rank() == 0 else words[:1].clone())  # the others are sent embeddings
    for module in (head, table):
        module.__dict__.pop("forward", None)
    layers = cast(Any, model.get_decoder()).layers
    for layer in layers:
        if hasattr(layer, "linear_attn"):
            _share_heads(layer.linear_attn, dist.get_rank(), size)
    mixtures = {layer.mlp for layer in layers if _sums_up_at_its_end(layer.mlp)}
    summed_later = {part for mixture in mixtures for part in mixture.modules()}
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            has_some_inputs = _has_some_inputs(part)
            if any(isinstance(weight, DTensor) for weight in part.parameters(recurse=False)):
                _localise(part, num_heads if name in KEYS_AND_VALUES and num_heads < size else 0)
            if part in mixtures or (has_some_inputs and part not in summed_later):
                setattr(parent, name, SummedLinear(part) if isinstance(part, nn.Linear) else Summed(part))
    if not all(map(_is_shared_out, layers)):
        raise ModelNotUsable(
            f"transformers {transformers.__version__} does not share the layers of {model.config.model_type!r} out"
            " among processes; leave out --gpus and --ranks"
        )


def _has_some_inputs(part: nn.Module) -> bool:
    """Whether it has a matrix, or one for each expert, of which upstream has given this rank some of the columns."""
    return any(
        isinstance(weight, DTensor) and weight.dim() > 1 and weight.placements == (Shard(weight.dim() - 1),)
        for weight in part.parameters(recurse=False)
    )


def _sums_up_at_its_end(mlp: Any) -> bool:
    """Whether it is a mixture that adds experts for all tokens to the chosen ones, and ranks share both out: of what
    they add up one sum over the ranks will do."""
    shared = getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)
    return shared is not None and _has_some_inputs(mlp.experts) and _has_some_inputs(shared.down_proj)


def _is_shared_out(layer: Any) -> bool:
    """Whether the ranks' parts of its attention, and those of its MLP, or of its experts, are summed."""
    attention = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
    halves = (attention, layer.mlp.experts if hasattr(layer.mlp, "experts") else layer.mlp)
    return all(any(isinstance(part, SummedLinear | Summed) for part in half.modules()) for half in halves)


def _localise(part: nn.Module, num_heads: int) -> None:
    """`num_heads`: of so many, fewer than there are ranks, this one has the one that its queries ask; 0: it has what it
    was given."""
    part.__dict__.pop("forward", None)  # upstream's, which exchanges the parameters at every call
    for name, weight in list(part.named_parameters(recurse=False)):
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if num_heads:
            local = _whole(weight).unflatten(0, (num_heads, -1))[own_heads(num_heads)].flatten(0, 1).clone()
        setattr(part, name, _fixed(local))


def _share_of(weight: Tensor, size: int) -> tuple[Tensor, int]:
    """This rank's outputs, and over how many ranks they are spread: one, where they cannot be shared evenly."""
    if weight.shape[0] % size:
        return _whole(weight), 1
    if isinstance(weight, DTensor):
        return weight.to_local(), size
    return weight.chunk(size)[dist.get_rank()].clone(), size


def _share_heads(linear_attn: Any, rank: int, size: int) -> None:
    """Leaves this rank's heads of keys, and of the values that go with them, to a layer of linear attention: its gates,
    decays, rates and last product are a share already, and what upstream has cut of the others is no share of heads."""
    kinds = (linear_attn.key_dim, linear_attn.key_dim, linear_attn.value_dim)
    own = torch.cat([rows.chunk(size)[rank] for rows in torch.arange(sum(kinds)).split(kinds)])
    for part in (linear_attn.in_proj_qkv, linear_attn.conv1d):
        part.__dict__.pop("forward", None)
        for name, weight in list(part.named_parameters()):
            setattr(part, name, _fixed(_whole(weight)[own.to(weight.device)]))
    for name in ("A_log", "dt_bias"):
        setattr(linear_attn, name, _fixed(_whole(getattr(linear_attn, name)).chunk(size)[rank].clone()))
    for name in ("num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim"):
        setattr(linear_attn, name, getattr(linear_attn, name) // size)


def own_heads(num_heads: int) -> slice:
    """Which of a model's key and value heads this rank has: as many as every other, or one that others have, too."""
    size = dist.get_world_size()
    first = dist.get_rank() * num_heads // size
    return slice(first, first + max(1, num_heads // size))


def join_heads(heads: Tensor, num_heads: int) -> Tensor:
    """What was found for the heads of this rank, [n, m], -> for all of them, [num_heads, m], at every rank: the mean of
    what several found for one."""
    joined = gather_last(heads.T, dist.get_world_size()).T
    return joined.reshape(num_heads, -1, joined.shape[-1]).mean(dim=1)


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


class Summed(nn.Module):
    """Experts, or a whole mixture, of which every rank has some of the inner rows: the outputs are summed over all of
    them. Which experts a token takes every rank works out for itself, from the same numbers: ranks need GPUs of one
    kind."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, hidden: Tensor, *chosen: Tensor) -> Tensor:
        """[..., hidden], and of experts alone for each row which, and their weights -> [..., hidden]."""
        return sum_ranks(self.part(hidden, *chosen))


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
