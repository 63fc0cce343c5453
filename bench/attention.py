"""Times the attention kernels on windows over a long past, one layer at a time as a model would run them.

`python -m bench.attention` prints milliseconds a layer: the best of repetitions that alternate between the kernels, so
that both see the same machine. Enough layers are cycled through that no past stays in a small cache.
"""

import argparse
import json
import time
from functools import partial

import torch

from slipstream.engine.attention import Kernel, get_kernel
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.segments import Segment

WINDOWS = (1, 2, 4, 8, 16)
KERNELS = ("matmul", "sdpa")


def filled_cache(kernel: Kernel, options: argparse.Namespace) -> KVCache:
    """A cache whose layers hold `options.past` random tokens."""
    cache = KVCache(
        options.layers,
        capacity=options.past + max(WINDOWS),
        key_layout=kernel.key_layout,
        value_layout=kernel.value_layout,
    )
    for layer in range(options.layers):
        keys, values = torch.randn(2, options.kv_heads, options.past, options.head_dim)
        cache.write(layer, keys, values)
    cache.advance(options.past)
    return cache


def run_layers(kernel: Kernel, cache: KVCache, query: torch.Tensor, kv_heads: int, num_layers: int) -> float:
    """Attend once in every layer, as one pass would; returns milliseconds a layer."""
    _, window_len, head_dim = query.shape
    keys, values = torch.randn(2, kv_heads, window_len, head_dim)
    segment = Segment(0, window_len, cache, cache.length, query.device, query.dtype)
    begin = time.perf_counter()
    for layer in range(num_layers):
        all_keys, all_values = cache.write(layer, keys, values)
        kernel.attend(query, all_keys, all_values, segment, head_dim**-0.5)
    return (time.perf_counter() - begin) / num_layers * 1e3


def measure(options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Kernel -> window -> milliseconds a layer."""
    runs = {}
    for name in KERNELS:
        kernel = get_kernel(name, torch.device("cpu"), torch.float32)
        runs[name] = partial(run_layers, kernel, filled_cache(kernel, options))
    table: dict[str, dict[int, float]] = {name: {} for name in KERNELS}
    for window_len in WINDOWS:
        query = torch.randn(options.heads, window_len, options.head_dim)
        times: dict[str, list[float]] = {name: [] for name in KERNELS}
        for _ in range(options.repeats):
            for name, run in runs.items():
                times[name].append(run(query, options.kv_heads, options.layers))
        for name in KERNELS:
            table[name][window_len] = round(min(times[name]), 4)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--past", type=int, default=6272, help="tokens in the cache")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        table = measure(options)
    print(f"{'window':10}{''.join(f'{window_len:>9}' for window_len in WINDOWS)}")
    for name, row in table.items():
        print(f"{name:10}{''.join(f'{milliseconds:9.3f}' for milliseconds in row.values())}")
    print(json.dumps({"milliseconds_a_layer": table, "options": vars(options)}))


if __name__ == "__main__":
    main()
