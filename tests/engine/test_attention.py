"""Every kernel computes the textbook formula, over packed segments of different pasts."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from slipstream.engine import attention
from slipstream.engine.attention import (
    IMPLEMENTATION,
    FlashKernel,
    Kernel,
    MatmulKernel,
    SdpaKernel,
    attend_segments,
    packed_attention,
)
from slipstream.engine.kernels import get_kernel
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.segments import Segment
from slipstream.errors import ModelNotUsable

HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5


def textbook(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention aligned to the end, in float64: [heads, n, d] over [kv_heads, total, d] -> [n, heads, d]."""
    query, keys, values = query.double(), keys.double(), values.double()
    num_rows, total = query.shape[1], keys.shape[1]
    repeats = query.shape[0] // keys.shape[0]
    scores = query @ keys.repeat_interleave(repeats, 0).transpose(1, 2) * SCALE
    unseen = torch.ones(num_rows, total, dtype=torch.bool).triu(1 + total - num_rows)
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    output: Tensor = weights @ values.repeat_interleave(repeats, 0)
    return output.transpose(0, 1).float()


@pytest.mark.parametrize("kernel", [MatmulKernel(), SdpaKernel()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (2, 2), (6, 2)])
def test_packed_segments_equal_the_textbook(kernel: Kernel, heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(heads * 10 + kv_heads)
    layer = nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    shapes = [(0, 5), (70, 1), (9, 4), (3, 130), (0, 1)]  # past, new rows
    rows = sum(num_rows for _, num_rows in shapes)
    query = torch.randn(1, heads, rows, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, 1, kv_heads, rows, HEAD_DIM, generator=generator)
    segments, expected, start = [], [], 0
    for past, num_rows in shapes:
        cache = KVCache(1, capacity=256, key_layout=kernel.key_layout, value_layout=kernel.value_layout)
        past_keys, past_values = torch.randn(2, kv_heads, past, HEAD_DIM, generator=generator)
        cache.write(0, past_keys, past_values)
        cache.advance(past)
        segment = Segment(start, num_rows, cache, past, query.device, query.dtype)
        new = segment.rows
        keys = torch.cat([past_keys, key[0, :, new]], dim=1)
        values = torch.cat([past_values, value[0, :, new]], dim=1)
        expected.append(textbook(query[0, :, new], keys, values))
        segments.append(segment)
        start += num_rows
    attend = partial(attend_segments, segments, kernel)
    output, weights = packed_attention(layer, query, key, value, None, scaling=SCALE, attend=attend)
    assert weights is None
    torch.testing.assert_close(output[0], torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_a_long_segment_is_attended_in_blocks_with_a_small_mask_each(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, num_rows, past = SdpaKernel(), 130, 3
    query, (keys, values) = torch.randn(4, num_rows, HEAD_DIM), torch.randn(2, 2, past + num_rows, HEAD_DIM)
    masks: list[int] = []
    mask_of = Segment.mask_of
    monkeypatch.setattr(Segment, "mask_of", lambda *asked: (mask := mask_of(*asked), masks.append(len(mask)))[0])
    monkeypatch.setattr(attention, "_MAX_MASKED", 32)
    cache = KVCache(1, capacity=256, key_layout=kernel.key_layout, value_layout=kernel.value_layout)
    segment = Segment(0, num_rows, cache, past, query.device, query.dtype)
    output = kernel.attend(query, keys, values, segment, SCALE)
    torch.testing.assert_close(output.transpose(0, 1), textbook(query, keys, values), rtol=1e-5, atol=1e-5)
    assert masks == [64, 64, 64, 64, 4], "two query heads share keys"


def test_a_prompt_has_a_key_for_each_query_where_only_then_no_scores_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's attention in little memory takes no grouped heads, and what does keeps the matrix of all scores."""
    asked, attend = list[tuple[int, bool]](), attention.scaled_dot_product_attention

    def counted(query: Tensor, keys: Tensor, *others: Any, **options: Any) -> Tensor:
        asked.append((keys.shape[1], options["enable_gqa"]))
        return attend(query, keys, *others, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", counted)
    query, (keys, values) = torch.randn(4, 5, HEAD_DIM), torch.randn(2, 2, 5, HEAD_DIM)
    shared = SdpaKernel().attend_causal(query, keys, values, SCALE)
    monkeypatch.setattr(attention, "heads_share_keys", lambda device, dtype: False)
    torch.testing.assert_close(SdpaKernel().attend_causal(query, keys, values, SCALE), shared)
    assert asked == [(2, True), (4, False)]


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "expected"),
    [
        ("cpu", torch.float32, None, True),
        ("cuda", torch.float32, (9, 0), False),
        ("cuda", torch.bfloat16, (8, 0), True),
        ("cuda", torch.float16, (7, 5), False),
    ],
)
def test_heads_share_keys_where_flash_attention_runs(
    device: str, dtype: torch.dtype, capability: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert attention.heads_share_keys(torch.device(device), dtype) is expected


def test_the_function_is_registered_with_transformers() -> None:
    assert AttentionInterface()[IMPLEMENTATION] is packed_attention


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("cpu", torch.bfloat16, SdpaKernel), ("cuda", torch.float32, SdpaKernel)],
)
def test_auto_takes_the_fastest_that_works(device: str, dtype: torch.dtype, expected: type) -> None:
    assert type(get_kernel("auto", torch.device(device), dtype)) is expected


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        ("flash_attn_func = len", FlashKernel),
        ("", SdpaKernel),
        ("raise OSError('libtorch_cuda.so: undefined symbol')", SdpaKernel),
    ],
    ids=["that fits", "a relative of that name", "for another torch"],
)
def test_flash_attention_is_taken_where_its_package_can_be_imported(
    package: str, expected: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / ("__init__.py" if package else "cute.py")).write_text(package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    on_gpu = torch.device("cuda"), torch.bfloat16
    assert type(get_kernel("auto", *on_gpu)) is expected
    if expected is SdpaKernel:
        with pytest.raises(ModelNotUsable, match="fits this torch"):
            get_kernel("flash", *on_gpu)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
