"""Roots and sums that have the same bits under every library."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from fp4graph.numerics.exact import root, total


@pytest.mark.slow
def test_the_root_of_every_significand_is_correctly_rounded():
    """Of all fp32 numbers in [1, 4): every other root is the root of one of them times a power of two.

    With x = X·2^-23 and its root R·2^-23, in integers: (2R - 1)² < 4·X·2^23 < (2R + 1)² says that R is nearer to the
    exact root than R ± 1.
    """
    step = 1 << 21
    for start in range(127 << 23, 129 << 23, step):
        x = torch.arange(start, start + step, dtype=torch.int32).view(torch.float32)
        rounded = (root(x).double() * 2**23).long()
        number = (x.double() * 2**23).long() << 25
        assert ((2 * rounded - 1).square() < number).all()
        assert (number < (2 * rounded + 1).square()).all()


@pytest.mark.parametrize("ulps", [-2, -1, 1, 2])
def test_a_library_that_is_ulps_off_gives_the_same_root(ulps, monkeypatch):
    x = torch.randint(1, 255 << 23, (1 << 20,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x = torch.cat([x.view(torch.float32), torch.arange(1.0, 5000.0).square()])
    expected = root(x)
    sqrt = torch.sqrt
    monkeypatch.setattr(torch, "sqrt", lambda y: (sqrt(y).view(torch.int64) + ulps).view(torch.float64))
    assert torch.equal(root(x), expected)


@pytest.mark.parametrize("exponent", [-149, -148, -140, -127, -126, -75, 0, 60, 127])
def test_roots_at_all_exponents(exponent):
    """Against Python's integer root, floor(2·√x·2^99), cut to 25 significant bits: the 24 of fp32 and one to round."""
    for mantissa in (0, 1, 0x2AAAAA, 0x3504F3, 0x3504F4, 0x7FFFFF):
        x = torch.tensor(math.ldexp(1 + mantissa / 2**23, exponent))
        exact = Fraction(x.item())
        shift = 2 * (23 + 76)
        twice = math.isqrt(int(4 * exact * 2**shift))  # the root in units of 2^-100
        bits = twice.bit_length() - 25
        half, rest = twice >> bits, twice & ((1 << bits) - 1)
        rounded = (half >> 1) + (half & 1)
        assert not (half & 1 and rest == 0 and (twice * twice == int(4 * exact * 2**shift))), "no root is a midpoint"
        assert root(x).item() == math.ldexp(rounded, bits - 99)


def test_roots_of_zero_infinity_negative_numbers_and_nan():
    assert root(torch.tensor([0.0, math.inf])).tolist() == [0.0, math.inf]
    assert root(torch.tensor([-1.0, math.nan])).isnan().all()


ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reversed": lambda x: x.flip(-1),
    "ascending": lambda x: x.sort(-1).values,
    "shuffled": lambda x: x[..., torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(0))],
}


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 3, 16, 1000])
@pytest.mark.parametrize("order", ORDERS)
def test_a_total_does_not_depend_on_the_order(order, length):
    generator = torch.Generator().manual_seed(length)
    x = torch.rand(200, length, generator=generator, dtype=torch.float64).pow(5)
    assert torch.equal(total(ORDERS[order](x), (-1,), length), total(x, (-1,), length))
    if length >= 16 and order == "ascending":
        assert not torch.equal(x.sum(-1), sum(ORDERS[order](x).unbind(-1)))  # a plain sum does
    torch.testing.assert_close(total(x, (-1,), length), x.sum(-1, keepdim=True), rtol=0, atol=length * 2.0**-42)


def test_a_total_of_numbers_above_one_and_of_nan():
    ones = torch.ones(3, 5, 7, dtype=torch.float64)
    assert torch.equal(total(2 * ones, (0, 2), 21), torch.full((1, 5, 1), 21.0, dtype=torch.float64))
    assert total(ones * math.nan, (0, 1, 2), 105).isnan().all()
