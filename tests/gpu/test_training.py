"""Forward and backward of a site by the interpreted kernels of a GPU, compared with the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system, or it is not installed")

from torch import Tensor

from fp4graph.kernels import gpu, machine
from fp4graph.numerics.declare import of_flat
from fp4graph.numerics.target import traced_for
from fp4graph.ops.matmul import quantized_matmul
from tests.gpu.cases import KEY, STEP, programs
from tests.helpers.floats import assert_same_bits

pytestmark = pytest.mark.process

#: dY is quantized in both directions; bytes of X and W are kept along rows (tetrajet) or along columns.
POLICIES = ("tetrajet", "microscaling", "mxfp4-full-hadamard", pytest.param("nvfp4", marks=pytest.mark.gpu))
#: Policies with a tensor scale, 2-D blocks, a range guard with rotations, one block per tensor or line.
WITH_TECHNIQUES = [
    pytest.param(name, marks=() if name in ("nvfp4-best", "int4-per-tensor") else pytest.mark.gpu)
    for name in ("nvfp4-best", "nvfp4-te", "mxfp4-rht-sr", "int4-per-tensor", "wang-dge", "ue5m3-best", "quartet")
]
OPERATORS = ("quantize", "quantize_and_pack", "quantize_both", "quantize_and_pack_columns", "requantize", "unpack")


def factors(dtype: torch.dtype) -> list[Tensor]:
    """Return A, B, an addend and dY, of sizes that blocks do not divide, in small whole numbers: all sums are exact in
    fp32, so that their order, which depends on the layout of the operands, does not matter."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(75, 90), (70, 90), (70,), (75, 70)]
    return [torch.randint(-6, 7, shape, generator=generator).to(dtype) for shape in shapes]


def trained(policy: str, dtype: torch.dtype, needs: tuple[bool, bool]) -> list[Tensor]:
    """Return the output and the gradients of a site under ``policy``."""
    program = dict(programs())[policy]
    a, b, addend, dy = factors(dtype)
    a, b = a.requires_grad_(needs[0]), b.requires_grad_(needs[1])
    y = quantized_matmul(program, a, b, addend.requires_grad_(), KEY, STEP)
    y.backward(dy)
    return [y.detach(), *(x.grad for x in (a, b, addend) if x.grad is not None)]


def trained_by_triton(policy: str, dtype: torch.dtype, needs: tuple[bool, bool]) -> tuple[list[Tensor], list[str]]:
    """Return the results of :func:`trained` as on a GPU, and the operators that ran. For the interpreter's process."""
    from fp4graph.kernels import triton_product, triton_quantize

    ran: list[str] = []

    def counted(name: str):
        kernel = of_flat(name, getattr(triton_product if name == "scaled_product" else triton_quantize, name))

        def run(*arguments: object) -> object:
            ran.append(name)
            return kernel(*arguments)

        return run

    library = torch.library.Library("fp4graph", "IMPL")
    for name in (*OPERATORS, "scaled_product"):
        library.impl(name, counted(name), "CPU", allow_override=True)
    machine.available_on_gpu = lambda: True
    try:
        with as_on_a_gpu():
            return trained(policy, dtype, needs), sorted(ran)
    finally:
        library._destroy()


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Run the program for a GPU on CPU tensors, by tensor code where operators have no kernel."""
    in_fp32 = mock.patch.object(gpu, "_has_bfloat16", return_value=False)  # an fp32 model's products
    with traced_for("cuda"), in_fp32, mock.patch.multiple(torch, mm=on_a_cpu(torch.mm), bmm=on_a_cpu(torch.bmm)):
        yield


def on_a_cpu(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``product`` with an ``out_dtype``, which torch has for GPUs alone. All sums here are exact in fp32."""

    def run(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        wanted = left.dtype if out_dtype is None else out_dtype
        return product(left.to(wanted), right.to(wanted))

    return run


USED = {
    "tetrajet": ["quantize_and_pack", "quantize_and_pack", "quantize_both", "requantize", "requantize"],
    "microscaling": ["quantize_and_pack_columns", "quantize_and_pack_columns", "quantize_both", "unpack", "unpack"],
}
USED["nvfp4"] = USED["microscaling"]
USED["mxfp4-full-hadamard"] = ["quantize"] * 6  # rotations give the two directions of a tensor different values
# A tensor scale needs no other operators: the kernel divides by γ, and the bytes are kept with it.
USED["nvfp4-best"] = USED["ue5m3-best"] = USED["microscaling"]
USED["nvfp4-te"] = USED["quartet"] = ["quantize"] * 6  # 2-D blocks, rotations
USED["mxfp4-rht-sr"] = ["quantize"] * 4  # fprop is in high precision
USED["int4-per-tensor"] = ["quantize"] * 4 + ["quantize_both"]  # scales of a whole tensor are not packed
USED["wang-dge"] = []  # tensor code quantizes blocks that are lines
#: The number of products whose accumulator is multiplied by a scalar, from a tensor scale or a range guard.
SCALED = {"nvfp4-best": 3, "ue5m3-best": 3, "nvfp4-te": 3, "mxfp4-rht-sr": 2, "quartet": 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("policy", [*POLICIES, *WITH_TECHNIQUES])
def test_a_site(policy, dtype, interpreter):
    """The bits are those of the CPU's kernels, or of the program for a GPU by tensor code where a CPU sums in another
    order: in rotations, and in fp32 products with a scalar, whose sums need not be exact."""
    results, ran = interpreter(trained_by_triton, policy, dtype, (True, True))
    quantizers = [name for name in ran if name != "scaled_product"]
    assert quantizers == USED[policy]
    assert len(ran) - len(quantizers) == (SCALED.get(policy, 0) if dtype is torch.bfloat16 else 0)
    program = dict(programs())[policy]
    rotates = any(gemm.transforms for gemm in (program.fprop, program.dgrad, program.wgrad))
    rounds = policy in SCALED and dtype is torch.float32
    with as_on_a_gpu() if rotates or rounds else nullcontext():
        expected = trained(policy, dtype, (True, True))
    for result, due in zip(results, expected, strict=True):
        assert_same_bits(result, due)


@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["input", "weight"])
@pytest.mark.parametrize("policy", ["tetrajet", "microscaling"])
def test_operands_of_a_gradient_that_is_not_needed_are_not_quantized(policy, needs, interpreter):
    results, ran = interpreter(trained_by_triton, policy, torch.bfloat16, needs)
    assert len(ran) == 4  # two operands of the forward, two of the backward
    assert "quantize_both" not in ran
    for result, due in zip(results, trained(policy, torch.bfloat16, needs), strict=True):
        assert_same_bits(result, due)
