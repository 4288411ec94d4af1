"""The Triton code that Inductor generates for a GPU computes the bits of eager mode and compiles to machine code.

Eager mode runs the program for a GPU. It differs from a CPU's: a rotation is a product with H, and a tiny tensor scale
γ is split at another power of two.
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
from tests.gpu.machine_code import Binary, compile_generated, generate
from tests.helpers.floats import assert_same_bits

pytestmark = pytest.mark.process

UNEVEN, EVEN = (75, 90), (64, 96)
TRITON = tuple(map(int, version("triton").split(".")[:2]))
#: Bytes of registers that a kernel may spill. Triton 3.8 spills 8 in three kernels for sm_100; 3.7, which torch 2.13
#: brings, spills more, also for sm_90.
SPILLS = 0 if TRITON >= (3, 9) else 8 if TRITON >= (3, 8) else 10**6
#: Tested by `make long`: MXFP4 along rows with ties up, and down columns with ties to even. `make gpu` tests all.
FEW = ("tetrajet:fprop.input", "microscaling:dgrad.weight")
#: Quantizers with exponentials and logarithms, whose last bits differ between devices.
INEXACT_BY_NAME = ("smooth_max:",)
QUANTIZERS = quantizers(later_rules=True)
NAMES = [pytest.param(name, marks=() if name in FEW else pytest.mark.gpu) for name in QUANTIZERS]
GPUS = [pytest.param(gpu, id=f"sm_{gpu.capability}") for gpu in (absent.H200, absent.B200)]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]

#: PTX instructions that may round in another way than separate IEEE operations: approximate, flushing or fused
#: instructions, and those without a rounding mode, which the assembler may fuse.
INEXACT = re.compile(r"\S*\.(?:approx|full|ftz)\b\S*|\b(?:fma|mad)\.\S*f32|\b(?:add|sub|mul)\.f32")


def memory(values: Tensor, quantizer: Quantizer, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the tensor of which ``values`` are the operand, transposed or not."""
    return (values.mT if quantizer.transposed else values).to(dtype).contiguous()


def arguments(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, ...]:
    return (x, KEY, STEP, *quantizer.state(x))


def assert_all_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for result, due in zip(actual, expected, strict=True):
        assert_same_bits(result, due)


def in_eager_mode(function: Callable[..., tuple[Tensor, ...]], args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with traced_for("cuda"):
        return function(*args)


def assert_machine_code(
    binaries: Sequence[Binary], gpu: absent.Gpu, exact: bool = True, allowed: Collection[str] = ()
) -> None:
    """Check that this is machine code for ``gpu`` that spills few registers and, if ``exact``, has IEEE arithmetic and
    the instructions ``allowed`` alone."""
    assert binaries
    for binary in binaries:
        assert f".target sm_{gpu.capability}" in binary.ptx
        assert binary.cubin.startswith(b"\x7fELF")
        assert binary.spilled <= SPILLS
        assert not exact or {*INEXACT.findall(binary.ptx)} <= {*allowed}


@pytest.fixture
def computed(compiler, interpreter):
    def run(function, args, options=EXACT):
        return interpreter(run_generated, compiler(generate, absent.H200, function, args, options), args)

    return run


@pytest.fixture
def binaries_of(compiler):
    def run(gpu, function, args, options=EXACT):
        return compiler(compile_generated, gpu, compiler(generate, gpu, function, args, options))

    return run


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.values[0].startswith(INEXACT_BY_NAME)])
def test_values(name, dtype, compiler, interpreter):
    """Every quantizer of every shipped policy and technique; in fp32, on operands that blocks do not divide."""
    quantizer = QUANTIZERS[name]
    assert quantizer.program.spec is not None
    generated = None
    for kind, values in operands(UNEVEN if dtype is torch.float32 else EVEN, quantizer.program.spec):
        args = arguments(memory(values, quantizer, dtype), quantizer)
        if generated is None:
            generated = compiler(generate, absent.H200, quantizer, args, EXACT)
        expected = in_eager_mode(quantizer, args)
        assert_all_same(interpreter(run_generated, generated, args), expected)
        if kind != "subnormal":
            assert_all_same(expected, quantizer(*args))


