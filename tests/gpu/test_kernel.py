"""The Triton kernel of the operators on a GPU: values, bytes, machine code."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system, or it is not installed")
if not torch.cuda._is_compiled():
    pytest.skip("this torch is built without CUDA", allow_module_level=True)

import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu import absent
from fp4graph.kernels import operators, triton_quantize
from fp4graph.kernels.constants import constants
from fp4graph.kernels.devices import GPU
from fp4graph.kernels.direction import Blocks, Direction, Source
from fp4graph.kernels.direction import Packed as Bytes
from fp4graph.kernels.inductor import EXACT, patches
from fp4graph.kernels.tiles import TILE
from fp4graph.kernels.triton_division import _inverse_of, _quotient
from fp4graph.kernels.triton_kernels import quantize_kernel
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.formats import ScaleFormat
from fp4graph.numerics.packing import Packed, pack, scale_storage, unpack
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.draw import operand_draw
from fp4graph.technique import QUANTIZER_STAGES
from fp4graph.technique.operands import Operand
from tests.gpu.cases import KEY, STEP, operands, programs
from tests.gpu.interpreted import run_generated
from tests.gpu.machine_code import Binary, Generated, compile_generated, compile_written, generate
from tests.gpu.test_generated import EVEN, GPUS, UNEVEN, assert_all_same, assert_machine_code
from tests.helpers.floats import assert_same_bits
from tests.kernels.quantizers import STOCHASTIC, hostile
from tests.kernels.test_cpu import ENCODE, GIVEN, PARTS, expected_with, given_for

pytestmark = pytest.mark.process

#: The numbers that techniques may give on a GPU: its kernels multiply elements by the scale that they were rounded by.
ON_GPU = tuple(name for name in PARTS if name != "stored")
GIVEN_ON_GPU = [names for names in GIVEN if "stored" not in names] + [ON_GPU]

#: Pairs of specs, along rows and along columns, with formats and rules that no plain pair of a shipped policy has.
OTHERS = {
    "encode": (QuantSpec("e2m1", 16, ScaleSpec("e8m3", "nearest_even", "encode")),
               QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", "encode"), ties="away")),
    "stochastic scales": (QuantSpec("e2m1", 32, ScaleSpec("e8m0", "stochastic"), "stochastic", random_bits=8),
                          QuantSpec("e2m1", 16, ScaleSpec("ue5m3", "stochastic", zero="to_one"))),
    "e4m3, ue5m3": (QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", zero="to_one"), "stochastic"),
                    QuantSpec("e2m1", 32, ScaleSpec("ue5m3", "toward_positive"), "stochastic", source="fprop")),
    "other elements": (QuantSpec("e3m0", 32, ScaleSpec("e8m0", "amax_even")),
                       QuantSpec("int8", 64, ScaleSpec("fp32", "nearest_even"))),
    "other rules": (QuantSpec("e2m3", 2, ScaleSpec("e8m0", "amax_ceil", zero="to_one")),
                    QuantSpec("e5m2", 8, ScaleSpec("bf16", "stochastic"))),
    "ties of scales": (QuantSpec("e2m1", 32, ScaleSpec("e8m0", "nearest_even", "encode", ties="even")),
                       QuantSpec("e3m0", 32, ScaleSpec("e8m0", "nearest_even", ties="even"))),
    "codes of their own": (QuantSpec("int4", 16, ScaleSpec("e8m3", "toward_positive")),
                           QuantSpec("e4m3", 16, ScaleSpec("ue5m3_61440", "nearest_even"))),
}  # fmt: skip


@cache
def pairs() -> dict[str, tuple[QuantSpec, QuantSpec]]:
    """Return the specs of the two operands of one tensor under shipped policies, where no technique alters them, each
    pair once; and OTHERS."""
    sides = {
        "input": (Operand.FPROP_INPUT, Operand.WGRAD_INPUT),
        "weight": (Operand.FPROP_WEIGHT, Operand.DGRAD_WEIGHT),
        "grad_output": (Operand.DGRAD_GRAD_OUTPUT, Operand.WGRAD_GRAD_OUTPUT),
    }
    found: dict[str, tuple[QuantSpec, QuantSpec]] = {}
    for (name, program), (side, both) in itertools.product(programs(), sides.items()):
        rows, columns = map(program.operand, both)
        altered = any(operand.at(stage) for operand in (rows, columns) for stage in QUANTIZER_STAGES)
        if not altered and rows.spec is not None and columns.spec is not None:
            pair = rows.spec, columns.spec
            if not any(map(GPU.unknown, pair)) and pair not in found.values():
                found[f"{name}:{side}"] = pair
    return {**found, **OTHERS}


PAIRS = [pytest.param(name, marks=() if name == "tetrajet:input" else pytest.mark.gpu) for name in pairs()]


def key_of(operand: Operand) -> Tensor:
    return operand_draw(Draw(KEY, STEP), operand).varying


ROW_KEY, COLUMN_KEY = key_of(Operand.DGRAD_GRAD_OUTPUT), key_of(Operand.WGRAD_GRAD_OUTPUT)


def directed(salt: int) -> Callable[..., Direction]:
    return lambda spec, *given: Direction(spec, Draw(KEY, STEP, (salt,)), *given)


rowwise, columnwise = directed(3), directed(5)


def along_rows(x: Tensor, spec: QuantSpec) -> Tensor:
    return fake_quantize(x, spec, key=ROW_KEY)


def along_columns(x: Tensor, spec: QuantSpec) -> Tensor:
    """Return x in its layout, quantized as the operand xᵀ."""
    return fake_quantize(x.mT, spec, key=COLUMN_KEY).mT


def assert_same_bytes(codes: Tensor, scales: Tensor, packed: Packed, value: Tensor) -> None:
    assert torch.equal(codes, packed.codes)
    assert scales.dtype is packed.scales.dtype
    assert torch.equal(scales.nan_to_num(7), packed.scales.nan_to_num(7))
    assert_same_bits(unpack(replace(packed, codes=codes, scales=scales)), value)


def check_operators(
    interpreter: Callable[..., Any], source: Source, rows: QuantSpec, columns: QuantSpec, sums: bool = True
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Compare the operators that read several parts with tensor code: values along rows and along columns, and bytes of
    each beside the values along rows. Return sums of columns, and the bytes of rows and of columns."""
    x, along, down = source.whole(), rowwise(rows), columnwise(columns)
    in_rows, in_columns = along_rows(x, rows), along_columns(x, columns)
    first, second, column_sums = interpreter(triton_quantize.quantize_both, source, along, down, sums)
    values, *of_rows = interpreter(triton_quantize.quantize_and_pack, source, along)
    beside, *of_columns = interpreter(triton_quantize.quantize_and_pack_columns, source, along, down)
    for result in (first, values, beside):
        assert_same_bits(result, in_rows)
    assert_same_bits(second, in_columns)
    assert_same_bytes(*of_rows, pack(x, rows, key=ROW_KEY), in_rows)
    assert_same_bytes(*of_columns, pack(x.mT, columns, key=COLUMN_KEY), in_columns.mT)
    return column_sums, of_rows, of_columns


