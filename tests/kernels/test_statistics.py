"""Operators give the bits of tensor code for scales, errors, moments and choices of blocks; order statistics equal
numpy's sort, and means are close to exact means in rational numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp4graph.kernels import measures, statistics
from fp4graph.numerics import scaling
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.formats import E2M1, INT4, SCALES
from fp4graph.numerics.noise import Noise, make_key
from fp4graph.numerics.rounding import round_nearest
from fp4graph.numerics.spec import POWERS_OF_TWO, QuantSpec, ScaleSpec
from tests.helpers.floats import any_floats, assert_same_bits, blocks_of_every_scale
from tests.helpers.operators import check_declaration
from tests.kernels.quantizers import RULES, by_both

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


def specs() -> list[Any]:
    """Return a spec for each scale format and each of its rules except stochastic; only two formats are not `long`."""
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
        expected = scaling.block_scale(statistic, spec.scale, spec.element)
        assert_same_bits(statistics.block_scale(statistic, spec), expected)


def awkward(count: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of every magnitude and both signs, with equal numbers, both zeros and Inf, without NaN."""
    x = any_floats((count,), seed=count).to(dtype)
    x[::7] = x[0]
    x[1::11] = 0.0
    x[2::11] = -0.0
    return torch.where(x == x, x, math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "threads"), [(1, 1), (2, 1), (33, 1), (100_001, 1), (1_200_000, 2)])
def test_order_statistics_are_those_of_a_sorted_copy(count, threads, dtype, set_threads):
    """The last count is large enough for two threads in both of the kernel's passes."""
    set_threads(threads)
    x = awkward(count, dtype)
    ordered = np.sort(x.double().numpy())
    for place in {0, count // 100, count // 3, count - 1}:
        (low, high), expected = by_both(partial(statistics.order_statistics, x, place))
        assert (low.dtype, low.dim(), high.dim()) == (dtype, 0, 0)
        assert (low.item(), high.item()) == (ordered[place], ordered[count - 1 - place])
        assert (low, high) == expected


def test_order_statistics_of_no_elements_are_infinite():
    for bounds in by_both(lambda: statistics.order_statistics(torch.empty(0), 0)):
        assert bounds == (-math.inf, math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (1000, 33), (257, 200), (2, 20, 5)], ids=str)
