"""The rotation: its matrix, its inverse, and that it cancels between two operands."""

from __future__ import annotations

import pytest
import torch

from fp4graph.numerics.hadamard import hadamard_matrix, rotate, unrotate


@pytest.mark.parametrize("size", [1, 2, 4, 16, 32, 64, 256])
def test_the_matrix_is_sylvesters(size: int) -> None:
    expected = torch.ones(1, 1, dtype=torch.float64)
    while len(expected) < size:
        expected = torch.kron(torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64), expected)
    h = hadamard_matrix(size, dtype=torch.float64)
    assert torch.equal(h, expected / size**0.5)
    assert torch.allclose(h @ h, torch.eye(size, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("block", [4, 16, 64])
def test_exact_on_dyadic_data(block: int) -> None:
    x = torch.randint(-64, 64, (3, 5, 128)).float()
    signs = torch.randint(0, 2, (block,)) * 2.0 - 1
    assert torch.equal(unrotate(rotate(x, block, signs), block, signs), x)
    w = torch.randint(-64, 64, (7, 128)).float()
    assert torch.equal(rotate(x, block, signs) @ rotate(w, block, signs).t(), x @ w.t())


def test_signs_go_first() -> None:
    x, signs = torch.randn(2, 16), torch.randint(0, 2, (16,)) * 2.0 - 1
    assert torch.equal(rotate(x, 16, signs), rotate(x * signs, 16))
    assert not torch.equal(rotate(x, 16, signs).abs(), rotate(x, 16).abs())


def test_padding_and_signs_per_block() -> None:
    x = torch.randint(-8, 8, (3, 37)).float()
    signs = torch.randint(0, 2, (3, 16)) * 2.0 - 1
    rotated = rotate(x, 16, signs)
    assert rotated.shape == (3, 48)
    assert torch.equal(unrotate(rotated, 16, signs, length=37), x)
    assert rotate(torch.zeros(0, 37), 16).shape == (0, 48)
    assert rotate(torch.zeros(4, 0), 16).shape == (4, 0)


@pytest.mark.parametrize("block", [0, 3, 24, -4])
def test_only_powers_of_two(block: int) -> None:
    for call in (
        lambda: hadamard_matrix(block),
        lambda: rotate(torch.ones(4), block),
        lambda: unrotate(torch.ones(4), block),
    ):
        with pytest.raises(ValueError, match="power of two"):
            call()
