"""The Triton kernel of products whose accumulator is multiplied by a scalar: values, machine code, what it takes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system, or it is not installed")
if not torch.cuda._is_compiled():
    pytest.skip("this torch is built without CUDA", allow_module_level=True)

from torch import Tensor

from benchmarks.gpu import absent
from fp4graph.kernels import gpu, switches, triton_product
from fp4graph.kernels.triton_kernels import product_kernel
from tests.gpu.machine_code import Binary, compile_written
from tests.gpu.test_generated import GPUS, assert_machine_code
from tests.helpers.floats import assert_same_bits

pytestmark = pytest.mark.process

#: (batch, M, N, K): one tile, several tiles that do not divide the sizes, an empty sum, an empty result.
SHAPES = [((), 1, 1, 1), ((), 130, 257, 70), ((), 1030, 40, 64), ((2, 3), 20, 33, 90), ((), 3, 5, 0), ((), 0, 5, 7)]


def factors(shape: tuple[tuple[int, ...], int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return both factors and a vector to add: small whole numbers, whose sums are exact in any order."""
    batch, m, n, k = shape
    generator = torch.Generator().manual_seed(m)
    sizes = (*batch, m, k), (*batch, n, k), (n,)
    left, right, addend = (torch.randint(-6, 7, size, generator=generator).to(dtype) for size in sizes)
    return left, right, addend


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, transposed, interpreter):
    """The exact sum times a scalar, then plus an addend, each rounded to fp32, and the result to bf16."""
    *both, addend = factors(shape, torch.bfloat16)
    left, right = (x.mT.contiguous().mT if turned else x for x, turned in zip(both, transposed, strict=True))
    scale = torch.tensor(1.1)
    exact = (left.double() @ right.double().mT).float() * scale
    for added, beta in ((None, 1.0), (addend, 1.0), (addend, 0.3)):
        due = exact if added is None else exact + beta * added.float()
        result = interpreter(triton_product.scaled_product, left, right, scale, added, beta)
        assert_same_bits(result, due.to(torch.bfloat16))


def test_nan_and_inf_reach_their_row_and_column_alone(interpreter):
    """Also in the programs at the edges, which read beyond the factors."""
    left, right, _ = factors(((), 130, 140, 70), torch.float16)
    left[129, 3], right[5, 69] = torch.nan, torch.inf
    result = interpreter(triton_product.scaled_product, left, right, torch.tensor(0.7), None, 1.0)
    assert_same_bits(result, (left.float() @ right.float().mT * torch.tensor(0.7)).to(torch.float16))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_machine_code(layout, gpu, compiler):
    """As fprop and dgrad launch it ("rows"), and for operands that are contiguous along the other axis ("columns")."""
    binary = compiler(compiled, gpu, layout)
    assert_machine_code([binary], gpu)
    assert ("wgmma.mma_async" if gpu.capability == 90 else "tcgen05.mma") in binary.ptx  # tensor cores


def compiled(gpu: absent.Gpu, layout: str) -> Binary:
    pointers = dict.fromkeys(("left", "right", "addend", "result"), "*bf16") | {"scale": "*fp32"}
    numbers = dict.fromkeys(("M", "N", "K", "left_batch", "right_batch"), "i32")
    ones = ("left_k", "right_k") if layout == "rows" else ("left_m", "right_n")
    others = [name for name in ("left_m", "left_k", "right_n", "right_k") if name not in ones]
    numbers |= dict.fromkeys(others, "i32")
    constant, types = {**dict.fromkeys(ones, 1), "BETA": 1.0, **triton_product.TILES}, {**pointers, **numbers}
    return compile_written(gpu, product_kernel, types, constant, [*types], **triton_product.OPTIONS)


def test_the_kernel_takes_short_products_of_16_bits_with_a_vector_or_nothing_to_add():
    left, right = (torch.empty(rows, switches.current().products, dtype=torch.bfloat16) for rows in (2, 8))
    vector = torch.empty(8)
    assert gpu.multiplies(left, right, None)
    assert gpu.multiplies(left.half(), right, vector)
    assert not gpu.multiplies(left.float(), right, None)
    longer = torch.empty(2, switches.current().products + 1, dtype=torch.bfloat16)
    assert not gpu.multiplies(longer, longer, None)
    assert not gpu.multiplies(left, right, torch.empty(2, 8))
    assert not gpu.multiplies(left, right, torch.empty(16)[::2])
    assert not gpu.multiplies(left, right, vector[:1])  # one element for all columns
