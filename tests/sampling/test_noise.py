"""The random numbers: exact bits, and no pattern over tokens, positions, streams or seeds."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from slipstream.sampling.noise import (
    TABLE_NUMBERS,
    Races,
    Stream,
    exponentials,
    key_tensor,
    position_key,
    random_bits,
    uniform,
    uniforms,
)
from tests.sampling.statistics import P_FLOOR, chi_square, chi_square_tail

CPU = torch.device("cpu")
GOLDEN_EXPONENTIALS = ["0x1.2449f625601bdp-1", "0x1.630964f74039dp+1", "0x1.a981ad1c51941p-1"]
"""Seed 2, stream CHOICE, position 0, tokens 0 to 2."""


def reference_bits(seed: int, stream: int, position: int, token_id: int) -> int:
    """The definition once more, in big integers and as one chain: three key steps, then the token's."""

    def finalise(z: int) -> int:
        z = ((z ^ (z // 2**30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z // 2**27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z // 2**31)

    state = finalise((seed + 0x9E3779B97F4A7C15) % 2**64)
    for counter in (stream, position + 1, token_id + 1):
        state = finalise((state + counter * 0x9E3779B97F4A7C15) % 2**64)
    return state


def bits_at(seed: int, stream: Stream, positions: range, num_tokens: int) -> Tensor:
    """Int64 [positions, tokens]."""
    keys = key_tensor([position_key(seed, stream, position) for position in positions], CPU)
    return random_bits(keys[:, None], torch.arange(num_tokens))


def uniformity(numbers: Tensor, bins: int = 64) -> float:
    """p-value of a chi-square test that the numbers are uniform on (0, 1)."""
    counts = (numbers.flatten() * bins).long().bincount(minlength=bins).tolist()
    return chi_square_tail(*chi_square(counts, [numbers.numel() / bins] * bins))


def independence(first: Tensor, second: Tensor, bins: int = 16) -> float:
    """p-value of a chi-square test that pairs are uniform on the unit square."""
    cells = (first.flatten() * bins).long() * bins + (second.flatten() * bins).long()
    counts = cells.bincount(minlength=bins**2).tolist()
    return chi_square_tail(*chi_square(counts, [first.numel() / bins**2] * bins**2))


def test_splitmix64_is_the_published_generator() -> None:
    first_of_seed_zero = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    bits = random_bits(key_tensor([0], CPU), torch.arange(3)).tolist()
    assert [value % 2**64 for value in bits] == first_of_seed_zero


@pytest.mark.parametrize(
    ("seed", "stream", "position", "token_id"),
    [
        (0, Stream.CHOICE, 0, 0),
        (1, Stream.CHOICE, 0, 1),
        (7, Stream.ACCEPT, 3, 151_935),
        (2**63 - 1, Stream.RESIDUAL, 4095, 99),
        (123_456_789_012, Stream.CHOICE, 2**31, 65_537),
    ],
)
def test_the_bits_are_those_of_big_integers(seed: int, stream: Stream, position: int, token_id: int) -> None:
    bits = random_bits(key_tensor([position_key(seed, stream, position)], CPU), torch.tensor([token_id]))
    assert int(bits) % 2**64 == reference_bits(seed, stream, position, token_id)


def test_one_number_of_a_key_is_that_of_token_zero() -> None:
    for seed in range(50):
        key = position_key(seed, Stream.ACCEPT, seed)
        assert uniform(key) == float(uniforms(random_bits(key_tensor([key], CPU), torch.tensor([0]))))


def test_uniform_numbers_never_reach_their_bounds() -> None:
    extremes = uniforms(torch.tensor([0, -1, 2**63 - 1, -(2**63), 4095]))
    assert float(extremes.min()) == 2.0**-53
    assert float(extremes.max()) == 1 - 2.0**-53
    assert bool((exponentials(torch.tensor([0, -1])) > 0).all())


def test_exponentials_are_exact_logarithms() -> None:
    bits = torch.cat([bits_at(5, Stream.CHOICE, range(20), 1000).flatten(), torch.tensor([0, -1, 4096, -4097])])
    exact = [-math.log(u) for u in uniforms(bits).tolist()]
    errors = [abs(ours / theirs - 1) for ours, theirs in zip(exponentials(bits).tolist(), exact, strict=True)]
    assert max(errors) < 1e-15


def test_exponentials_hold_to_the_last_bit() -> None:
    numbers = exponentials(bits_at(2, Stream.CHOICE, range(1), 3))[0].tolist()
    assert [number.hex() for number in numbers] == GOLDEN_EXPONENTIALS


def test_numbers_do_not_depend_on_how_they_are_asked_for() -> None:
    whole = bits_at(3, Stream.CHOICE, range(40), 500)
    assert torch.equal(
        whole[17:18, 100:],
        random_bits(key_tensor([position_key(3, Stream.CHOICE, 17)], CPU), torch.arange(100, 500))[None],
    )


def test_tokens_and_positions_are_uniform() -> None:
    numbers = uniforms(bits_at(0, Stream.CHOICE, range(256), 1024))
    assert uniformity(numbers) > P_FLOOR
    assert min(uniformity(numbers[:, token], bins=16) for token in range(0, 1024, 100)) > P_FLOOR
    assert min(uniformity(row) for row in numbers[:16]) > P_FLOOR
    low_bits = uniforms(bits_at(0, Stream.CHOICE, range(256), 1024) << 40)
    assert uniformity(low_bits) > P_FLOOR


def test_neighbours_are_independent() -> None:
    numbers = uniforms(bits_at(9, Stream.CHOICE, range(257), 1025))
    assert independence(numbers[1:], numbers[:-1]) > P_FLOOR
    assert independence(numbers[:, 1:], numbers[:, :-1]) > P_FLOOR
    assert independence(numbers[1:, 1:], numbers[:-1, :-1]) > P_FLOOR


def test_streams_and_seeds_are_independent() -> None:
    streams = [uniforms(bits_at(4, stream, range(64), 1024)) for stream in Stream]
    assert min(independence(first, second) for first, second in combinations(streams, 2)) > P_FLOOR
    seeds = [uniforms(bits_at(seed, Stream.CHOICE, range(64), 1024)) for seed in (0, 1, 2, 2**62)]
    assert min(independence(first, second) for first, second in combinations(seeds, 2)) > P_FLOOR


def test_accept_numbers_are_uniform_over_seeds_and_positions() -> None:
    numbers = torch.tensor([[uniform(position_key(seed, Stream.ACCEPT, n)) for n in range(8)] for seed in range(4000)])
    assert min(uniformity(numbers[:, n], bins=32) for n in range(8)) > P_FLOOR
    assert min(independence(numbers[:, a], numbers[:, b], bins=8) for a, b in combinations(range(8), 2)) > P_FLOOR


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_the_same_bits() -> None:
    bits = bits_at(6, Stream.CHOICE, range(64), 50_000)
    keys = key_tensor([position_key(6, Stream.CHOICE, position) for position in range(64)], torch.device("cuda"))
    gpu_bits = random_bits(keys[:, None], torch.arange(50_000, device="cuda"))
    assert torch.equal(gpu_bits.cpu(), bits)
    assert torch.equal(exponentials(gpu_bits).cpu(), exponentials(bits))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_tokens_that_cannot_win_need_no_noise(share: float) -> None:
    """A large vocabulary: rows with zeros are run one by one, by those alone that may win."""
    vocab = TABLE_NUMBERS + 1
    generator = torch.Generator().manual_seed(4)
    weights = torch.rand(3, vocab, dtype=torch.float64, generator=generator)
    weights[torch.rand(3, vocab, generator=generator) < share] = 0.0
    races = Races(9, vocab)
    keys = key_tensor([position_key(9, Stream.CHOICE, 5 + row) for row in range(3)], weights.device)
    noise = exponentials(random_bits(keys[:, None], torch.arange(vocab)))
    assert races.choose(weights, 5) == (weights / noise).argmax(dim=-1).tolist()
