"""The Triton kernel that quantizes along rows and columns in one read: values, bytes, machine code."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system, or it is not installed")
if not torch.cuda._is_compiled():
    pytest.skip("this torch is built without CUDA", allow_module_level=True)

from torch import Tensor
from torch._subclasses import FakeTensorMode

from benchmarks import absent_gpu as absent
from fp4graph.errors import Error
from fp4graph.kernels import triton_quantize
from fp4graph.kernels.constants import constants
from fp4graph.kernels.inductor import EXACT
from fp4graph.kernels.triton_numerics import quantize_kernel
from fp4graph.kernels.triton_quantize import DTYPES, TILE, pack_both, quantize_both, supports
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.packing import pack, unpack
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.draw import operand_draw
from fp4graph.technique.operands import Operand
from tests.gpu.cases import KEY, STEP, operands, programs
from tests.gpu.test_generated import EVEN, GPUS, UNEVEN, assert_machine_code
from tests.helpers.floats import assert_same_bits

pytestmark = pytest.mark.process

#: Numbers that the shipped policies do not have in plain specs, two by two: along rows, along columns.
OTHERS = {
    "encode": (
        QuantSpec("e2m1", 16, ScaleSpec("e8m3", "nearest_even", "encode")),
        QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", "encode"), ties="away"),
    ),
    "stochastic scales": (
        QuantSpec("e2m1", 32, ScaleSpec("e8m0", "stochastic"), "stochastic", random_bits=8),
        QuantSpec("e2m1", 16, ScaleSpec("ue5m3", "stochastic", zero="to_one")),
    ),
    "e4m3, ue5m3": (
        QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", zero="to_one"), "stochastic"),
        QuantSpec("e2m1", 32, ScaleSpec("ue5m3", "toward_positive"), "stochastic", source="fprop"),
    ),
    "other elements": (
        QuantSpec("e3m0", 32, ScaleSpec("e8m0", "amax_even")),
        QuantSpec("int8", 64, ScaleSpec("fp32", "nearest_even")),
    ),
    "other rules": (
        QuantSpec("e2m3", 2, ScaleSpec("e8m0", "amax_ceil", zero="to_one")),
        QuantSpec("e5m2", 8, ScaleSpec("bf16", "stochastic")),
    ),
    "codes of their own": (
        QuantSpec("int4", 16, ScaleSpec("e8m3", "toward_positive")),
        QuantSpec("e4m3", 16, ScaleSpec("ue5m3_61440", "nearest_even")),
    ),
}


@cache
def pairs() -> dict[str, tuple[QuantSpec, QuantSpec]]:
    """Plain specs of one tensor's two operands in the shipped policies, each pair once, and OTHERS."""
    sides = {
        "input": (Operand.FPROP_INPUT, Operand.WGRAD_INPUT),
        "weight": (Operand.FPROP_WEIGHT, Operand.DGRAD_WEIGHT),
        "grad_output": (Operand.DGRAD_GRAD_OUTPUT, Operand.WGRAD_GRAD_OUTPUT),
    }
    found: dict[str, tuple[QuantSpec, QuantSpec]] = {}
    for name, program in programs():
        for side, (first, second) in sides.items():
            rows, columns = program.operand(first), program.operand(second)
            if rows.is_plain and columns.is_plain and rows.spec is not None and columns.spec is not None:
                pair = rows.spec, columns.spec
                if all(map(supports, pair)) and pair not in found.values():
                    found[f"{name}:{side}"] = pair
    return {**found, **OTHERS}


FEW = ("tetrajet:input", "encode", "stochastic scales")
PAIRS = [pytest.param(name, marks=() if name in FEW else pytest.mark.gpu) for name in pairs()]
SALTS = {"row_salts": (3,), "column_salts": (5,)}


def key_of(operand: Operand) -> Tensor:
    return operand_draw(Draw(KEY, STEP), operand).varying  # type: ignore[union-attr]


