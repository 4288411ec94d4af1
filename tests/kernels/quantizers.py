"""Quantizers and tensors for tests of kernels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fp4graph.kernels.operators import tensor_code
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.formats import ELEMENTS, SCALES, ElementFormat
from fp4graph.numerics.noise import derive, make_key, make_step, mix
from fp4graph.numerics.spec import POWERS_OF_TWO, QuantSpec, ScaleSpec
from tests.helpers.floats import blocks_of_every_scale, critical_points

KEY, STEP, SALTS = make_key("kernels"), make_step(0, 0, 3), (4, 9)
SOURCE = Draw(KEY, STEP, SALTS)
#: The key that tensor code derives from :data:`SOURCE`.
DERIVED = derive(derive(mix(KEY, STEP[:2]), SALTS[0]), SALTS[1])
MXFP4 = QuantSpec("e2m1", 32, ScaleSpec("e8m0", "ceil"), "nearest", "up")
STOCHASTIC = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "stochastic"), "stochastic")

RULES = (
    *(("decode", r) for r in ("floor", "ceil", "nearest_even", "toward_positive", "stochastic")),
    *(("decode", r) for r in ("amax_ceil", "amax_even")),
    *(("encode", r) for r in ("nearest_even", "stochastic")),
    *((convention, "nearest_even", "even") for convention in ("decode", "encode")),  # ties of powers of two
)
#: Rounding of elements: (rounding, ties, random bits).
ROUNDINGS = (*(("nearest", t, 24) for t in ("even", "up", "away")), *(("stochastic", "even", b) for b in (24, 8, 1)))
CHOICES: dict[str, tuple[Any, ...]] = {
    "element": tuple(ELEMENTS),
    "block": (10, 16, 32, 64),
    "scale": tuple(SCALES),
    "rule": RULES,
    "zero": ("nearest_subnormal", "to_one"),
    "rounding": ROUNDINGS,
    "dtype": (torch.float32, torch.bfloat16),
}
Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(row: Row) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))


def covering() -> Iterator[Row]:
    """Yield a row for every element format with every rounding. Of 300 random choices of the other values, a row takes
    the choice with most pairs of values that no earlier row has."""
    seen: set[Pair] = set()
    draw = random.Random(0)
    for element, rounding in itertools.product(CHOICES["element"], CHOICES["rounding"]):
        drawn = [{name: draw.choice(values) for name, values in CHOICES.items()} for _ in range(300)]
        rows = [{**row, "element": element, "rounding": rounding} for row in drawn if _possible(row)]
        best = max(rows, key=lambda row: len(pairs(row) - seen))
        seen |= pairs(best)
        yield best


def _possible(row: Row) -> bool:
    """Return whether the scale format has the rule: only E8M0 has rules of powers of two and ties of its own."""
    _, rule, *scale_ties = row["rule"]
    return not (rule in POWERS_OF_TWO or scale_ties) or not SCALES[row["scale"]].mantissa_bits


def spec_of(row: Row) -> QuantSpec:
    convention, rule, *scale_ties = row["rule"]
    rounding, ties, bits = row["rounding"]
    scale = ScaleSpec(row["scale"], rule, convention, row["zero"], *scale_ties)
    return QuantSpec(row["element"], row["block"], scale, rounding, ties, random_bits=bits)


def name_of(row: Row) -> str:
    flat = [part for value in row.values() for part in (value if isinstance(value, tuple) else (value,))]
    return "-".join(str(part).removeprefix("torch.") for part in flat)


def hostile(shape: tuple[int, ...], block: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return rows of all magnitudes. Among their blocks are those at which scale rules change, zeros of both signs, and
    some with one odd value: NaN, Inf, a subnormal, a value near the largest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.randint(-40, 40, (*shape[:-1], 1), generator=generator).float().exp2()
    if not x.numel():
        return x.to(dtype)
    lines = x.view(-1, shape[-1])
    if shape[-1] >= block:
        every = blocks_of_every_scale(block)
        tried = every[torch.randperm(len(every), generator=generator)[: len(lines) // 2]]
        lines[: len(tried), :block] = tried
    odd = [torch.nan, torch.inf, -torch.inf, 1e-45, -1e-40, 3.38e38, -3.38e38, -0.0]
    places = torch.randperm(x.numel(), generator=generator)[: min(len(odd), x.numel() // (4 * block))]
    x.view(-1)[places] = torch.tensor(odd[: len(places)])
    if len(lines) > 3:
        lines[3] = 0
        lines[3, : shape[-1] // 3] = -0.0
    return x.to(dtype)


def ties(element: ElementFormat, block: int) -> Tensor:
    """Return blocks of a format's values, its midpoints and their neighbours, each with the format's maximum. Under a
    rule that makes this a scale of one, elements are rounded at the midpoints."""
    points = torch.tensor(critical_points(element), dtype=torch.float32)
    points = points[points.abs() <= element.max]
    points = points[: len(points) // (block - 1) * (block - 1)].view(-1, block - 1)
    return torch.cat([points, torch.full((len(points), 1), element.max)], 1)


#: Layouts of a tensor whose last axis is C, each as a function of what fills a shape with values.
Fill = Callable[[tuple[int, ...]], Tensor]
LAYOUTS: dict[str, Callable[[Fill], Tensor]] = {
    "matrix": lambda fill: fill((66, 70)),
    "transposed": lambda fill: fill((70, 130)).mT,
    "batch of three axes": lambda fill: fill((3, 5, 37)),
    "batch of four axes": lambda fill: fill((2, 3, 5, 37)),
    "transposed in a batch": lambda fill: fill((2, 3, 37, 70)).mT,
    "heads": lambda fill: fill((2, 9, 3, 20)).transpose(1, 2),
    "heads, transposed": lambda fill: fill((2, 9, 3, 20)).permute(0, 2, 3, 1),
    "batch last": lambda fill: fill((9, 40, 3)).permute(2, 0, 1),
    "batch in the middle": lambda fill: fill((9, 3, 40)).transpose(0, 1),
    "expanded over the batch": lambda fill: fill((5, 37)).expand(3, 5, 37),
    "expanded over rows": lambda fill: fill((1, 37)).expand(70, 37),
    "expanded over columns": lambda fill: fill((70, 1)).expand(70, 37),
    "part of each row": lambda fill: fill((20, 70))[:, 3:47],
    "every second row": lambda fill: fill((40, 37))[::2],
    "every second column": lambda fill: fill((20, 70))[:, ::2],
    "part of each column, transposed": lambda fill: fill((70, 90))[:, 2:80].mT,
    "vector": lambda fill: fill((133,)),
    "every second of a vector": lambda fill: fill((133,))[::2],
    "one row": lambda fill: fill((1, 133)),
    "one row, transposed": lambda fill: fill((133, 1)).mT,
    "one column": lambda fill: fill((133, 1)),
    "one column, transposed": lambda fill: fill((1, 133)).mT,
    "one column in a batch, transposed": lambda fill: fill((3, 1, 133)).mT,
    "one element": lambda fill: fill((1, 1)),
    "one element with strides": lambda fill: fill((1, 8))[:, 2:3].as_strided((1, 1), (5, 7)),
    "less than a block": lambda fill: fill((3, 7)),
    "whole blocks and lanes": lambda fill: fill((64, 192)),
    "whole blocks and lanes, transposed": lambda fill: fill((192, 64)).mT,
    "no rows": lambda fill: fill((0, 40)),
    "no columns": lambda fill: fill((40, 0)),
    "no columns, transposed": lambda fill: fill((0, 40)).mT,
    "no batch": lambda fill: fill((0, 5, 40)),
    "empty vector": lambda fill: fill((0,)),
}


def by_both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the result of ``call`` by kernels, and by tensor code."""
    with tensor_code():
        expected = call()
    return call(), expected
