"""The C++ kernels give the bits of the scalar oracle and of tensor code."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4graph.kernels import library, operators
from fp4graph.kernels.devices import CPU, by_runs
from fp4graph.kernels.direction import Blocks, Direction, PackedOperand, Source
from fp4graph.kernels.rows import TENSOR_CODE, of_spec
from fp4graph.numerics import scaling
from fp4graph.numerics.blocking import Blocking, Groups
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.formats import ELEMENTS, ElementFormat, ScaleFormat
from fp4graph.numerics.noise import Noise, derive, gaussian, make_step, mix
from fp4graph.numerics.packing import pack
from fp4graph.numerics.quantize import fake_quantize, round_elements
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from tests.helpers import oracle
from tests.helpers.floats import any_floats, assert_same_bits
from tests.helpers.operators import check_declaration
from tests.kernels.quantizers import (
    CHOICES,
    DERIVED,
    KEY,
    LAYOUTS,
    MXFP4,
    SALTS,
    SOURCE,
    STEP,
    STOCHASTIC,
    covering,
    hostile,
    name_of,
    spec_of,
    ties,
)

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]

ROWS = list(covering())
#: Every rounding of E2M1, and one rounding of every other element format; the other rows are `long`.
FEW = [row for index, row in enumerate(ROWS) if row["element"] == "e2m1" or index % 6 == index // 6 % 6]
UNEVEN = QuantSpec("int4", 10, ScaleSpec("fp32", "nearest_even"), "stochastic")


def across(x: Tensor) -> Tensor:
    """Return the same numbers, contiguous along the next to last axis."""
    return x.mT.contiguous().mT


def check(
    x: Tensor, spec: QuantSpec, expected: Tensor, given: Blocks | None = None, draw: Draw | None = SOURCE
) -> None:
    """Compare ``x``, quantized by the operator in both layouts, with ``expected``."""
    for source in (x, across(x)):
        assert_same_bits(operators.quantize(source, spec, draw, given), expected)


def check_packing(x: Tensor, spec: QuantSpec, expected: Tensor) -> tuple[Tensor, PackedOperand]:
    """Compare values with ``expected``, and bytes with those of tensor code; return both."""
    values, packed = operators.quantize_and_pack(x, spec, SOURCE, x.dtype)
    assert_same_bits(values, expected)
    by_tensor_code = pack(x, spec, -1, DERIVED)
    assert torch.equal(packed.codes, by_tensor_code.codes)
    same = assert_same_bits if by_tensor_code.scales.is_floating_point() else torch.testing.assert_close
    same(packed.scales, by_tensor_code.scales)
    assert_same_bits(packed.unpack(), expected)
    return values, packed


def maxima(x: Tensor, spec: QuantSpec) -> Tensor:
    """Return the amax of each block, by tensor code."""
    blocking = Blocking(tuple(x.shape), spec.block)
    return scaling.amax(blocking.split(x), blocking.axes).reshape(blocking.grid)


# ------------------------------------------------------------------ values


def test_the_rows_cover_all_choices():
    specs = [spec_of(row) for row in ROWS]
    assert {row["element"] for row in FEW} == {*ELEMENTS}
    assert all({row[name] for row in ROWS} == set(values) for name, values in CHOICES.items())
    assert len({(row["element"], row["rounding"]) for row in ROWS}) == len(ROWS) == 6 * len(ELEMENTS)
    assert len({(row["scale"], row["rule"]) for row in ROWS}) > 30  # of 41
    assert all(CPU.unknown(spec) is None for spec in specs)
    assert sum(CPU.unpacked(spec) is None for spec in specs) > 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name_of(row), marks=() if row in FEW else pytest.mark.long) for row in ROWS]
)
def test_values_and_bytes(row):
    """Of odd sizes: small tensors are compared with the oracle, and one larger than a tile with tensor code."""
    spec, dtype, block = spec_of(row), row["dtype"], row["block"]
    for x in (ties(spec.element, block).to(dtype), hostile((8, 2 * block + 3), block, dtype, seed=1)):
        check(x, spec, oracle.quantized(x, spec, DERIVED))
    x = hostile((131, 2 * block + block // 2), block, dtype)
    expected = fake_quantize(x, spec, -1, DERIVED)
    check(x, spec, expected)
    if CPU.unpacked(spec) is None:
        check_packing(x, spec, expected)


@pytest.mark.parametrize("spec", [MXFP4, STOCHASTIC, UNEVEN], ids=["mxfp4", "stochastic", "uneven"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, spec):
    x = LAYOUTS[layout](lambda shape: hostile(shape, int(spec.block)))
    before, expected = x.clone(), fake_quantize(x, spec, -1, DERIVED)
    y = operators.quantize(x, spec, SOURCE)
    assert_same_bits(y, expected)
    assert y.stride() == torch.empty_like(x).stride()
    assert_same_bits(operators.maxima(x, int(spec.block)), maxima(x, spec))
    if CPU.unpacked(spec) is None:
        values, packed = check_packing(x, spec, expected)
        assert values.is_contiguous()
        if x.dim() > 1:
            assert_same_bits(packed.requantized(spec, SOURCE), fake_quantize(expected.mT, spec, -1, DERIVED))
    assert_same_bits(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(16, 16), (3, 5), (128, 32), (100, 1000), (1024, 1)], ids=str)
def test_maxima_of_two_axes(block, dtype):
    """Compared with max-pooling, cut-off blocks included. A NaN is the maximum of its block."""
    x = hostile((2, 200, 150), 16, dtype)
    magnitudes = x.float().abs().nan_to_num(nan=torch.inf, posinf=3e38)
    pooled = torch.nn.functional.max_pool2d(magnitudes, block, ceil_mode=True)
    of_pool = torch.where(pooled == torch.inf, torch.nan, torch.where(pooled == 3e38, torch.inf, pooled))
    assert of_pool.isnan().any()
    for source in (x, across(x)):
        assert_same_bits(operators.maxima(source, block[1], block[0]), of_pool)


@pytest.mark.parametrize("block", [(2, 1100), (1100, 2), (2000, 1500), (1024, 1024)], ids=str)
def test_the_amax_of_long_blocks_of_two_axes(block):
    """A tile of the C++ code holds 1024 elements of a line: a longer side divided by zero and ended the process."""
    x = hostile((1300, 1201), 16)
    blocking = Blocking(tuple(x.shape), block)
    for source in (x, across(x)):
        assert_same_bits(operators.amax(source, blocking), scaling.amax(blocking.split(x), blocking.axes))


@pytest.mark.parametrize("block", [(16, 16), (3, 8)], ids=str)
def test_given_numbers_of_two_axes(block):
    """Each line of a 2-D block reads the block's number where it lies. Numbers may be broadcast."""
    spec, x = QuantSpec("e2m1", block, ScaleSpec("e4m3", "nearest_even")), hostile((2, 70, 45), 16)
    blocking, runs = Blocking(tuple(x.shape), spec.block), by_runs(spec)
    r, c = block
    scale = torch.rand(2, -(-70 // r), -(-45 // c), generator=torch.Generator().manual_seed(1)) + 0.5
    each = torch.tensor([0.75, 3.0])  # one per matrix
    parts = scale.view(blocking.scale_shape), each.view(2, 1, 1, 1, 1), each.log().view(2, 1, 1, 1, 1)
    given = dict(zip(("scale", "divisor", "factor"), (operators.by_run(part, blocking) for part in parts), strict=True))
    rows = scale.repeat_interleave(r, 1)[:, :70]
    whole = [rows, *(number.view(2, 1, 1).expand(rows.shape) for number in (each, each.log()))]
    expected = expected_with(x, runs, dict(zip(given, whole, strict=True)))
    check(x, runs, expected, Blocks(**given))


ROUNDED_SCALES = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", zero="nearest_subnormal"))


@pytest.mark.parametrize("scale", [1.0 + 2**-20, 0.3, 2.0**-130, 2.0**-12, 448.0, 3e38])
def test_given_scales_of_no_format(scale):
    """Elements times such a scale may need rounding to bf16, in whole blocks and in cut-off blocks."""
    x, given = hostile((70, 45), 16, torch.bfloat16), torch.full((70, 3), scale)
    expected = expected_with(x, ROUNDED_SCALES, {"scale": given})
    for blocks in (Blocks(scale=given, factor=torch.ones(1)), Blocks(scale=given)):
        check(x, ROUNDED_SCALES, expected, blocks, None)


def test_a_given_scale_and_a_factor_whose_product_overflows():
    """Zeros stay zeros: the kernel may multiply a factor into the scale only if their product is finite."""
    x, given = torch.zeros(4, 48), {"scale": torch.full((4, 3), 2.0**110), "factor": torch.full((4, 3), 2.0**30)}
    check(x, ROUNDED_SCALES, expected_with(x, ROUNDED_SCALES, given), Blocks(**given), None)


@pytest.mark.parametrize("convention", ["decode", "encode"])
@pytest.mark.parametrize("names", [("scale",), ("stored",), ("scale", "stored", "factor")], ids="-".join)
def test_given_scales_that_are_no_powers_of_two(names, convention):
    """E8M0 scales have exact reciprocals, a technique's 41 has none: x/41 lies on ties where x·(1/41) does not."""
    spec = QuantSpec("e2m1", 16, ScaleSpec("e8m0", "nearest_even", convention))
    x = torch.arange(-24.0, 25.0).repeat(70, 1)[:, :45] * 41 / 4
    given = {name: torch.tensor([41.0, 1 / 41, 1.5, 2.0, 2.0**-127, 0.0, torch.nan]) for name in names}
    given = {name: part.repeat(10).view(70, 1).expand(70, 3) for name, part in given.items()}
    check(x, spec, expected_with(x, spec, given), Blocks(**given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factors", [[2.0, 0.125], [2.0**-40, 2.0**40], [2.0**41, 0.3], [0.0, -2.0]], ids=str)
def test_factors(factors, dtype):
    """Kernels multiply scales by powers of two, and dequantized values by other factors, to the same bits."""
    x, factor = hostile((70, 48), 16, dtype), torch.tensor(factors).repeat(35).view(70, 1).expand(70, 3)
    expected = expected_with(x, ROUNDED_SCALES, {"factor": factor})
    check(x, ROUNDED_SCALES, expected, Blocks(factor=factor), None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(dtype):
    x = hostile((70, 75), 16).to(dtype)
    for source in (x, x[:, 3:].view(5, 14, 72)):
        check(source, STOCHASTIC, fake_quantize(source, STOCHASTIC, -1, DERIVED))
    assert_same_bits(operators.maxima(x, 16), maxima(x, STOCHASTIC))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_floats(dtype):
    x = any_floats((200, 96)).to(dtype)
    check(x, MXFP4, fake_quantize(x, MXFP4))


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3, 65, 1024])
def test_blocks_of_any_length(block):
    spec = QuantSpec("e2m1", block, ScaleSpec("e8m0", "floor"), "stochastic")
    assert CPU.unknown(spec) is None
    assert CPU.unpacked(spec) is not None
    for x in (hostile((5, 1100), block), hostile((1100, 70), block).mT):
        assert_same_bits(operators.quantize(x, spec, SOURCE), fake_quantize(x, spec, -1, DERIVED))


def test_specs_and_devices_that_kernels_do_not_support():
    for block in (1025, (16, 16), "row", "tensor"):
        assert CPU.unknown(QuantSpec("e2m1", block))
    wide = ElementFormat("e5m4", 5, 4, bias=15, max=2.0**15)
    assert CPU.unknown(QuantSpec(wide, 32))
    assert of_spec(MXFP4, torch.device("meta")) == TENSOR_CODE
    with operators.tensor_code():
        assert of_spec(MXFP4, torch.device("cpu")) == TENSOR_CODE
    assert of_spec(MXFP4, torch.device("cpu")) != TENSOR_CODE


# ------------------------------------------------------------------ formats of plugins

ADDED: dict[str, tuple[Any, Any, str]] = {
    "two bits": (ElementFormat("e1m0", 1, 0, bias=0, max=2.0), "e8m0", "stochastic"),
    "three bits": (ElementFormat("int3", 0, 2, bias=1, max=0.75), "e4m3", "nearest"),
    "five bits, not all of its values": (ElementFormat("e3m1", 3, 1, bias=3, max=16.0), "fp32", "nearest"),
    "far from one": (ElementFormat("e2m2", 2, 2, bias=80, max=3.0 * 2.0**-78), "e8m3", "stochastic"),
    "a scale of few powers of two": ("e2m1", ScaleFormat("e5m0", 5, 0, 9, 2.0**20, False, nan_code=31), "nearest"),
    "a scale of few bits": ("e2m1", ScaleFormat("e3m2", 3, 2, bias=2, max=24.0, nan_code=31), "stochastic"),
    "a scale of eleven bits": ("e2m3", ScaleFormat("e4m7", 4, 7, bias=7, max=480.0), "nearest"),
    "a scale of sixteen bits": ("int4", ScaleFormat("e8m8", 8, 8, bias=127, max=2.0**127), "stochastic"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "added", [name if "scale of" in name else pytest.param(name, marks=pytest.mark.long) for name in ADDED]
)
def test_formats_that_plugins_may_add(added):
    element, scale, rounding = ADDED[added]
    spec = QuantSpec(element, 16, ScaleSpec(scale, "nearest_even"), rounding)
    x = torch.cat([hostile((60, 40), 16), torch.randn(20, 40, generator=torch.Generator().manual_seed(5))])
    expected = oracle.quantized(x, spec, DERIVED)
    check(x, spec, expected)
    check_packing(x, spec, expected)


# ------------------------------------------------------------------ noise


LATER = make_step(3, 1, 2**31 + 5)
MIXED = mix(KEY, LATER[:2])


@pytest.mark.parametrize(
    ("source", "key"),
    [
        (Draw(KEY), KEY),
        (Draw(KEY).salted(7), derive(KEY, 7)),
        (Draw(KEY, LATER), MIXED),
        (Draw(KEY, LATER, (3, 1 << 20, 5)), derive(derive(derive(MIXED, 3), 1 << 20), 5)),
    ],
    ids=["key", "salt", "step", "step and salts"],
)
def test_sources_of_noise(source, key):
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    expected = fake_quantize(x, STOCHASTIC, -1, key)
    check(x, STOCHASTIC, expected, draw=source)
    assert_same_bits(operators.quantize_and_pack(x, STOCHASTIC, source, x.dtype)[0], expected)


@pytest.mark.parametrize("source", [SOURCE, SOURCE.fixed, Draw(KEY), Draw(KEY, None, (7,))])
def test_variates_are_those_of_the_tensor_code(source):
    """tests/numerics/test_noise.py compares those with sums of words."""
    for count in (0, 1, 70, 1 << 15):
        index = torch.arange(count, dtype=torch.int32)
        assert_same_bits(operators.gaussian(source, count, index.device), gaussian(source.varying, index))


def test_fixed_variates_stay_and_others_do_not():
    later = Draw(KEY, make_step(0, 0, 4), SALTS)
    draws = SOURCE, later, SOURCE.fixed, later.fixed
    now, then, fixed, again = (operators.gaussian(draw, 70, KEY.device) for draw in draws)
    assert_same_bits(fixed, gaussian(SOURCE.constant, torch.arange(70, dtype=torch.int32)))
    assert_same_bits(fixed, again)
    assert (now != then).float().mean() > 0.9


# ------------------------------------------------------------------ bytes


@pytest.mark.slow
def test_bytes_stand_for_the_values_in_another_dtype():
    """Of an fp32 operand whose GEMM is in bf16: unpacking gives the values that the GEMM has read."""
    x = hostile((9, 70), 16)
    spec = QuantSpec("e4m3", 16, ScaleSpec("fp32", "nearest_even"))  # values that bf16 does not hold
    values, packed = operators.quantize_and_pack(x, spec, None, torch.bfloat16)
    assert values.dtype is torch.float32
    assert not torch.equal(values.nan_to_num(0), values.bfloat16().float().nan_to_num(0))
    assert_same_bits(packed.unpack(), values.bfloat16())


def first(element: str, block: int) -> QuantSpec:
    return spec_of(next(row for row in ROWS if (row["element"], row["block"]) == (element, block)))


AGAIN = {
    "mxfp4 to mxfp4": (MXFP4, QuantSpec("e2m1", 32, MXFP4.scale, "stochastic"), torch.bfloat16),
    "int4 to int4": (first("int4", 64), UNEVEN, torch.float32),
    "int8 to e2m1": (first("int8", 16), STOCHASTIC, torch.float32),
    "e5m2 to e3m2": (first("e5m2", 32), QuantSpec("e3m2", 64, ScaleSpec("ue5m3", "toward_positive")), torch.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(130, 133), (64, 64), (2, 3, 33, 70), (5, 200), (200, 5), (1, 40), (40, 1)], ids=str)
@pytest.mark.parametrize("case", AGAIN)
def test_quantizing_the_transpose_from_bytes(case, shape):
    packs, spec, dtype = AGAIN[case]
    x = hostile(shape, int(packs.block), dtype)
    values, packed = operators.quantize_and_pack(x, packs, SOURCE, dtype)
    assert packed.unpack().dtype is dtype
    assert_same_bits(packed.requantized(spec, SOURCE), fake_quantize(values.mT, spec, -1, DERIVED))


# ------------------------------------------------------------------ numbers that techniques give for blocks

PARTS = ("divisor", "statistic", "scale", "factor", "stored")
SEVERAL = (("divisor", "statistic", "factor"), ("divisor", "scale", "factor"), ("divisor", "scale", "stored"), PARTS)
GIVEN: list[tuple[str, ...]] = [*((part,) for part in PARTS), *SEVERAL]
ENCODE = QuantSpec("e4m3", 16, ScaleSpec("bf16", "nearest_even", "encode"), "nearest", "up")


def given_for(
    x: Tensor, spec: QuantSpec, names: tuple[str, ...], one: bool, generator: torch.Generator, odd: bool = True
) -> dict[str, Tensor]:
    """Return numbers that techniques might give for the blocks of ``x``, with NaN, Inf, 0 and a subnormal among them if
    ``odd``; or ``one`` number for all blocks."""
    grid = (1,) if one else tuple(Blocking(tuple(x.shape), spec.block).grid)
    given = {name: torch.randn(grid, generator=generator).exp() for name in names}
    for part in given.values() if odd and not one else ():
        places = torch.randperm(part.numel(), generator=generator)[:4]
        part.view(-1)[places] = torch.tensor([torch.nan, torch.inf, 0.0, 1e-40])
    return given


def expected_with(x: Tensor, spec: QuantSpec, given: dict[str, Tensor], key: Tensor = DERIVED) -> Tensor:
    """Return ``factor · round((x / divisor) / S) · stored`` by tensor code: S is ``scale`` or else computed from
    ``statistic``, and ``stored`` is S unless given."""
    blocking = Blocking(tuple(x.shape), spec.block)
    noise = Noise(key, blocking, x.device)
    parts = {name: (p if p.numel() == 1 else p.reshape(blocking.scale_shape)) for name, p in given.items()}
    values = blocking.split(x).float() / parts.get("divisor", 1)
    z = parts.get("statistic", scaling.amax(values, blocking.axes)).expand(blocking.scale_shape)
    scale = parts.get("scale", scaling.block_scale(z.contiguous(), spec.scale, spec.element, noise))
    codes = round_elements(scaling.ratio(values, scale, spec), spec, noise)
    stored = parts.get("stored", scale)
    return blocking.join((scaling.dequantize(codes, stored, spec) * parts.get("factor", 1)).to(x.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [STOCHASTIC, UNEVEN, ENCODE], ids=["stochastic", "uneven", "encode"])
@pytest.mark.parametrize("one", [False, True], ids=["one a block", "one for all"])
@pytest.mark.parametrize("names", GIVEN, ids="-".join)
def test_given_blocks(names, one, spec):
    x = hostile((2, 70, 45), int(spec.block), torch.bfloat16 if spec is ENCODE else torch.float32)
    given = given_for(x, spec, names, one, torch.Generator().manual_seed(3))
    check(x, spec, expected_with(x, spec, given), Blocks(**given))


@pytest.mark.parametrize("name", ["quantize_both", "quantize_and_pack_columns"])
@pytest.mark.parametrize("given", [False, True], ids=["alone", "given"])
def test_operators_for_both_directions(name, given):
    """No policy uses them on a CPU. Sums of whole numbers are exact in any order."""
    x = torch.randint(-6, 7, (75, 90), generator=torch.Generator().manual_seed(5)).bfloat16()
    numbers = ((1.7, 0.5), (0.3, 4.0)) if given else ()  # a divisor and a factor for each direction
    parts = [Blocks(torch.tensor([d]), factor=torch.tensor([f])) for d, f in numbers] or [Blocks(), Blocks()]
    rows, columns = (Direction(spec, SOURCE, part) for spec, part in zip((MXFP4, STOCHASTIC), parts, strict=True))
    in_columns = operators.quantize(x.mT, STOCHASTIC, SOURCE, parts[1])
    both = *rows.flat(given=True), *columns.flat(given=True), *([True] if name == "quantize_both" else [])
    for source in (Source.of(x), Source(x.float().chunk(2, -1), x.dtype)):
        values, *results = getattr(torch.ops.fp4graph, name)(*source, *both)
        assert_same_bits(values, operators.quantize(x, MXFP4, SOURCE, parts[0]))
        if name == "quantize_both":
            assert_same_bits(results[0].mT, in_columns)
            assert torch.equal(results[1].sum(0), x.float().sum(0))
        else:
            packed = PackedOperand(*results, STOCHASTIC, x.shape[0], x.dtype, factor=parts[1].factor)
            assert_same_bits(packed.unpack(), in_columns)


# ------------------------------------------------------------------ threads


@pytest.mark.slow
def test_the_number_of_threads_changes_no_bits(set_threads):
    wide, tall = hostile((3, 90, 170), 16), hostile((170, 270), 16)
    assert min(wide.numel(), tall.numel()) > 1 << 15  # enough for several threads

    def everything():
        results = []
        for x in (wide, tall, across(wide), across(tall)):
            values, packed = operators.quantize_and_pack(x, STOCHASTIC, SOURCE, x.dtype)
            results += [values, packed.codes, packed.scales, packed.unpack(), packed.requantized(STOCHASTIC, SOURCE)]
            results += [operators.quantize(x, STOCHASTIC, SOURCE), operators.maxima(x, 16)]
        results.append(operators.gaussian(SOURCE, 1 << 15, wide.device))
        return [r.float() for r in results]

    set_threads(1)
    alone = everything()
    for count in (2, 3, 7):
        set_threads(count)
        for actual, expected in zip(everything(), alone, strict=True):
            assert_same_bits(actual, expected)


# ------------------------------------------------------------------ statistics


def test_the_amax_of_groups_of_blocks_is_that_of_a_loop():
    z = any_floats((4, 13)).abs()
    z[1, 5], z[2, 0], z[3, 12] = torch.inf, torch.nan, torch.nan
    blocking = Blocking((4, 13 * 16 - 3), 16)
    for granularity in (16, 64, 256):
        g = operators.group_amax(z.unsqueeze(-1), Groups(blocking, granularity)).squeeze(-1)
        groups = z.split(granularity // 16, 1)
        assert_same_bits(g, torch.cat([group.amax(1, keepdim=True).expand_as(group) for group in groups], 1))


def test_mantissas_are_rounded_up_as_rational_numbers_are():
    z = any_floats((50, 8)).abs()
    z[0, :5] = torch.tensor([0.0, 1e-42, torch.inf, torch.nan, 3.4e38])
    for divisor, bits in ((6.0, 3), (7.0, 1), (1.0, 10)):
        rounded = operators.mantissa(z, divisor, bits)
        assert_same_bits(rounded, scaling.mantissa(z, divisor, bits))
        for number, y in zip((z / torch.tensor(divisor)).flatten().tolist(), rounded.flatten().tolist(), strict=True):
            expected = 1.0
            if 2.0**-126 <= number < math.inf:
                fraction = Fraction(math.frexp(number)[0]) * 2
                expected = math.ceil(fraction * 2**bits) / 2**bits
            assert y == expected


def test_of_equal_scores_the_first_are_the_largest():
    score = torch.tensor([[3.0, 1.0, 3.0], [torch.nan, 3.0, 0.0]])
    order = [3, 0, 2, 4, 1, 5]  # flat indices, sorted by hand
    for count in range(7):
        chosen = operators.largest(score, count)
        assert chosen.flatten().nonzero().flatten().tolist() == sorted(order[:count])


@pytest.mark.parametrize("kind", ["distinct", "equal", "any"])
def test_the_largest_of_many_are_those_of_a_sort(kind):
    """Scores that differ, many equal scores, and any floats with NaN among them."""
    score = torch.randn(20_001, generator=torch.Generator().manual_seed(1))
    score = {"distinct": score.abs(), "equal": (3 * score).round().abs(), "any": any_floats((20_001,))}[kind]
    if kind == "any":
        score[::999] = torch.tensor(torch.nan).neg()
    for count in (1, 700, 19_000, 20_001):
        assert torch.equal(operators.largest(score, count), library.largest(score, count))


# ------------------------------------------------------------------ operators

_x, _long = torch.randn(6, 70), torch.randn(6, 70).view(2, 3, 70)
_mxfp4, _again = MXFP4.to_text(), STOCHASTIC.to_text()
_fp8 = QuantSpec("e4m3", 16, ScaleSpec("fp32", "nearest_even")).to_text()
_packed = pack(_x, MXFP4)
_bytes = (_packed.codes, _packed.scales, _mxfp4, 70)
NEAREST, NOISE = (None, None, []), (KEY, STEP, list(SALTS))
NO_BLOCKS = (None,) * len(Blocks._fields)
_given = (*(torch.rand(6, 5) + 1 for _ in range(3)), torch.ones(1), torch.rand(6, 5))
_directions = (_mxfp4, *NEAREST, *NO_BLOCKS, _again, *NOISE, *NO_BLOCKS)
#: Arguments of operators, by the operator's name and a remark.
OPERATORS: dict[str, tuple[Any, ...]] = {
    "quantize": (_x, _mxfp4, *NEAREST, *NO_BLOCKS),
    "quantize, transposed": (_x.mT, _again, *NOISE, *NO_BLOCKS),
    "quantize, not dense": (_x[:, ::2], _again, KEY, None, [], *NO_BLOCKS),
    "quantize, given blocks": (_x, _again, KEY, STEP, [1], *_given),
    "quantize, nothing": (_x[:0], _mxfp4, *NEAREST, *NO_BLOCKS),
    "gaussian": (*NOISE, 70),
    "gaussian, fixed": (KEY, STEP[2:4], [], 1),
    "maxima": (_long, 16),
    "maxima, of two axes": (_long, 16, 2),
    "maxima, transposed": (_x.mT.bfloat16(), 4),
    "rounded": (_x.bfloat16(),),
    "rounded, transposed": (_x.mT.half(),),
    "absorb": NOISE,
    "absorb, a chain of salts": (KEY, None, [1, 1 << 20]),
    "first_bits": (*NOISE, 70),
    "first_bits, none": (KEY, None, [], 0),
    "mantissa": (_x.abs(), 6.0, 3),
    "mantissa, transposed": (_x.abs().mT, 6.0, 1),
    "group_maxima": (_long.abs(), 4),
    "group_maxima, transposed": (_x.abs().mT, 100),
    "group_maxima, nothing": (_x.abs()[:0], 4),
    "largest": (_long.abs().unsqueeze(-1), 41),
    "quantize_and_pack": (*Source.of(_x), _mxfp4, *NEAREST),
    "quantize_and_pack, transposed": (*Source.of(_x.mT), _again, KEY, STEP, [2]),
    "quantize_and_pack, bytes": (*Source.of(_x), _fp8, *NEAREST),
    "quantize_and_pack, parts that are cast": ([_x, _x], torch.bfloat16, _mxfp4, *NEAREST),
    "quantize_both": (*Source.of(_x.mT), *_directions, True),
    "quantize_both, parts that are cast": ([_x, _x], torch.bfloat16, *_directions, False),
    "quantize_both, one row": (*Source.of(_x[:1]), *_directions, True),
    "quantize_both, one column": (*Source.of(_x[:, :1]), *_directions, False),
    "quantize_both, nothing": (*Source.of(_x[:, :0]), *_directions, True),
    "quantize_and_pack_columns": (*Source.of(_long), *_directions),
    "quantize_and_pack_columns, one column": (*Source.of(_x[:1].mT), *_directions),
    "quantize_and_pack_columns, nothing": (*Source.of(_x[:, :0]), *_directions),
    "requantize": (*_bytes, torch.bfloat16, _again, *NOISE),
    "unpack": (*_bytes, torch.float32, None),
    "unpack, a factor": (*_bytes, torch.float32, torch.tensor([0.5])),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_operators_are_as_declared(case):
    check_declaration(case.partition(",")[0], OPERATORS[case])
