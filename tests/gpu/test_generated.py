"""The Triton code that Inductor writes for a GPU computes the bits of eager mode and compiles to machine code.

Eager mode is that of the same program: a GPU rotates by a product with H, where a CPU adds and subtracts in an order of
its own, and parts a tensor scale γ elsewhere if γ is tiny.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import version

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system, or it is not installed")
if not torch.cuda._is_compiled():
    pytest.skip("this torch is built without CUDA", allow_module_level=True)

from torch import Tensor

from benchmarks.gpu import absent
from fp4graph.commands.catalogue import stages_of
from fp4graph.kernels.inductor import EXACT
from fp4graph.numerics.noise import derive, mix
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.scaling import constant
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.numerics.target import traced_for
from fp4graph.technique import GRADIENT_STAGES, QUANTIZER_STAGES
from fp4graph.technique.registry import default_registry
from tests.gpu.cases import KEY, STEP, GradientFactor, Quantizer, operands, quantizers, rotations
from tests.gpu.interpreted import run_generated
from tests.helpers.floats import assert_same_bits

pytestmark = pytest.mark.process

UNEVEN, EVEN = (75, 90), (64, 96)
#: 3.7, which torch 2.13 brings, spills a few registers of the kernels for sm_90.
TRITON = tuple(map(int, version("triton").split(".")[:2]))
#: Bytes that the compilers of older Tritons may spill: 3.8 spills 8 in three kernels of sm_100, 3.7 more.
SPILLS = 0 if TRITON >= (3, 9) else 8 if TRITON >= (3, 8) else 10**6
#: Tested by default: MXFP4 along rows, ties up, and down columns, ties even. `make gpu` tests all.
FEW = ("tetrajet:fprop.input", "microscaling:dgrad.weight")
#: Exponentials and logarithms have no bits that every device agrees on.
INEXACT_BY_NAME = ("smooth_max:",)
NAMES = [pytest.param(name, marks=() if name in FEW else pytest.mark.gpu) for name in quantizers()]
GPUS = [pytest.param(gpu, id=f"sm_{gpu.capability}") for gpu in (absent.H200, absent.B200)]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]

#: PTX that rounds otherwise than IEEE operations one by one: approximate or flushing instructions, multiplications
#: contracted with additions, and those without a rounding mode, which the assembler may contract.
INEXACT = re.compile(r"\S*\.(?:approx|full|ftz)\b\S*|\b(?:fma|mad)\.\S*f32|\b(?:add|sub|mul)\.f32")


def memory(values: Tensor, quantizer: Quantizer, dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor whose operand, transposed or not, holds ``values``."""
    return (values.mT if quantizer.transposed else values).to(dtype).contiguous()


def arguments(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, ...]:
    return (x, KEY, STEP, *quantizer.state(x))


def assert_all_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, due in zip(actual, expected, strict=True):
        assert_same_bits(mine, due)


def in_eager_mode(function: Callable[..., tuple[Tensor, ...]], args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with traced_for("cuda"):
        return function(*args)


def assert_machine_code(
    binaries: Sequence[absent.Binary], gpu: absent.Gpu, exact: bool = True, allowed: Collection[str] = ()
) -> None:
    """Machine code for ``gpu``, without spilled registers and, if it is to be exact, with IEEE arithmetic only, beside
    the instructions ``allowed``."""
    assert binaries
    for binary in binaries:
        assert f".target sm_{gpu.capability}" in binary.ptx
        assert binary.cubin.startswith(b"\x7fELF")
        assert binary.spilled <= SPILLS
        assert not exact or {*INEXACT.findall(binary.ptx)} <= {*allowed}


@pytest.fixture
def computed(compiler, interpreter):

    def run(function, args, options=EXACT):
        return interpreter(run_generated, compiler(absent.generate, absent.H200, function, args, options), args)

    return run


@pytest.fixture
def binaries_of(compiler):

    def run(gpu, function, args, options=EXACT, **every):
        return compiler(absent.compile_generated, gpu, compiler(absent.generate, gpu, function, args, options), **every)

    return run


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.values[0].startswith(INEXACT_BY_NAME)])
def test_values(name, dtype, compiler, interpreter):
    """Of every quantizer of every shipped policy and technique; in fp32 on operands whose blocks do not fit."""
    quantizer = quantizers()[name]
    assert quantizer.program.spec is not None
    generated = None
    for kind, values in operands(UNEVEN if dtype is torch.float32 else EVEN, quantizer.program.spec):
        args = arguments(memory(values, quantizer, dtype), quantizer)
        if generated is None:
            generated = compiler(absent.generate, absent.H200, quantizer, args, EXACT)
        expected = in_eager_mode(quantizer, args)
        assert_all_same(interpreter(run_generated, generated, args), expected)
        if kind != "subnormal":
            assert_all_same(expected, quantizer(*args))


