"""Scales of blocks beside the tensor code, and order statistics beside numpy's sort, bit for bit."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp4graph.kernels import statistics
from fp4graph.numerics import scaling
from fp4graph.numerics.formats import SCALES
from fp4graph.numerics.spec import POWERS_OF_TWO, QuantSpec, ScaleSpec
from tests.helpers.floats import any_floats, assert_same_bits, blocks_of_every_scale
from tests.helpers.operators import check_declaration
from tests.kernels.quantizers import RULES, by_both

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


def specs() -> list[Any]:
    """Every scale format with every rule that it can have and that draws nothing; all but two formats are `long`."""
    rules = [rule for rule in RULES if rule[1] != "stochastic"]
    scales = [
        ScaleSpec(name, rule, convention, ties=ties[0] if ties else None)
        for name, (convention, rule, *ties) in itertools.product(SCALES, rules)
        if not (rule in POWERS_OF_TWO or ties) or not SCALES[name].mantissa_bits
    ]
    return [
        pytest.param(
            QuantSpec("e2m1", block, scale),
            id=f"{scale.format.name}-{scale.rounding}-{scale.convention}-{scale.ties}",
            marks=[] if scale.format.name in ("e8m0", "e4m3") else pytest.mark.long,
        )
        for scale, block in zip(scales, [16, "row", (16, 16)] * 99, strict=False)
    ]


@pytest.mark.parametrize("spec", specs())
def test_scales_of_any_statistic(spec):
    z, edges = any_floats((50_000,)).abs(), blocks_of_every_scale(1).abs().flatten()
    z[: len(edges)] = edges
    z[-1] = torch.tensor(-(2**22), dtype=torch.int32).view(torch.float32)  # a NaN with a sign
    for statistic in (z, z.view(100, 500).mT, z[:0]):
        found = statistics.block_scale(statistic, spec)
        assert_same_bits(found, scaling.block_scale(statistic, spec.scale, spec.element))


def awkward(count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of every magnitude and both signs, infinities, both zeros and equals among them, no NaN."""
    x = any_floats((count,), seed=count).to(dtype)
    x[::7] = x[0]
    x[1::11] = 0.0
    x[2::11] = -0.0
    return torch.where(x == x, x, math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 33, 100_001])
def test_order_statistics_are_those_of_a_sorted_copy(count, dtype):
    x = awkward(count, dtype)
    ordered = np.sort(x.double().numpy())
    for place in {0, count // 100, count // 3, count - 1}:
        (low, high), expected = by_both(partial(statistics.order_statistics, x, place))
        assert (low.dtype, low.dim(), high.dim()) == (dtype, 0, 0)
        assert (low.item(), high.item()) == (ordered[place], ordered[count - 1 - place])
        assert (low, high) == expected


def test_no_elements_have_no_order():
    for found in by_both(lambda: statistics.order_statistics(torch.empty(0), 0)):
        assert found == (-math.inf, math.inf)


_x = torch.randn(6, 70)
#: Arguments of operators, by their names and a remark.
OPERATORS: dict[str, tuple[Any, ...]] = {
    "block_scale": (_x.abs().view(2, 3, 70), QuantSpec().to_text()),
    "block_scale, transposed": (_x.abs().mT, QuantSpec().to_text()),
    "order_statistics": (_x.view(-1), 4),
    "order_statistics, bf16": (_x.bfloat16().view(-1), 0),
    "order_statistics, of nothing": (_x[:0].view(-1), 0),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_operators_keep_their_promises(case):
    check_declaration(case.partition(",")[0], OPERATORS[case])