def test_means_are_close_to_those_of_rational_numbers(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(shape[-1]).sub(70).float()
    x = torch.where(x.abs() < torch.finfo(dtype).max, x, 0.0).to(dtype)
    for transposed, axis in itertools.product((False, True), (-1, -2)):
        source = x.mT if transposed else x
        means, expected = by_both(lambda source=source, axis=axis: statistics.mean(source, axis))
        assert_same_bits(means, expected)
        lines = source.movedim(axis, -1)
        for line, mean in zip(lines.reshape(-1, lines.shape[-1]), means.flatten(), strict=True):
            exact = sum(map(Fraction, line.tolist())) / len(line)
            bound = Fraction(line.abs().max().item()) / 2**28 + abs(exact) / 2**24 + Fraction(2) ** -149
            assert abs(Fraction(mean.item()) - exact) <= bound


def test_means_of_either_axis_and_of_nothing():
    x = torch.arange(4.0).view(2, 2)
    for axis, rows in ((0, [[1, 2]]), (-2, [[1, 2]]), (1, [[0.5], [2.5]]), (-1, [[0.5], [2.5]])):
        for means in by_both(lambda axis=axis: statistics.mean(x, axis)):
            assert means.tolist() == rows
    for means in by_both(lambda: statistics.mean(torch.empty(0, 3), 0)):
        assert means.shape == (1, 3)
        assert means.isnan().all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_means_at_the_ends_of_the_range(threads, set_threads):
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    columns = [
        [largest] * 3,
        [largest, -largest, 0],
        [smallest] * 3,
        [0.0, -0.0, 0.0],
        [1, math.inf, 2],
        [1, math.nan, 2],
    ]
    x = torch.tensor(columns, dtype=torch.float32).T.repeat(5000, 1)
    set_threads(threads)
    means, expected = by_both(lambda: statistics.mean(x, -2))
    assert_same_bits(means, expected)
    assert means.tolist()[0][:4] == [largest, 0, smallest, 0]
    assert means[0, 4:].isnan().all()


def blocked_data(
    shape: tuple[int, ...], spec: QuantSpec, transposed: bool = False
) -> tuple[Blocking, Tensor, Tensor, Tensor]:
    """Return a blocking, values of every magnitude (NaN and Inf too, but not in a single block), statistics, scales."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape).float())
    if x.numel() and spec.block != "tensor":
        x.flatten()[::97] = any_floats((x.flatten()[::97].numel(),))
        x.flatten()[:200:60] = torch.tensor([torch.inf, torch.nan, -torch.inf, 1e-42])
    x = x.mT.contiguous().mT if transposed else x
    blocking = Blocking(shape, spec.block)
    values = blocking.split(x)
    z = scaling.amax(values, blocking.axes)
    return blocking, values, z, scaling.block_scale(z, spec.scale, spec.element)


CASES = [
    (16, "mse", "decode", (40, 100)),
    (16, "mae", "decode", (3, 20, 64)),
    (16, "amax", "encode", (40, 100)),
    ((16, 16), "mse", "decode", (2, 40, 50)),
    ("row", "mse", "decode", (33, 70)),
    pytest.param("tensor", "mae", "decode", (33, 70), marks=pytest.mark.long),
    (16, "mse", "decode", (0, 32)),
    (16, "mse", "decode", (200,)),
    pytest.param(1, "mse", "decode", (70, 8), marks=pytest.mark.long),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("block", "measure", "convention", "shape"), CASES)
def test_errors_of_blocks(block, measure, convention, shape, transposed):
    if transposed and len(shape) < 2:
        pytest.skip("a vector has no other layout")
    spec = QuantSpec("e2m1", block, ScaleSpec("e4m3", "nearest_even", convention), rounding="stochastic")
    blocking, values, z, scale = blocked_data(shape, spec, transposed)
    actual, expected = by_both(lambda: measures.block_errors(values, scale, z, spec, measure, blocking))
    assert_same_bits(actual, expected)
    assert actual.numel() == 0 or (actual.isfinite() & (actual > 0)).any()
    # In half of the blocks the two scales are nearly equal, and fp32 cannot tell their errors apart.
    factors = torch.where(torch.arange(scale.numel()).reshape(scale.shape) % 2 == 0, 1.5, 1 + 2**-22)
    for others, unit in itertools.product((scale, scale * factors, scale / factors), (z, z * 0.3)):
        less, expected = by_both(
            lambda others=others, unit=unit: measures.errs_less(values, (scale, others), unit, spec, measure, blocking)
        )
        assert torch.equal(less, expected)
        assert others is not scale or not less.any()


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("convention", ["decode", "encode"])
def test_measures_under_scales_that_are_no_powers_of_two(convention, transposed):
    """Dividing by a scale of 41 is not multiplying by 1/41, which is rounded, even if the spec has E8M0 scales."""
    spec = QuantSpec("e2m1", 16, ScaleSpec("e8m0", "nearest_even", convention))
    x = (torch.arange(70 * 96) % 49 - 24).float().view(70, 96) * 41 / 4
    blocking = Blocking(tuple(x.shape), 16)
    values = blocking.split(x.mT.contiguous().mT if transposed else x)
    z = scaling.amax(values, blocking.axes)
    scale = torch.full_like(z, 41.0) if convention == "decode" else torch.rand_like(z) + 0.3
    noise = Noise(None, blocking, x.device)
    choosing = replace(spec, others=(INT4,), selector="mse")
    for measured in (
        lambda: measures.block_errors(values, scale, z, spec, "mse", blocking),
        lambda: measures.errs_less(values, (scale, scale * (1 + 2**-22)), z, spec, "mse", blocking).float(),
        lambda: measures.group_moments(values, scale, spec, blocking, 2.0**20, 32)[1],
        lambda: measures.quantize_elements(values, scale, choosing, noise),
    ):
        assert_same_bits(*by_both(measured))


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_moments_of_blocks(transposed):
    spec = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"), ties="away")
    blocking, values, _, scale = blocked_data((64 if transposed else 70, 96), spec, transposed)
    assert values.is_contiguous() != transposed
    actual, expected = by_both(lambda: measures.group_moments(values, scale, spec, blocking, 128.0, 64))
    for sums, tensor_code in zip(actual, expected, strict=True):
        assert_same_bits(sums, tensor_code)
    for block, length in ((16, 8), (16, 40), ((16, 16), 64)):
        with pytest.raises(ValueError, match=f"groups of {length} elements do not consist of whole blocks"):
            measures.group_moments(values, scale, replace(spec, block=block), blocking, 128.0, length)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, (16, 16)], ids=str)
def test_operators_divide_the_operand_as_they_read_it(block, dtype, transposed):
    """Given an operand and its divisor, operators give the bits of the divided values without reading these values."""
    spec = QuantSpec("e2m1", block, ScaleSpec("e4m3", "nearest_even"), ties="away")
    blocking, operand, *_ = blocked_data((130, 70), spec, transposed)
    operand, gamma = operand.to(dtype), torch.tensor([0.37])
    values = operand.float() / gamma
    z = scaling.amax(values, blocking.axes)
    scale, unread = scaling.block_scale(z, spec.scale, spec.element), torch.full_like(values, torch.nan)
    quotient = measures.Quotient(lambda: operand, gamma)
    _, expected = by_both(lambda: measures.block_errors(values, scale, z, spec, "mse", blocking))
    assert_same_bits(measures.block_errors(unread, scale, z, spec, "mse", blocking, quotient), expected)
    _, expected = by_both(lambda: measures.errs_less(values, (scale, scale * 1.5), z, spec, "mse", blocking))
    assert 0 < expected.sum() < expected.numel()
    assert torch.equal(measures.errs_less(unread, (scale, scale * 1.5), z, spec, "mse", blocking, quotient), expected)
    choosing, noise = replace(spec, others=(INT4,), selector="mae"), Noise(None, blocking, values.device)
    _, expected = by_both(lambda: measures.quantize_elements(values, scale, choosing, noise))
    assert_same_bits(measures.quantize_elements(unread, scale, choosing, noise, quotient), expected)
    if block == 16:
        _, expected = by_both(lambda: measures.group_moments(values, scale, spec, blocking, 128.0, 32))
        moments = measures.group_moments(unread, scale, spec, blocking, 128.0, 32, quotient)
        for sums, tensor_code in zip(moments, expected, strict=True):
            assert_same_bits(sums, tensor_code)


@pytest.mark.parametrize(
    ("elements", "block", "selector", "shape", "transposed"),
    [
        (["e2m1", "int4"], 16, "mse", (40, 100), False), (["e2m1", "int4"], 16, "mae", (70, 96), True),
        (["int4", "e2m1"], 32, "amax", (40, 100), False), (["int4", "e2m1"], 32, "amax", (130, 64), True),
        (["e2m1", "int4"], (16, 16), "mae", (2, 40, 50), False), (["e2m1", "int4"], (16, 16), "mse", (32, 64), True),
        (["e2m1", "int4"], "row", "mse", (3, 20, 70), False), (["e2m1", "int4"], "tensor", "mse", (33, 70), True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rounding", [("nearest", "even", 24), ("stochastic", "away", 8)], ids=lambda r: r[0])
def test_blocks_choose_their_element_format(elements, block, selector, shape, transposed, rounding):
    how = dict(zip(("rounding", "ties", "random_bits"), rounding, strict=True))
    spec = QuantSpec(elements, block, ScaleSpec("e4m3", "nearest_even"), selector=selector, **how)
    blocking, values, _, scale = blocked_data(shape, spec, transposed)
    ratios, noise = scaling.ratio(values, scale, spec), Noise(make_key(3), blocking, values.device)
    actual, expected = by_both(lambda: measures.round_elements(ratios, spec, noise))
    assert_same_bits(actual, expected)
    alone = [measures.round_elements(ratios, QuantSpec(e, block, spec.scale, **how), noise) for e in elements]
    assert block == "tensor" or all((actual != other).any() for other in alone)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("shape", "block", "dim"),
    [
        ((32, 48), 16, 0), ((16, 3, 32), 16, 1), ((50, 7), "row", 0), ((50,), "row", 0), ((24, 32), (4, 8), -1),
        ((24, 32), (2, 8), -1), ((24, 32), 8, -1), ((64, 1), (16, 1), -1), ((2, 24, 32), (8, 4), -1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_blocks_of_any_layout_choose_their_element_format(shape, block, dim, transposed, rounding):
    spec = QuantSpec(["e2m1", "int4"], block, ScaleSpec("e4m3", "nearest_even"), rounding)
    x = torch.rand(*shape[:-2], *reversed(shape[-2:])).mT if transposed and len(shape) > 1 else torch.rand(shape)
    blocking = Blocking(shape, block, dim)
    ratios = blocking.split(x * 12 - 6)
    noise = Noise(make_key(3), blocking, ratios.device)
    actual, expected = by_both(lambda: measures.round_elements(ratios, spec, noise))
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("selector", "power"), [("mse", 2), ("mae", 1)])
def test_choices_between_nearly_equal_errors(selector, power, transposed):
    """The last bits of the errors decide: sums in fp32 would mislead. The test counts errors as equal if they
    differ by less than 2^-20 of their size."""

    def errors(u):
        integers = round_nearest(u * 7.0 / 6.0, INT4, "even") * 6.0 / 7.0
        return [(q.double() - u.double()).abs().pow(power).sum(1) for q in (round_nearest(u, E2M1, "even"), integers)]

    # The difference of both errors is continuous in the first element: bisect to where it changes its sign.
    low = torch.rand(4096, 16) * 12 - 6
    high = low.clone()
    low[:, 0], high[:, 0] = 5, 3  # INT4 has the smaller error for 5, E2M1 for 3
    first, second = errors(low)
    at_high = errors(high)
    apart = (first < second) != (at_high[0] < at_high[1])
    low, high, side = low[apart], high[apart], (first < second)[apart]
    blocks = []
    for _ in range(32):
        blocks += [low, high]
        middle = (low + high) / 2
        first, second = errors(middle)
        stays = ((first < second) == side)[:, None]
        low, high = torch.where(stays, middle, low), torch.where(stays, high, middle)
    u = torch.cat(blocks)
    u = u[: len(u) // 64 * 64]
    first, second = errors(u)
    equal = (first - second).abs() < 2.0**-20 * first
    assert (equal & (second < first)).sum() > 10
    assert (~equal).any()
    spec = QuantSpec(["e2m1", "int4"], 16, ScaleSpec("e4m3", "nearest_even"), selector=selector)
    blocking = Blocking((64, len(u) // 64 * 16), 16)
    blocked = u.view(-1, 64, 16).transpose(0, 1).contiguous()
    if transposed:
        blocked = blocked.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    actual, expected = by_both(lambda: measures.round_elements(blocked, spec, Noise(None, blocking, u.device)))
    assert_same_bits(actual, expected)


TEXT, OTHER, DRAWS, OTHER_DRAWS = (
    QuantSpec(e, 16, ScaleSpec("e4m3", "nearest_even"), rounding).to_text()
    for rounding in ("nearest", "stochastic")
    for e in ("e2m1", "int4")
)
_x, _values, _scale = torch.randn(6, 70), torch.randn(8, 16), torch.rand(8, 1) + 0.5
#: Arguments of operators, by the operator's name and a remark.
OPERATORS: dict[str, tuple[Any, ...]] = {
    "block_scale": (_x.abs().view(2, 3, 70), QuantSpec().to_text()),
    "block_scale, transposed": (_x.abs().mT, QuantSpec().to_text()),
    "order_statistics": (_x.view(-1), 4),
    "order_statistics, bf16": (_x.bfloat16().view(-1), 0),
    "order_statistics, of nothing": (_x[:0].view(-1), 0),
    "mean": (_x,),
    "mean, of columns": (_x.bfloat16().mT,),
    "block_errors": (_values, None, _scale, torch.ones(8, 1), 1, TEXT, "mse", 2.0**49),
    "block_errors, of a quotient": (_values.bfloat16(), _x.max(), _scale, torch.ones(8, 1), 1, TEXT, "mse", 2.0**49),
    "errs_less": (_values, None, _scale, _scale * 1.5, torch.ones(8, 1), 1, TEXT, "mse", 2.0**49),
    "group_moments": (_values, None, _scale, 1, TEXT, 2, 128.0, 2.0**49),
    "choose": (_values, None, None, None, 1, TEXT, OTHER, "mse", 2.0**49, [8, 16]),
    "choose, of a quotient": (_values.bfloat16(), _x.max(), _scale, None, 1, TEXT, OTHER, "mse", 2.0**49, [8, 16]),
    "choose, drawn": (_values, None, _scale, make_key(3), 1, DRAWS, OTHER_DRAWS, "mse", 2.0**49, [8, 16]),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_operators_are_as_declared(case):
    check_declaration(case.partition(",")[0], OPERATORS[case])
