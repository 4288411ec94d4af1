"""Data that finds mistakes, and a comparison that tells -0.0 from 0.0."""

from __future__ import annotations

import itertools
import math

import torch

from fp4graph.numerics.formats import ElementFormat


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare two tensors to the last bit, signs of zeros included; all NaNs count as equal."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    a, b = (t.contiguous().view(integer).masked_fill(nan, 0) for t in (actual, expected))
    differing = (a != b).nonzero()
    assert not len(differing), (
        f"{len(differing)} of {a.numel()} differ, first at {differing[0].tolist()}: "
        f"{actual[tuple(differing[0])].item()!r} is not {expected[tuple(differing[0])].item()!r}"
    )


def any_floats(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return finite fp32 numbers of uniformly random bits: all exponents, subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    return torch.where(x.isfinite(), x, torch.ones(()))


def around(values: list[float]) -> list[float]:
    """Return each value and its two fp32 neighbours, with both signs."""
    t = torch.tensor(values, dtype=torch.float32)
    up, down = t.nextafter(torch.tensor(math.inf)), t.nextafter(torch.tensor(-math.inf))
    return torch.cat([t, up, down, -t, -up, -down]).tolist()


def critical_points(element: ElementFormat) -> list[float]:
    """Return the values and midpoints of a format, their fp32 neighbours, and numbers far from all values."""
    grid = element.magnitudes()
    middles = [(a + b) / 2 for a, b in itertools.pairwise(grid)]
    far = [0.49999997, 2 * element.max, 1e30, 3.4e38, 1e-30, 2.0**-149, 2.0**-126]
    return around([*grid, *middles, *far])


def blocks_of_every_scale(size: int) -> torch.Tensor:
    """Return blocks ``[n, size]`` whose maxima lie at, and one ulp around, the steps of a scale rule's result."""
    maxima: list[float] = [0.0, 2.0**-149, 3 * 2.0**-149, 2.0**-127, 3.3e38, (2 - 2.0**-23) * 2.0**127]
    exponents = (-140, -128, -127, -126, -125, -124, -30, -18, -17, -16, -14, -9, -8, -6, -1, 0, 1, 5, 8, 11, 18, 120)
    for exponent in exponents:
        for mantissa in (1.0, 1.25, 1.5, 1.75, 1.0625 * 1.5, 1.75 * 1.3125, 127 / 64):
            if 2.0**exponent * mantissa < 3e38:
                maxima.append(2.0**exponent * mantissa)
    tops = torch.tensor(around(maxima), dtype=torch.float32).abs()
    tops = tops[tops.isfinite()]
    generator = torch.Generator().manual_seed(1)
    block = torch.rand(len(tops), size, generator=generator) * 2 - 1
    block[:, size // 2] = torch.where(torch.arange(len(tops)) % 2 == 0, 1.0, -1.0)
    return block * tops[:, None]