def cases(rows: QuantSpec, columns: QuantSpec) -> Iterator[Tensor]:
    """Yield operands that are hard for the rows' spec in fp32, and for the columns' spec in bf16."""
    for dtype, spec in ((torch.float32, rows), (torch.bfloat16, columns)):
        for _, values in operands(UNEVEN, spec):
            yield values.to(dtype)


@pytest.mark.long
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_bytes(name, interpreter):
    """All operators: also one direction alone, unpacked values, and columns quantized from bytes of rows."""
    rows, columns = pairs()[name]
    down = columnwise(columns)
    for x in cases(rows, columns):
        in_rows, in_columns = along_rows(x, rows), along_columns(x, columns)
        _, of_rows, of_columns = check_operators(interpreter, Source.of(x), rows, columns, sums=False)
        assert_same_bits(interpreter(triton_quantize.quantize, x, rowwise(rows)), in_rows)
        assert_same_bits(interpreter(triton_quantize.quantize, x.mT, down).mT, in_columns)
        stored = Bytes(*of_rows, rows, x.shape[1], x.dtype)
        assert_same_bits(interpreter(triton_quantize.unpack, stored), in_rows)
        assert_same_bits(interpreter(triton_quantize.requantize, stored, down).mT, along_columns(in_rows, columns))
        stored = Bytes(*of_columns, columns, x.shape[0], x.dtype)
        assert_same_bits(interpreter(triton_quantize.unpack, stored), in_columns.mT)


