"""Loading a model by path or hub id: the list of families, the weights, what is known of the model before it runs."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from slipstream import __version__
from slipstream.engine.attention import IMPLEMENTATION
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.description import describe
from slipstream.engine.forward import Decoder, Runner
from slipstream.engine.fused_layers import can_fuse, join_weights
from slipstream.engine.fused_runner import fastest_runner
from slipstream.engine.kernels import get_kernel
from slipstream.engine.parallel.ranks import Group
from slipstream.engine.parallel.shard_loading import placement, shards_on
from slipstream.engine.parallel.shards import check_checkpoint, localise
from slipstream.engine.strict_experts import take_rows_one_by_one
from slipstream.engine.video_lm import Adapter, VideoLM
from slipstream.errors import InvalidRequest, ModelNotUsable
from slipstream.families.adapter import FrameFacts, TextDecoder
from slipstream.families.prompts import ChatTemplate
from slipstream.session_messages import Chat

AdapterFactory = Callable[[PreTrainedModel, Checkpoint, PreTrainedTokenizerBase], Adapter]

AUTO = "auto"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = (AUTO, *_DTYPES)

_FAMILIES: Mapping[str, str] = {
    "glm46v": "slipstream.families.glm4v:Glm4V",
    "glm4v": "slipstream.families.glm4v:Glm4V",
    "glm4v_moe": "slipstream.families.glm4v:Glm4V",
    "internvl": "slipstream.families.internvl:InternVL",
    "llava": "slipstream.families.llava_interleave:LlavaInterleave",
    "llava_next_video": "slipstream.families.llava_next_video:LlavaNextVideo",
    "llava_onevision": "slipstream.families.llava_onevision:LlavaOnevision",
    "mistral3": "slipstream.families.mistral3:Mistral3",
    "qwen2_5_vl": "slipstream.families.qwen2_5_vl:Qwen2_5VL",
    "qwen2_vl": "slipstream.families.qwen2_vl:Qwen2VL",
    "qwen3_5": "slipstream.families.qwen3_5:Qwen3_5",
    "qwen3_5_moe": "slipstream.families.qwen3_5:Qwen3_5",
    "qwen3_vl": "slipstream.families.qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "slipstream.families.qwen3_vl:Qwen3VL",
    "smolvlm": "slipstream.families.smolvlm:SmolVLM",
    "video_llama_3": "slipstream.families.video_llama_3:VideoLlama3",
}
"""Model type -> its adapter, imported when first used."""


def load_model(
    ref: str,
    *,
    dtype: str = AUTO,
    device: str = "cpu",
    attention: str = "auto",
    strict_width: int = 0,
    group: Group | None = None,
    make_runner: Callable[..., Runner] | None = None,
) -> VideoLM:
    """Load a Video-LLM.

    Args:
        ref: a local directory, or an id on the Hugging Face hub.
        dtype: float32, bfloat16 or float16; auto: see `_dtype`.
        device: what `torch.device` understands.
        attention: one of `kernels.ATTENTION_NAMES`.
        strict_width: above 0, the width of every step, see `VideoLM.step`.
        group: the ranks that the model is spread over, of which this process is one and has `device`; None: no others.
        make_runner: what runs its passes; None: whatever is the fastest here.

    Raises:
        ModelNotUsable: the message says what is wrong and what to do.
    """
    _hand_over_logs()
    size = 1 if group is None else group.size
    with nullcontext() if group is None else group.checked():
        torch_device = open_device(device)
        checkpoint = _opened(ref, size)
        torch_dtype = _dtype(dtype, torch_device, checkpoint.stored_dtype)
        kernel = get_kernel(attention, torch_device, torch_dtype, masked_ends=strict_width > 0)
        make_adapter = _family(checkpoint)
        _check_room(checkpoint, torch_dtype, torch_device, size)
    if group is not None:
        group.compare(_shared_facts(checkpoint, torch_dtype, strict_width))
        group.connect(torch_device)
    with _digested(checkpoint, group) as revision, _saying_why(ref):
        checkpoint.check_tokenizer()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
        _check_tokens(checkpoint, tokenizer)
        model = _load_weights(checkpoint, torch_dtype, torch_device, group)
        adapter = make_adapter(model, checkpoint, tokenizer)
        _check_prompts(checkpoint, adapter, model.config.get_text_config().vocab_size)
    _check_attention(checkpoint, adapter.decoder, strict_width)
    if strict_width:
        take_rows_one_by_one(adapter.decoder, strict_width)
    _settle_positions(adapter.decoder)
    if torch_device.type == "cuda":
        _settle_weights(adapter)
    info = describe(checkpoint, model, adapter, tokenizer, revision.result())
    if make_runner is None:
        make_runner = _usual_runner(adapter, group)
    runner = make_runner(adapter.decoder, adapter.lm_head, kernel, fixed_shapes=strict_width > 0)
    text, template = TextDecoder(tokenizer.backend_tokenizer), ChatTemplate.for_text(tokenizer, checkpoint)
    return VideoLM(info, adapter, runner, text, template, strict_width=strict_width)


def _opened(ref: str, size: int) -> Checkpoint:
    """The checkpoint, which so many ranks can share. Raises `ModelNotUsable`."""
    checkpoint = Checkpoint.open(ref)
    if size > 1:
        check_checkpoint(ref, size)
    return checkpoint


@contextmanager
def _saying_why(ref: str) -> Iterator[None]:
    """Makes `ModelNotUsable` of what fails within: upstream raises dozens of types for a damaged checkpoint."""
    try:
        yield
    except ModelNotUsable:
        raise
    except torch.OutOfMemoryError as error:
        why = str(error).partition("\n")[0]
        raise ModelNotUsable(f"{ref}: there was no room any more while it was loaded; {_MORE_ROOM}: {why}") from error
    except Exception as error:
        raise ModelNotUsable(f"{ref}: cannot be loaded: {error}") from error


def _shared_facts(checkpoint: Checkpoint, dtype: torch.dtype, strict_width: int) -> dict[str, str]:
    """What the ranks of one model must have alike: each of `torchrun` has its own command line, and its own files."""
    kind = str(dtype).removeprefix("torch.")
    sample = checkpoint.sample()[:12]
    return {"release": __version__, "checkpoint": sample, "dtype": kind, "strict width": str(strict_width)}


def _hand_over_logs() -> None:
    """Leaves it to the process how transformers' messages look, and draws no progress bars between them."""
    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


