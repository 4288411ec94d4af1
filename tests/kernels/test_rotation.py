"""The operator of rotations gives the bits of tensor code from every layout, and the sums of scipy's matrix."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from fp4graph.kernels import rotation
from tests.helpers.floats import assert_same_bits
from tests.helpers.operators import check_declaration
from tests.kernels.quantizers import by_both

BLOCKS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return normal numbers, some of which are replaced with large or tiny numbers or zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    which = torch.randint(0, 40, shape, generator=generator)
    for number, special in enumerate((1e30, -1e-40, 0.0, -0.0, 3e4)):
        x[which == number] = special
    return x.to(dtype)


def signs_of(block: int, signed: bool) -> Tensor | None:
    generator = torch.Generator().manual_seed(block)
    return torch.randint(0, 2, (block,), generator=generator) * 2.0 - 1 if signed else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("signed", [False, True], ids=["no signs", "signs"])
@pytest.mark.parametrize("block", BLOCKS)
def test_is_tensor_code_bit_for_bit(block, signed, dtype):
    signs = signs_of(block, signed)
    for shape in ((3, 70), (2, 5, 33), (67, 130), (129,), (1, 1), (64, 1), (1, 96), (0, 32), (4, 0)):
        x = values(shape, dtype)
        layouts = [x] if len(shape) == 1 else [x, x.mT.contiguous().mT, x[..., ::2], x.mT[..., ::2, :].contiguous().mT]
        for source in layouts:
            rotated, expected = by_both(partial(rotation.rotate, source, block, signs))
            assert rotated.dtype is torch.float32
            assert_same_bits(rotated, expected)
            assert_same_bits(*by_both(partial(rotation.unrotate, rotated, block, signs)))


@pytest.mark.parametrize("block", BLOCKS)
def test_the_sums_are_those_of_scipys_matrix(block):
    """Compared in float64, within log2(block) + 3 roundings of a block's sum of magnitudes."""
    signs = signs_of(block, True)
    x = torch.randn(5, 2 * block, generator=torch.Generator().manual_seed(1))
    h = scipy.linalg.hadamard(block) / np.sqrt(block)
    blocks = (x.double().numpy().reshape(-1, block) * signs.double().numpy()) @ h
    bound = (block.bit_length() + 2) * 2.0**-24 * np.abs(x.numpy()).reshape(-1, block).sum(1).max() / np.sqrt(block)
    for source in (x, x.mT.contiguous().mT):
        rotated = rotation.rotate(source, block, signs)
        np.testing.assert_allclose(rotated.double().numpy().reshape(-1, block), blocks, rtol=0, atol=bound)
        np.testing.assert_allclose(rotation.unrotate(rotated, block, signs).numpy(), x.numpy(), rtol=0, atol=2 * bound)


def test_nan_poisons_its_block_alone():
    x = torch.ones(2, 64)
    x[1, 40] = torch.nan
    assert rotation.rotate(x, 32).isnan().tolist() == [[False] * 64, [False] * 32 + [True] * 32]


def test_results_lie_in_memory_as_the_operand_does():
    x = torch.randn(3, 40, 24)
    for source, back in itertools.product((x, x.mT, x[0], x[:0], x[..., ::3]), (False, True)):
        check_declaration("rotate", (source, 8, torch.ones(8), back, source.shape[-1]))
    check_declaration("rotate", (x, 16, None, False, 32))
    assert rotation.rotate(x, 16).stride() == (40 * 32, 32, 1)
    assert rotation.rotate(x.mT, 16).stride() == (24 * 48, 1, 24)
    compiled = torch.compile(lambda x: rotation.unrotate(rotation.rotate(x, 16), 16), backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x.mT), rotation.unrotate(rotation.rotate(x.mT, 16), 16))


@pytest.mark.parametrize(
    ("block", "signs", "message"),
    [
        *((block, None, "power of two") for block in (0, 3, 24)),
        (16, torch.ones(4), r"one for each element of a block, \[16\]; got \[4\]"),
    ],
)
def test_invalid_blocks_and_signs_are_refused(block, signs, message):
    with pytest.raises(ValueError, match=message):
        rotation.rotate(torch.ones(16), block, signs)


def test_signs_may_be_of_16_bits():
    signs, x = signs_of(16, True), torch.randn(3, 32)
    assert signs is not None
    assert torch.equal(rotation.rotate(x, 16, signs.bfloat16()), rotation.rotate(x, 16, signs))


def test_the_gradient_is_the_inverse_rotation():
    """The transpose of an orthonormal matrix is its inverse. The gradient's sums have another order."""
    x, signs = torch.randn(3, 32, requires_grad=True), signs_of(16, True)
    y = rotation.rotate(x, 16, signs)
    dy = torch.randn(3, 32)
    (dx,) = torch.autograd.grad(y, x, dy)
    bound = 2 * 5 * 2.0**-24 * dy.abs().sum(1).max().item()
    torch.testing.assert_close(dx, rotation.unrotate(dy, 16, signs), rtol=0, atol=bound)
