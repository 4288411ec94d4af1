"""The normal variates: moments, tails, independence, and the same numbers however they are computed."""

from __future__ import annotations

import math

import pytest
import torch

from fp4graph.numerics.noise import derive, gaussian, hash_bits, make_key

N = 1 << 20
INDEX = torch.arange(N, dtype=torch.int32)


def words(key: torch.Tensor, index: int) -> list[int]:
    """The twelve 16-bit words of one element."""
    bits = [
        int(hash_bits(derive(key, salt), torch.tensor([index], dtype=torch.int32))) & 0xFFFFFFFF for salt in range(6)
    ]
    return [word for b in bits for word in (b & 0xFFFF, b >> 16)]


def test_it_is_the_sum_of_twelve_words_exactly() -> None:
    key = make_key("gaussian")
    expected = [(sum(words(key, i)) - 12 * 65535 / 2) / 65536 for i in range(200)]
    z = gaussian(key, INDEX[:200])
    assert z.dtype is torch.float32
    assert z.tolist() == expected


def test_moments_within_the_error_of_sampling() -> None:
    for seed in range(3):
        z = gaussian(make_key(seed), INDEX).double()
        assert abs(z.mean()) < 5 / math.sqrt(N)
        assert abs(z.var() - 1) < 5 * math.sqrt(1.9 / N)  # the variance of a square is its kurtosis less 1
        assert abs((z**3).mean()) < 5 * math.sqrt(15 / N)
        assert abs((z**4).mean() - 2.9) < 5 * math.sqrt(85 / N)  # 3 would be 11 standard errors away


def test_tails() -> None:
    z = gaussian(make_key("tails"), INDEX).double().abs()
    for bound, mass in ((1, 0.32157), (2, 0.044578), (3, 0.0020159)):
        assert abs((z > bound).double().mean() - mass) < 5 * math.sqrt(mass / N)
    assert 4 < z.max() < 6


def test_keys_indices_and_neighbours_are_independent() -> None:
    base = make_key(0)
    keys = [base, make_key(1), derive(base, 0), derive(base, 1), derive(base, 6)]
    table = torch.stack([gaussian(key, INDEX[: N >> 3]) for key in keys]).double()
    table = torch.cat([table, table[:1].roll(1), table[:1].roll(32)])
    for power in (1, 2):
        correlation = torch.corrcoef(table**power)
        correlation.fill_diagonal_(0)
        assert correlation.abs().max() < 5 / math.sqrt(N >> 3)


@pytest.mark.inductor
@pytest.mark.compiler
def test_compiled_code_draws_the_same() -> None:
    torch._dynamo.reset()
    key = make_key("compiled")
    assert torch.equal(torch.compile(gaussian)(key, INDEX[:5000]), gaussian(key, INDEX[:5000]))