def _dtype(name: str, device: torch.device, stored: str) -> torch.dtype:
    """What is named; auto: bfloat16 on CUDA, where it halves memory and time, float32 elsewhere. On a GPU without it,
    float16 for weights that are `stored` so, else float32: those made in bfloat16 may overflow in float16."""
    if name not in DTYPES:
        raise ModelNotUsable(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    if name != AUTO:
        return _DTYPES[name]
    if device.type != "cuda":
        return torch.float32
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16 if stored == "float16" else torch.float32


def open_device(name: str) -> torch.device:
    """The device called `name`, tried out: a name alone says nothing of what this machine has. A GPU becomes the one
    that this thread works on, for kernels of packages that ask no tensor where it is. Raises `ModelNotUsable`."""
    try:
        device = torch.device(name)
        if device.type == "cuda":
            _expand_segments()
        device = torch.empty(1, device=device).device  # which has an index, where a name may have none
        if device.type == "cuda":
            torch.cuda.set_device(device)
            _settle_maths()
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelNotUsable(f"device {name!r} is not usable here; {_devices_here()}: {reason}") from error
    return device


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _expand_segments() -> None:
    """Unless its user has told torch's allocator what to do, has it take and give back memory page by page: gaps in
    what it has taken, as of weights that were joined, else stay with it. Before it is used for the first time."""
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # which older versions do not have
    if tell is not None and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        tell("expandable_segments:True")


def _settle_maths() -> None:
    """For all that this process computes on a GPU: fp32 is fp32, which some images say it is not in their environment
    (`TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`); and attention is not cuDNN's, which torch takes first on some GPUs: it makes a
    plan on the host for each number of keys, of which every pass, every prompt and the end of every video has another.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_cudnn_sdp(False)


def _devices_here() -> str:
    """What to name instead."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return "torch sees no GPU, so use 'cpu', or check the driver and that torch is built for CUDA"
    which = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbered = "" if visible is None else f", numbered among those of CUDA_VISIBLE_DEVICES={visible}"
    return f"use 'cpu' or {which}{numbered}"


def _family(checkpoint: Checkpoint) -> AdapterFactory:
    if checkpoint.model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelNotUsable(f"{checkpoint.ref}: unknown architecture {checkpoint.model_type!r}; known: {known}")
    module_name, _, attribute = _FAMILIES[checkpoint.model_type].partition(":")
    return cast(AdapterFactory, getattr(import_module(module_name), attribute))


def _check_room(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, size: int) -> None:
    """That a GPU has room for its share of the weights, before any is read."""
    needed, free = checkpoint.num_weights() * dtype.itemsize // size, _free_bytes(device)
    if free is None or needed <= free:
        return
    advice = "take --dtype bfloat16" if dtype.itemsize > 2 else _MORE_ROOM
    whose = "its weights take" if size == 1 else f"a share of 1/{size} of its weights takes"
    raise ModelNotUsable(
        f"{checkpoint.ref}: {whose} {needed / 1e9:.1f} GB as {str(dtype).removeprefix('torch.')}, and {device}"
        f" has {free / 1e9:.1f} GB free: {(needed - free) / 1e9:.1f} GB are missing; {advice}"
    )


_MORE_ROOM = (
    "give target and draft a GPU each (--draft-device), or a target that has taken its share of this one less for keys"
    " and values (its --kv-budget-mb; slipstream up: --target-kv-budget-mb), spread it over more with --gpus, take a"
    " smaller checkpoint of the family, or end what else uses it"
)


def _free_bytes(device: torch.device) -> int | None:
    """None where weights are mapped from their files, and need not all be in memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


@contextmanager
def _digested(checkpoint: Checkpoint, group: Group | None) -> Iterator[Future[str]]:
    """Its revision, while it is loaded; given up where that fails. Of a follower, which nobody asks, none: it would
    read the whole checkpoint for a share of it."""
    given_up = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as digesting:
        try:
            is_asked = group is None or group.rank == 0
            yield digesting.submit(checkpoint.revision, given_up) if is_asked else digesting.submit(str)
        except BaseException:
            given_up.set()
            raise


def _load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None
) -> PreTrainedModel:
    """Straight to the device, shard by shard; of several ranks each its share, one from a slow disk much later."""
    if group is None:
        model = _read_weights(checkpoint, dtype, {"device_map": {"": device}})
    else:
        with group.checked(), shards_on(device, checkpoint.model_type):
            model = _read_weights(checkpoint, dtype, placement(checkpoint.model_type, group.size))
        localise(model, group.size)
    return cast(PreTrainedModel, model.eval())


def _read_weights(checkpoint: Checkpoint, dtype: torch.dtype, where: Mapping[str, Any]) -> PreTrainedModel:
    """`where`: keywords of `from_pretrained` for the device, or for this rank's share."""
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        checkpoint.path,
        dtype=dtype,
        **where,
        attn_implementation={"": "sdpa", "vision_config": "sdpa", "text_config": IMPLEMENTATION},
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, report = loaded  # a pair because of `output_loading_info`
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelNotUsable(f"{checkpoint.ref}: {len(missing)} weights are missing, for example {missing[0]}")
    return cast(PreTrainedModel, model)


def _settle_positions(decoder: Decoder) -> None:
    """Frequencies that follow the length of a text, "dynamic" ones, change beyond the context alone, and nothing is
    served there. Asked each time whether it was left they cost a GPU a wait a pass, and no graph holds them."""
    rotary: Any = decoder.rotary_emb
    if getattr(rotary, "rope_type", None) == "dynamic":
        rotary.rope_type = "default"


def _settle_weights(adapter: Adapter) -> None:
    """Joins the weights that static steps take joined, before anybody shares out what is free. A model without room for
    that goes on as it is."""
    if can_fuse(adapter.decoder, adapter.num_axes):
        with suppress(torch.OutOfMemoryError):
            join_weights(adapter.decoder)
    torch.cuda.empty_cache()


def _usual_runner(adapter: Adapter, group: Group | None) -> Callable[..., Runner]:
    """The fastest here of a model's passes in one process, or what runs those of a rank that follows."""
    if "linear_attention" in _kinds_of_layers(adapter.decoder.config):
        from slipstream.engine.recurrent.runner import RecurrentRunner

        return RecurrentRunner
    return Runner if group is not None else partial(fastest_runner, num_axes=adapter.num_axes)


def _check_attention(checkpoint: Checkpoint, decoder: Decoder, strict_width: int) -> None:
    """That the text model calls our attention, without which a window would not see what was before it, and that it
    has full attention in every layer, or a recurrence that is known here."""
    config: Any = decoder.config
    if config._attn_implementation != IMPLEMENTATION:
        raise ModelNotUsable(
            f"{checkpoint.ref}: its text model took attention {config._attn_implementation!r}, not ours; this"
            " version of transformers loads it in another way than Slipstream knows, please report it"
        )
    kinds = _kinds_of_layers(config)
    if "linear_attention" in kinds:
        from slipstream.engine.recurrent.runner import check_recurrence

        check_recurrence(checkpoint.ref, decoder, strict_width)
    if kinds - {"linear_attention"} != {"full_attention"}:
        raise ModelNotUsable(f"{checkpoint.ref}: only full attention is supported, not {', '.join(sorted(kinds))}")


def _kinds_of_layers(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or [_usual_layer(config)])


def _check_tokens(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> None:
    """That the model knows all tokens that words become: one that it does not, in anybody's prompt, would cost a GPU
    its context. Words become no special ones; of these see `_check_prompts`."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    largest = max(set(tokenizer.get_vocab().values()) - special)
    config: Any = AutoConfig.from_pretrained(checkpoint.path).get_text_config()
    _check_known(checkpoint, f"its tokenizer has tokens up to {largest}", largest, config.vocab_size)


def _check_prompts(checkpoint: Checkpoint, adapter: Adapter, vocab_size: int) -> None:
    """That the model knows what stands around words, such as a mark for each frame. A token that none but its processor
    sees, such as InternVL3's for a video, it need not know."""
    for chat in (Chat("?"), Chat("?", system="?", turns=("?", "?"))):
        with suppress(InvalidRequest):  # not every model takes turns
            largest = max(adapter.plan_prompt(chat, FrameFacts(adapter.frames_per_step)).token_ids)
            _check_known(checkpoint, f"its prompts have token {largest}", largest, vocab_size)


def _check_known(checkpoint: Checkpoint, what: str, token_id: int, vocab_size: int) -> None:
    if token_id >= vocab_size:
        raise ModelNotUsable(
            f"{checkpoint.ref}: {what}, and the model knows those below {vocab_size}; where tokens were added the model"
            " must be enlarged (resize_token_embeddings) and saved with them"
        )


def _usual_layer(config: Any) -> str:
    """The kind of all layers where a config does not list them, such as Mistral's."""
    window = getattr(config, "sliding_window", None)
    return "sliding_attention" if window and window < config.max_position_embeddings else "full_attention"