@pytest.mark.parametrize("shape", [(2, 3, 70, 33), (1, 1), (200, 64), (3, 0), (64, 130)], ids=str)
def test_shapes(shape, interpreter):
    """Batches, single elements, several tiles, no elements; tensors contiguous along columns, and along no axis."""
    rows, columns = pairs()["tetrajet:grad_output"]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mT.contiguous().mT
    sums, *_ = check_operators(interpreter, Source.of(x), rows, columns)
    # fp32 sums of up to 420 numbers in any order: each addition rounds a number below 256 to 24 bits.
    torch.testing.assert_close(sums.sum(0), x.double().flatten(0, -2).sum(0).float(), rtol=0, atol=420 * 2.0**-16)
    for source in (x, x.repeat_interleave(2, -1)[..., ::2]):
        assert_same_bits(interpreter(triton_quantize.quantize, source, rowwise(rows)), along_rows(x, rows))


def test_parts_that_are_cast_as_they_are_read(interpreter):
    """Parts that lie side by side along columns, so that a tile reads several, are rounded to bf16."""
    rows, columns = pairs()["tetrajet:grad_output"]
    parts = torch.randn(3, 2, 70, 33, generator=torch.Generator().manual_seed(1)).unbind()
    sums, *_ = check_operators(interpreter, Source(parts, torch.bfloat16), rows, columns)
    # fp32 sums of 140 numbers below 8, in any order.
    x = torch.cat(parts, -1).bfloat16()
    torch.testing.assert_close(sums.sum(0), x.double().flatten(0, -2).sum(0).float(), rtol=0, atol=140 * 2.0**-16)


def test_scale_formats_of_plugins(interpreter):
    """Formats of powers of two count exponents from their own lowest one, and may have any code for NaN."""
    rows = QuantSpec("e2m1", 16, ScaleSpec(ScaleFormat("e7m0", 7, 0, 63, 2.0**63, False, nan_code=127), "nearest_even"))
    few = ScaleSpec(ScaleFormat("e5m0", 5, 0, 9, 2.0**20, False, nan_code=31), "nearest_even", "encode")
    columns = QuantSpec("e2m1", 16, few)
    x = torch.cat([hostile((40, 48), 16), torch.randn(40, 48, generator=torch.Generator().manual_seed(5))])
    _, of_rows, of_columns = check_operators(interpreter, Source.of(x), rows, columns, sums=False)
    for (codes, scales), spec, source, key in ((of_rows, rows, x, ROW_KEY), (of_columns, columns, x.mT, COLUMN_KEY)):
        stored = Bytes(codes, scales, spec, source.shape[1], x.dtype)
        assert_same_bits(interpreter(triton_quantize.unpack, stored), fake_quantize(source, spec, key=key))


@triton.jit
def _divide(x, divisor, quotient, N: tl.constexpr):
    at = tl.arange(0, N)
    large, inverse = _inverse_of(tl.load(divisor + at))
    tl.store(quotient + at, _quotient(tl.load(x + at), large, inverse))