@pytest.mark.long
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == FEW[0] else pytest.mark.gpu) for n in quantizers()])
def test_machine_code(name, gpu, binaries_of):
    quantizer = quantizers()[name]
    args = arguments(memory(torch.zeros(EVEN), quantizer, torch.bfloat16), quantizer)
    assert_machine_code(binaries_of(gpu, quantizer, args), gpu, exact=not name.startswith(INEXACT_BY_NAME))


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", FEW)
def test_machine_code_of_every_configuration(name, gpu, compiler):
    """At the size of a ViT-Base layer: those that are measured against each other on the card."""
    quantizer = quantizers()[name]
    args = arguments(memory(torch.zeros(768, 3072), quantizer, torch.bfloat16), quantizer)
    generated = compiler(absent.generate, gpu, quantizer, args, EXACT)
    binaries = compiler(absent.compile_generated, gpu, generated, every=True)
    assert len(binaries) > generated.source.count("async_compile.triton(")
    assert_machine_code(binaries, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", [name for name, one in quantizers().items() if one.program.has_gradient_factor])
def test_machine_code_of_gradient_factors(name, gpu, binaries_of):
    quantizer = quantizers()[name]
    args = arguments(memory(torch.zeros(EVEN), quantizer), quantizer)
    assert_machine_code(binaries_of(gpu, GradientFactor(quantizer), args), gpu, exact=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", rotations())
def test_rotations(name, computed, binaries_of):
    """Signs and padding; the matrix product with H is the same library's on both sides of the comparison."""
    generator, rotation = torch.Generator().manual_seed(0), rotations()[name]
    args = (torch.randn(UNEVEN, generator=generator), torch.randn(40, UNEVEN[1], generator=generator), KEY, STEP)
    assert_all_same(computed(rotation, args), in_eager_mode(rotation, args))
    for gpu in (absent.H200, absent.B200):
        assert_machine_code(binaries_of(gpu, rotation, args), gpu)


def test_no_technique_is_left_out():
    """Every shipped technique that acts on tensors is part of a quantizer or a rotation above."""
    shipped = {t for t in default_registry().techniques.values() if t.__module__.startswith("fp4graph_plugins.")}
    in_graphs = {t.name for t in shipped if {*stages_of(t)} & {*QUANTIZER_STAGES, *GRADIENT_STAGES}}
    used = {part.name for one in quantizers().values() for part in one.program.parts}
    assert in_graphs <= used
    assert {"hadamard"} == {t.name for one in rotations().values() for t in one.gemm.transforms}


def twice(x: Tensor) -> tuple[Tensor]:
    """Double quantization in one graph."""
    first = QuantSpec("e2m1", 16, ScaleSpec("e8m3", "nearest_even", "encode"))  # what it gives is rounded in bf16
    second = QuantSpec("e2m1", 32, ScaleSpec("ue5m3", "nearest_even"), ties="away")
    return (fake_quantize(fake_quantize(x, first).mT, second),)


@pytest.mark.long
def test_what_is_quantized_again_was_rounded(computed):
    """Without the options Inductor drops the cast to bf16 between the two, and the result is another."""
    args = (torch.randn(EVEN, generator=torch.Generator().manual_seed(4)).bfloat16(),)
    (expected,) = twice(*args)
    assert_same_bits(computed(twice, args)[0], expected)
    assert not torch.equal(computed(twice, args, {})[0], expected)


@pytest.mark.gpu
def test_each_option_is_needed(binaries_of):
    """What each of them keeps out of the code of a stochastic quantizer."""
    quantizer = quantizers()["tetrajet:dgrad.grad_output"]

    def without(*options):
        kept = {name: value for name, value in EXACT.items() if name not in options}
        binaries = binaries_of(absent.H200, quantizer, arguments(torch.zeros(EVEN), quantizer), kept)
        return {found for binary in binaries for found in INEXACT.findall(binary.ptx)}

    assert not without()
    assert without("eager_numerics.division_rounding") == {"div.full.f32"}
    assert without("eager_numerics.disable_ftz") == {"cvt.rmi.ftz.f32.f32", "cvt.rpi.ftz.f32.f32"}
    assert "fma.rn.f32" in without("emulate_precision_casts")


@pytest.mark.long
def test_symbolic_sizes(compiler, interpreter):
    """Code for any number of rows and columns, run on three."""
    quantizer = quantizers()["tetrajet:fprop.input"]
    assert quantizer.program.spec is not None
    example = arguments(torch.zeros(UNEVEN), quantizer)
    generated = compiler(absent.generate, absent.H200, quantizer, example, EXACT, dynamic=True)
    for shape in (UNEVEN, EVEN, (33, 257)):
        for _, values in operands(shape, quantizer.program.spec):
            args = arguments(values, quantizer)
            assert_all_same(interpreter(run_generated, generated, args), in_eager_mode(quantizer, args))


def keys(key: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """Derivations by small and large numbers, alone and one after the other."""
    apart = [derive(key, salt) for salt in (0, 1, 3, 65_539, 2**31 - 1)]
    return (*apart, derive(mix(derive(key, 65_537), step[:2]), 5), derive(derive(key, 3), 40_000))


@pytest.mark.long
def test_keys(computed, binaries_of):
    """Key arithmetic wraps around at 32 bits, whatever the compiler makes of numbers that it knows."""
    assert_all_same(computed(keys, (KEY, STEP)), keys(KEY, STEP))
    for gpu in (absent.H200, absent.B200):
        assert_machine_code(binaries_of(gpu, keys, (KEY, STEP)), gpu)


def divided(z: Tensor) -> tuple[Tensor, ...]:
    """By Qmax of E2M1, and by the κ of NVFP4's tensor scale."""
    return (z / constant(6.0, z), z / constant(2688.0, z))


def divided_by_what_is_known(z: Tensor) -> tuple[Tensor, ...]:
    return (z / torch.full_like(z, 6.0), z / torch.full((), 2688.0, device=z.device))


@pytest.mark.long
def test_quotients_by_constants(computed):
    """Inductor would multiply by the reciprocals, which gives a third of all numbers another last bit."""
    z = 1 + torch.arange(64 * 96).reshape(64, 96) * 2.0**-13
    expected = tuple((z.double() / number).float() for number in (6, 2688))  # innocuous: 53 bits are twice 24 and more
    assert_all_same(computed(divided, (z,)), expected)
    assert_all_same(divided_by_what_is_known(z), expected)
    assert not any(map(torch.equal, computed(divided_by_what_is_known, (z,)), expected))