def expected(x: Tensor, rows: QuantSpec, columns: QuantSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Both results, the second as the operand that it is, and what it was quantized from."""
    first = fake_quantize(x, rows, key=key_of(Operand.DGRAD_GRAD_OUTPUT))
    source = (first if columns.source == "fprop" else x).mT
    return first, fake_quantize(source, columns, key=key_of(Operand.WGRAD_GRAD_OUTPUT)), source


def arguments(rows: QuantSpec, columns: QuantSpec) -> tuple[object, ...]:
    """Of the operators, after x: the noise of the two operands of an output's gradient."""
    return rows.to_text(), columns.to_text(), KEY, STEP, list(SALTS["row_salts"]), list(SALTS["column_salts"])


@pytest.mark.parametrize("name", PAIRS)
def test_values(name: str, interpreter: ProcessPoolExecutor) -> None:
    """In fp32 on what is hard for the rows' spec, in bf16 for the columns'."""
    rows, columns = pairs()[name]
    for dtype, spec in ((torch.float32, rows), (torch.bfloat16, columns)):
        for _, values in operands(UNEVEN, spec):
            x = values.to(dtype)
            run = interpreter.submit(triton_quantize.run_quantize_both, x, *arguments(rows, columns))
            first, second, _ = expected(x, rows, columns)
            along_rows, along_columns = run.result()
            assert_same_bits(along_rows, first)
            assert_same_bits(along_columns, second.mT)


@pytest.mark.parametrize("name", PAIRS)
def test_bytes(name: str, interpreter: ProcessPoolExecutor) -> None:
    """Those of fp4graph.pack, which stand for the same values."""
    rows, columns = pairs()[name]
    for kind, values in operands(UNEVEN, columns):
        run = interpreter.submit(triton_quantize.run_pack_both, values, *arguments(rows, columns))
        first, second, source = expected(values, rows, columns)
        results = run.result()
        for mine, packed, value in (
            (results[:2], pack(values, rows, key=key_of(Operand.DGRAD_GRAD_OUTPUT)), first),
            (results[2:], pack(source, columns, key=key_of(Operand.WGRAD_GRAD_OUTPUT)), second),
        ):
            assert torch.equal(mine[0], packed.codes), kind
            assert mine[1].dtype is packed.scales.dtype
            assert torch.equal(mine[1].nan_to_num(7), packed.scales.nan_to_num(7)), kind
            assert_same_bits(unpack(replace(packed, codes=mine[0], scales=mine[1])), value)


@pytest.mark.parametrize("shape", [(2, 3, 70, 33), (1, 1), (200, 64), (3, 0), (64, 130)], ids=str)
def test_shapes(shape: tuple[int, ...], interpreter: ProcessPoolExecutor) -> None:
    """Batches, single elements, several tiles, nothing, columns of a transpose."""
    rows, columns = pairs()["tetrajet:grad_output"]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mT.contiguous().mT
    along_rows, along_columns = interpreter.submit(
        triton_quantize.run_quantize_both, x, *arguments(rows, columns)
    ).result()
    first, second, _ = expected(x, rows, columns)
    assert_same_bits(along_rows, first)
    assert_same_bits(along_columns, second.mT)


@pytest.mark.parametrize("pack", [False, True], ids=["values", "bytes"])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == FEW[0] else pytest.mark.gpu) for n in pairs()])
def test_machine_code(name: str, gpu: absent.Gpu, pack: bool, compiler: ProcessPoolExecutor) -> None:
    """Without spilled registers, with IEEE arithmetic only."""
    rows, columns = pairs()[name]
    binary = compiler.submit(compiled, gpu, rows, columns, pack).result()
    assert_machine_code([binary], gpu)
    assert binary.registers <= 255


def compiled(gpu: absent.Gpu, rows: QuantSpec, columns: QuantSpec, pack: bool) -> absent.Binary:
    """The kernel as it is launched on a bf16 tensor."""
    first, second = constants(rows), constants(columns)
    bytes_of = {"code": "*u8", "float": "*bf16" if max(first.s_mantissa, second.s_mantissa) <= 7 else "*fp32"}
    pointers = {
        **dict.fromkeys(("x", "row_values", "column_values"), "*bf16"),
        **dict.fromkeys(("row_codes", "column_codes"), "*u8"),
        "row_scales": bytes_of[first.s_storage],
        "column_scales": bytes_of[second.s_storage],
        **dict.fromkeys(("key", "step"), "*i32"),
    }
    sizes = {"row_salts": ("i32",), "column_salts": ("i32",), "M": "i32", "K": "i32"}
    constant = {"R": first, "C": second, "PACK": pack, "CHAINED": columns.source == "fprop", "TILE": TILE}
    aligned = [*pointers, "M", "K"]
    return absent.compile_written(
        gpu, quantize_kernel, {**pointers, **sizes}, constant, aligned, **triton_quantize.OPTIONS
    )


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=() if d is torch.bfloat16 else pytest.mark.gpu) for d in DTYPES], ids=str
)
def test_in_a_compiled_graph(dtype: torch.dtype, compiler: ProcessPoolExecutor) -> None:
    """An operator between what Inductor fuses before and after it."""
    x = torch.zeros(EVEN, dtype=dtype)
    generated = compiler.submit(absent.generate, absent.H200, in_a_graph, (x, KEY, STEP), EXACT).result()
    assert generated.source.count("torch.ops.fp4graph.quantize_both.default(") == 1
    assert generated.source.count("torch.ops.fp4graph.pack_both.default(") == 1
    assert len(compiler.submit(absent.compile_generated, absent.H200, generated).result()) >= 2


def in_a_graph(x: Tensor, key: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    rows, columns = pairs()["tetrajet:input"]
    draw = Draw(key, step)
    along_rows, along_columns = quantize_both(torch.relu(x), rows, columns, draw, (1,), (6,))
    packed, _ = pack_both(along_rows, rows, columns, draw, (1,), (6,))
    assert packed.codes.shape == (EVEN[0], EVEN[1] // 2)
    return torch.exp(along_rows + along_columns), packed.scales


def test_what_it_cannot_do_is_said() -> None:
    plain = QuantSpec()
    with FakeTensorMode():
        x = torch.zeros(4, 4, device="cuda")
        for spec in (QuantSpec(block="row", scale=ScaleSpec("fp32")), QuantSpec(block=(16, 16)), QuantSpec(block=48)):
            with pytest.raises(Error, match="in blocks of"):
                quantize_both(x, spec, plain)
            with pytest.raises(Error, match="in blocks of"):
                pack_both(x, plain, spec)
        for refused in (x.double(), x[0], torch.zeros(4, 4)):
            with pytest.raises(Error, match=re.escape(f"{refused.dtype} {list(refused.shape)} on {refused.device}")):
                quantize_both(refused, plain, plain)
        with pytest.raises(Error, match="make_key"):
            quantize_both(x, plain, QuantSpec(rounding="stochastic"))