def divided(x: Tensor, divisor: Tensor) -> Tensor:
    quotient = torch.empty_like(x)
    _divide[1,](x, divisor, quotient, x.numel())
    return quotient


def test_quotients(interpreter):
    """IEEE quotients, as NumPy's, by divisors from 1 to 255 times powers of two: of dividends whose quotients are next
    to midpoints of fp32, and of random dividends."""
    rng, count = np.random.default_rng(0), 2**16
    divisor = np.ldexp(1 + np.arange(count) % 255, rng.integers(-40, 33, count))
    midpoint = rng.integers(2**24, 2**25, count) | 1
    near = np.ldexp(midpoint * divisor, rng.integers(-90, 10, count)).astype(np.float32)
    apart = np.nextafter(near, np.float32(np.inf) * rng.choice([-1, 1], count).astype(np.float32))
    anything = np.ldexp(rng.standard_normal(count), rng.integers(-60, 60, count)).astype(np.float32)
    anything[:5] = 0.0, -0.0, np.inf, -np.inf, np.nan
    for x in (near, apart, anything):
        due = x / divisor.astype(np.float32)
        quotient = interpreter(divided, torch.from_numpy(x), torch.from_numpy(divisor.astype(np.float32)))
        assert_same_bits(quotient, torch.from_numpy(due))


def test_a_tensor_of_one_axis(interpreter):
    x, (spec, _) = torch.randn(90, generator=torch.Generator().manual_seed(1)), pairs()["tetrajet:grad_output"]
    assert_same_bits(interpreter(triton_quantize.quantize, x, rowwise(spec)), along_rows(x, spec))


BY_NAMES = pytest.mark.parametrize("names", GIVEN_ON_GPU, ids="-".join)
BY_BLOCK = pytest.mark.parametrize("one", [False, True], ids=["one a block", "one for all"])


@BY_BLOCK
@BY_NAMES
def test_given_blocks(names, one, interpreter):
    """Compared with the definition of tests/kernels/test_cpu.py, in tensors contiguous along rows and along columns."""
    generator = torch.Generator().manual_seed(3)
    for spec, dtype in ((STOCHASTIC, torch.float32), (ENCODE, torch.bfloat16)):
        x = hostile((2, 70, 45), 16, dtype)
        given = given_for(x, spec, names, one, generator)
        for layout in (x, x.mT.contiguous().mT):
            result = interpreter(triton_quantize.quantize, layout, rowwise(spec, Blocks(**given)))
            assert_same_bits(result, expected_with(x, spec, given, ROW_KEY))


@pytest.mark.long
@BY_BLOCK
@BY_NAMES
def test_given_blocks_of_both_directions(names, one, interpreter):
    """Each direction has its numbers, in one read. Bytes are unpacked with one factor for the whole tensor."""
    encode = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", "encode"), "nearest", "up")
    generator = torch.Generator().manual_seed(4)
    for rows, columns, dtype in ((STOCHASTIC, encode, torch.float32), (encode, STOCHASTIC, torch.bfloat16)):
        x = hostile((2, 70, 45), 16, dtype)
        of_rows, of_columns = (
            given_for(way, spec, names, one, generator, odd=False) for way, spec in ((x, rows), (x.mT, columns))
        )
        due = expected_with(x, rows, of_rows, ROW_KEY), expected_with(x.mT, columns, of_columns, COLUMN_KEY)
        arguments = rowwise(rows, Blocks(**of_rows)), columnwise(columns, Blocks(**of_columns))
        first, second, _ = interpreter(triton_quantize.quantize_both, Source.of(x), *arguments, False)
        assert_same_bits(first, due[0])
        assert_same_bits(second.mT, due[1])
        if one and names in (("divisor",), ("factor",)):  # Direction.packs: the computed statistic shows NaN
            first, codes, scales = interpreter(triton_quantize.quantize_and_pack_columns, Source.of(x), *arguments)
            assert_same_bits(first, due[0])
            stored = Bytes(codes, scales, columns, x.shape[-2], x.dtype)
            values = interpreter(triton_quantize.unpack, stored, Blocks(**of_columns).factor)
            assert_same_bits(values, due[1])