@pytest.mark.long
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == FEW[0] else pytest.mark.gpu) for n in QUANTIZERS])
def test_machine_code(name, gpu, binaries_of):
    quantizer = QUANTIZERS[name]
    args = arguments(memory(torch.zeros(EVEN), quantizer, torch.bfloat16), quantizer)
    assert_machine_code(binaries_of(gpu, quantizer, args), gpu, exact=not name.startswith(INEXACT_BY_NAME))


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", FEW)
def test_machine_code_of_every_configuration(name, gpu, compiler):
    """At the size of a ViT-Base layer, all configurations among which autotuning chooses on a card."""
    quantizer = QUANTIZERS[name]
    args = arguments(memory(torch.zeros(768, 3072), quantizer, torch.bfloat16), quantizer)
    generated = compiler(generate, gpu, quantizer, args, EXACT)
    binaries = compiler(compile_generated, gpu, generated, every=True)
    assert len(binaries) > generated.source.count("async_compile.triton(")
    assert_machine_code(binaries, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", [name for name, each in QUANTIZERS.items() if each.program.has_gradient_factor])
def test_machine_code_of_gradient_factors(name, gpu, binaries_of):
    quantizer = QUANTIZERS[name]
    args = arguments(memory(torch.zeros(EVEN), quantizer), quantizer)
    assert_machine_code(binaries_of(gpu, GradientFactor(quantizer), args), gpu, exact=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", rotations())
def test_rotations(name, computed, binaries_of):
    """Signs and padding. The product with H is not tested: one library computes it on both sides."""
    generator, rotation = torch.Generator().manual_seed(0), rotations()[name]
    args = (torch.randn(UNEVEN, generator=generator), torch.randn(40, UNEVEN[1], generator=generator), KEY, STEP)
    assert_all_same(computed(rotation, args), in_eager_mode(rotation, args))
    for gpu in (absent.H200, absent.B200):
        assert_machine_code(binaries_of(gpu, rotation, args), gpu)


def test_every_technique_that_acts_on_tensors_is_tested_here():
    """So are quantizers that only a later rule of a policy has."""
    assert {"tetrajet-v2:fprop.input", "tetrajet-v2, experts:fprop.input"} <= QUANTIZERS.keys()
    shipped = {t for t in default_registry().techniques.values() if t.__module__.startswith("fp4graph_plugins.")}
    in_graphs = {t.name for t in shipped if {*stages_of(t)} & {*QUANTIZER_STAGES, *GRADIENT_STAGES}}
    used = {part.name for each in QUANTIZERS.values() for part in each.program.parts}
    assert in_graphs <= used
    assert {"hadamard"} == {t.name for each in rotations().values() for t in each.gemm.transforms}


def twice(x: Tensor) -> tuple[Tensor]:
    """Quantize twice in one graph."""
    first = QuantSpec("e2m1", 16, ScaleSpec("e8m3", "nearest_even", "encode"))  # bf16 rounds its values
    second = QuantSpec("e2m1", 32, ScaleSpec("ue5m3", "nearest_even"), ties="away")
    return (fake_quantize(fake_quantize(x, first).mT, second),)


@pytest.mark.long
def test_the_cast_between_two_quantizers_stays(computed):
    """Without the options of ``EXACT`` Inductor drops the cast to bf16 between them, and the result is another."""
    args = (torch.randn(EVEN, generator=torch.Generator().manual_seed(4)).bfloat16(),)
    (expected,) = twice(*args)
    assert_same_bits(computed(twice, args)[0], expected)
    assert not torch.equal(computed(twice, args, {})[0], expected)


@pytest.mark.gpu
def test_each_option_of_exactness_is_needed(binaries_of):
    """Without it, the code of a stochastic quantizer has these inexact instructions."""
    quantizer = QUANTIZERS["tetrajet:dgrad.grad_output"]

    def without(*options):
        kept = {name: value for name, value in EXACT.items() if name not in options}
        binaries = binaries_of(absent.H200, quantizer, arguments(torch.zeros(EVEN), quantizer), kept)
        return {instruction for binary in binaries for instruction in INEXACT.findall(binary.ptx)}

    assert not without()
    assert without("eager_numerics.division_rounding") == {"div.full.f32"}
    assert without("eager_numerics.disable_ftz") == {"cvt.rmi.ftz.f32.f32", "cvt.rpi.ftz.f32.f32"}
    assert "fma.rn.f32" in without("emulate_precision_casts")


@pytest.mark.long
def test_symbolic_sizes(compiler, interpreter):
    """Code for any number of rows and columns, run on three shapes."""
    quantizer = QUANTIZERS["tetrajet:fprop.input"]
    assert quantizer.program.spec is not None
    example = arguments(torch.zeros(UNEVEN), quantizer)
    generated = compiler(generate, absent.H200, quantizer, example, EXACT, dynamic=True)
    for shape in (UNEVEN, EVEN, (33, 257)):
        for _, values in operands(shape, quantizer.program.spec):
            args = arguments(values, quantizer)
            assert_all_same(interpreter(run_generated, generated, args), in_eager_mode(quantizer, args))


def keys(key: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """Derive keys by small and large salts, alone and one after the other."""
    apart = [derive(key, salt) for salt in (0, 1, 3, 65_539, 2**31 - 1)]
    return (*apart, derive(mix(derive(key, 65_537), step[:2]), 5), derive(derive(key, 3), 40_000))


@pytest.mark.long
def test_keys(computed, binaries_of):
    """Key arithmetic wraps around at 32 bits, also where the compiler folds constants."""
    assert_all_same(computed(keys, (KEY, STEP)), keys(KEY, STEP))
    for gpu in (absent.H200, absent.B200):
        assert_machine_code(binaries_of(gpu, keys, (KEY, STEP)), gpu)


def divided(z: Tensor) -> tuple[Tensor, ...]:
    """Divide by Qmax of E2M1, and by the κ of NVFP4's tensor scale."""
    return (z / constant(6.0, z), z / constant(2688.0, z))


def divided_by_known_tensors(z: Tensor) -> tuple[Tensor, ...]:
    return (z / torch.full_like(z, 6.0), z / torch.full((), 2688.0, device=z.device))


@pytest.mark.long
def test_quotients_by_constants(computed):
    """Inductor would multiply by the reciprocal, which gives a third of all numbers another last bit."""
    z = 1 + torch.arange(64 * 96).reshape(64, 96) * 2.0**-13
    expected = tuple(
        (z.double() / number).float() for number in (6, 2688)
    )  # rounding twice is harmless: 53 >= 2·24 + 2
    assert_all_same(computed(divided, (z,)), expected)
    assert_all_same(divided_by_known_tensors(z), expected)
    assert not any(map(torch.equal, computed(divided_by_known_tensors, (z,)), expected))
