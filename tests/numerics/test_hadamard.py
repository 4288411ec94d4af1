"""The Hadamard rotation: its matrix, its inverse, and its cancelling between two operands."""

from __future__ import annotations

from unittest import mock

import pytest
import scipy.linalg
import torch

from fp4graph.numerics.hadamard import hadamard_matrix, rotate, rotate_in_fp32, unrotate
from fp4graph.numerics.target import traced_for


@pytest.mark.parametrize("size", [1, 2, 4, 16, 32, 64, 256])
def test_the_matrix_is_sylvesters(size):
    h = hadamard_matrix(size, dtype=torch.float64)
    assert torch.equal(h, torch.from_numpy(scipy.linalg.hadamard(size)).double() / size**0.5)
    assert torch.allclose(h @ h, torch.eye(size, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("block", [4, 16, 64])
def test_rotations_of_integers_are_exact_and_cancel(block):
    x = torch.randint(-64, 64, (3, 5, 128)).float()
    signs = torch.randint(0, 2, (block,)) * 2.0 - 1
    rotated = rotate(x, block, signs)
    assert torch.equal(unrotate(rotated, block, signs), x)
    assert torch.equal(rotated, rotate(x * signs.repeat(128 // block), block))  # signs go first
    assert not torch.equal(rotated.abs(), rotate(x, block).abs())
    w = torch.randint(-64, 64, (7, 128)).float()
    assert torch.equal(rotated @ rotate(w, block, signs).t(), x @ w.t())


@pytest.mark.parametrize("signed", [False, True], ids=["no signs", "signs"])
@pytest.mark.parametrize("shape", [(3, 64), (5, 90), (2, 3, 70)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [16, 32])
def test_products_with_h_as_on_a_gpu_give_the_sums_of_a_cpu(block, dtype, shape, signed):
    """bf16 is not cast if 1/√block is a power of two; a transposed operand is not copied."""
    multiplied: list[torch.dtype] = []

    def on_a_cpu(product):
        def run(left, right, out_dtype=torch.float32):
            multiplied.append(left.dtype)
            return product(left.to(out_dtype), right.to(out_dtype))

        return run

    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-64, 64, shape, generator=generator).to(dtype)
    signs = torch.randint(0, 2, (block,), generator=generator) * 2.0 - 1 if signed else None
    expected = rotate(x.float(), block, signs)
    for operand in (x, x.mT.contiguous().mT):
        with traced_for("cuda"), mock.patch.multiple(torch, mm=on_a_cpu(torch.mm), bmm=on_a_cpu(torch.bmm)):
            rotated = rotate_in_fp32(operand, block, signs)
        if block == 16:
            assert torch.equal(rotated, expected)
        else:  # 32 products with 1/√32, each rounded to 24 bits
            torch.testing.assert_close(rotated, expected, rtol=0, atol=32 * 64 * 2.0**-24)
        if len(shape) == 2:
            assert rotated.stride(-1) == (1 if operand is x else rotated.shape[0])
    assert set(multiplied) == {dtype if block == 16 else torch.float32}


def test_lines_are_padded_to_whole_blocks_and_each_block_may_have_its_signs():
    x = torch.randint(-8, 8, (3, 37)).float()
    signs = torch.randint(0, 2, (3, 16)) * 2.0 - 1
    rotated = rotate(x, 16, signs)
    assert rotated.shape == (3, 48)
    assert torch.equal(unrotate(rotated, 16, signs, length=37), x)
    assert rotate(torch.zeros(0, 37), 16).shape == (0, 48)
    assert rotate(torch.zeros(4, 0), 16).shape == (4, 0)


@pytest.mark.parametrize("block", [0, 3, 24, -4])
def test_blocks_must_be_powers_of_two(block):
    for function, *arguments in ((hadamard_matrix,), (rotate, torch.ones(4)), (unrotate, torch.ones(4))):
        with pytest.raises(ValueError, match="power of two"):
            function(*arguments, block)