#: The tensors that each operator passes to the kernel.
_BOTH_GIVEN = ("rows_divisor", "rows_factor", "columns_divisor", "columns_factor")
USES = {
    "quantize": ("parts", "row_values"),
    "quantize columns": ("parts", "column_values"),
    "quantize_and_pack": ("parts", "row_values", "row_codes", "row_scales"),
    "quantize_both": ("parts", "row_values", "column_values", "column_sums"),
    "quantize_and_pack_columns": ("parts", "row_values", "column_codes", "column_scales"),
    "quantize_both, of parts, cast": ("parts", "row_values", "column_values", "column_sums"),
    "requantize": ("codes", "scales", "column_values"),
    "unpack": ("codes", "scales", "row_values"),
    "unpack with a factor": ("codes", "scales", "source_factor", "row_values"),
    "quantize, given blocks": ("parts", "row_values", "rows_divisor", "rows_statistic", "rows_factor"),
    "quantize, given scales": ("parts", "row_values", "rows_divisor", "rows_scale", "rows_factor"),
    "quantize_both, given": ("parts", "row_values", "column_values", "column_sums", *_BOTH_GIVEN),
    "quantize_and_pack_columns, given": ("parts", "row_values", "column_codes", "column_scales", *_BOTH_GIVEN),
}
GIVEN_FOR = {side: tuple(f"{side}_{name}" for name in ON_GPU) for side in ("rows", "columns")}
EACH = {"EACH_R": "rows", "EACH_C": "columns"}


@pytest.mark.parametrize("operator", USES)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", PAIRS)
def test_machine_code(name, gpu, operator, compiler):
    rows, columns = pairs()[name]
    binary = compiler(compiled, gpu, rows, columns, operator)
    divides = any(spec.scale.format.mantissa_bits for spec in (rows, columns))  # else scales are powers of two
    assert_machine_code([binary], gpu, allowed=("fma.rn.f32",) if divides else ())
    assert binary.registers <= 255


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "most"), [("quantize", 8), ("quantize columns", 16), ("quantize_both", 24)])
def test_only_numbers_of_blocks_are_divided_by_the_slow_division(operator, most, compiler):
    """IEEE's division takes 18 instructions. The 32 elements of a tile in a thread are divided in another way."""
    binary = compiler(compiled, absent.H200, *pairs()["nvfp4:input"], operator)
    assert binary.ptx.count("div.rn.f32") <= most


def compiled(gpu: absent.Gpu, rows: QuantSpec, columns: QuantSpec, operator: str) -> Binary:
    """Compile the kernel as an operator launches it for a bf16 tensor."""
    used = USES[operator]
    specs = {
        "P": rows if "codes" in used else None,
        "R": rows if any(name.startswith("row_") for name in used) and "codes" not in used else None,
        "C": columns if any(name.startswith("column_") for name in used) else None,
    }

    def scales_of(spec: QuantSpec) -> str:
        return {torch.uint8: "*u8", torch.bfloat16: "*bf16", torch.float32: "*fp32"}[scale_storage(spec.scale.format)]

    types = {
        **dict.fromkeys(("row_values", "column_values"), "*bf16"),
        "parts": ("*fp32", "*fp32") if operator.endswith("of parts, cast") else ("*bf16",),
        **dict.fromkeys(("codes", "row_codes", "column_codes"), "*u8"),
        **dict.fromkeys(("column_sums", "source_factor", *GIVEN_FOR["rows"], *GIVEN_FOR["columns"]), "*fp32"),
        "scales": scales_of(rows),
        "row_scales": scales_of(rows),
        "column_scales": scales_of(columns),
    }
    pointers = {**{name: types[name] for name in used}, "key": "*i32", "step": "*i32"}
    absent_ones = {name: None for name in types if name not in used}
    of_tensor = "source_factor" in used or "columns_factor" in used  # one number for all blocks, as a tensor scale
    each = {name: tuple(part in used and not of_tensor for part in GIVEN_FOR[side]) for name, side in EACH.items()}
    sizes = {"row_salts": ("i32",), "column_salts": ("i32",), "M": "i32", "K": "i32", "width": "i32"}
    formats = {name: None if spec is None else constants(spec) for name, spec in specs.items()}
    tiles = {"THROUGH": triton_quantize.THROUGH[torch.bfloat16], "TILE": TILE}
    constant = {**absent_ones, **formats, **each, **tiles}
    return compile_written(
        gpu, quantize_kernel, {**pointers, **sizes}, constant, [*pointers, "M", "K", "width"], **triton_quantize.OPTIONS
    )


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=() if d is torch.bfloat16 else pytest.mark.gpu) for d in sorted(GPU.dtypes, key=str)],
    ids=str,
)
def test_operators_in_a_compiled_graph(dtype, compiler):
    """Inductor calls each operator once, between the two kernels that it fuses from the other operations."""
    x = torch.zeros(EVEN, dtype=dtype)
    generated = compiler(generate, absent.H200, in_a_graph, (x, KEY, STEP), EXACT)
    for operator in ("quantize_both", "quantize_and_pack", "requantize"):
        assert generated.source.count(f"torch.ops.fp4graph.{operator}.default(") == 1
    assert len(compiler(compile_generated, absent.H200, generated)) == 2


def in_a_graph(x: Tensor, key: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    rows, columns = pairs()["tetrajet:input"]
    draw = Draw(key, step)
    directions = Direction(rows, draw.salted(1)), Direction(columns, draw.salted(6))
    first, second, _ = operators.quantize_both(torch.relu(x), *directions)
    values, packed = operators.quantize_and_pack(torch.exp(first + second), rows, draw, x.dtype)
    assert packed.codes.shape == (EVEN[0], EVEN[1] // 2)
    return values, packed.requantized(columns, draw.salted(2))


def test_for_concatenations_in_memory_and_casts_of_inputs_no_kernel_is_generated(compiler, interpreter):
    """Operators read the tensors where they lie, and give the same bits."""
    generator = torch.Generator().manual_seed(6)
    dy, w = torch.randn(3, 70, 48, generator=generator).bfloat16(), torch.randn(96, 48, generator=generator)
    args = *dy.unbind(), w, KEY, STEP
    generated = compiler(with_all_options, args)
    assert ".run(" not in generated.source
    assert_all_same(interpreter(run_generated, generated, args), side_by_side(*args))


def with_all_options(args: tuple[Tensor, ...]) -> Generated:
    """Generate code under all options that Inductor gets for a GPU. For a worker process."""
    return generate(absent.H200, side_by_side, args, patches({}, on_gpu=True))


def side_by_side(q: Tensor, k: Tensor, v: Tensor, w: Tensor, key: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    rows, columns = pairs()["tetrajet:input"]
    draw = Draw(key, step)
    directions = Direction(rows, draw.salted(1)), Direction(columns, draw.salted(6))
    whole = torch.cat([q, k, v], -1)
    first, second, _ = operators.quantize_both(whole, *directions)
    both = [operators.quantize_and_pack(whole, rows, draw, whole.dtype)]
    both.append(operators.quantize_and_pack_columns(whole, *directions, whole.dtype))
    weight = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)
    both.append(operators.quantize_and_pack(weight, rows, draw, weight.dtype))
    return first, second, *(tensor for values, packed in both for tensor in (values, packed.unpack()))


def test_specs_that_the_kernels_support():
    assert GPU.unknown(QuantSpec()) is None
    for spec in (QuantSpec(block="row", scale=ScaleSpec("fp32")), QuantSpec(block=(16, 16)), QuantSpec(block=48)):
        assert GPU.unknown(spec)
