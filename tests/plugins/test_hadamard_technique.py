"""hadamard: rotations cancel in products, and a whole site follows its equations."""

from __future__ import annotations

import pytest
import torch

import fp4graph
from fp4graph.technique.operands import Gemm
from tests.helpers.policies import loaded, quantizer
from tests.plugins.layer import DRAW, SPEC, Layer, draw, gaussian, products_by
from tests.recipes.arithmetic import hadamard


def policy(options, *, block=32, operands=None):
    return loaded("hadamard", options, quantize=quantizer(block), operands=operands)


layer = Layer(policy, 64, 96)
program = layer.program


def sylvester(size):
    return torch.from_numpy(hadamard(size)).float()


def on_blocks(x, matrix):
    """Return ``x [R, K]``, zero-padded, times the block-diagonal matrix of copies of ``matrix``."""
    g = len(matrix)
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % g))
    return (x.reshape(len(x), -1, g) @ matrix).reshape(len(x), -1)


@pytest.fixture
def data():
    """X, W and dY of 50 tokens, which no block divides, so that wgrad's operands are padded."""
    return gaussian(50, 64), gaussian(96, 64, seed=1), gaussian(50, 96, seed=2)


@pytest.mark.parametrize("kind", ["random", "deterministic"])
@pytest.mark.parametrize("block", [2, 4, 8, 16, 32, 64])
def test_rotations_cancel_exactly_for_powers_of_four_and_to_rounding_for_other_blocks(block, kind):
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-128, 129, (rows, 64), generator=generator) / 16 for rows in (50, 96))  # all sums are exact
    rotation = program({"block": block, "kind": kind}, block=64).fprop.rotate(x, w, DRAW)
    assert not torch.equal(rotation.left, x)
    product, back = rotation.left @ rotation.right.T, rotation.undo(rotation.left, "left")
    if block in (4, 16, 64):
        assert torch.equal(product, x @ w.T)
        assert torch.equal(back, x)
    else:
        # A rotation rounds 1/√g and the products with it, each by at most 2^-24. Norms bound sums (Cauchy-Schwarz).
        norm_x, norm_w = x.norm(dim=1).max().item(), w.norm(dim=1).max().item()
        torch.testing.assert_close(product, x @ w.T, rtol=0, atol=(2 * 2 + 64) * 2.0**-24 * norm_x * norm_w)
        torch.testing.assert_close(back, x, rtol=0, atol=(2 * 2 + 5) * 2.0**-24 * norm_x)  # log2(32) = 5 rounded sums


@pytest.mark.parametrize("block", [16, 32])
def test_the_deterministic_site_is_its_equations(data, block):
    """Each GEMM reads the original operands, rotates them along the contraction axis, and then quantizes them."""
    expected = products_by(lambda t: fp4graph.fake_quantize(on_blocks(t, sylvester(block)), SPEC), *data)
    actual = layer.products(*data, {"block": block, "kind": "deterministic"})
    # The product with H sums in an unknown order, so that last bits may differ, and with them codes at ties.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def signs_of(built, gemm=Gemm.FPROP, step=0, seed=0):
    """Return S: the GEMM rotates the identity to I·S·H, and I·S·H times Hᵀ is S."""
    eye = torch.eye(64)
    rotation = getattr(built, gemm).rotate(eye, eye, draw(step, seed))
    assert torch.equal(rotation.left, rotation.right)
    return on_blocks(rotation.left, sylvester(16).T)


def test_random_signs_go_before_the_rotation_and_are_the_same_in_every_block():
    s = signs_of(program({"block": 16}))
    assert torch.equal(s, torch.diag(s.diagonal()))
    diagonal = s.diagonal().reshape(4, 16)
    assert {*diagonal.flatten().tolist()} == {-1.0, 1.0}
    assert all(torch.equal(row, diagonal[0]) for row in diagonal)


@pytest.mark.slow
def test_signs_are_drawn_anew_at_every_forward_unless_resample_is_never():
    resampled, fixed = program({"block": 16}), program({"block": 16, "resample": "never"})
    for built, varies, count in ((resampled, "step", 8), (fixed, "step", 1), (fixed, "seed", 8)):
        assert len({tuple(signs_of(built, **{varies: i}).diagonal().tolist()) for i in range(8)}) == count
    mean = torch.stack([signs_of(resampled, step=i).diagonal()[:16] for i in range(400)]).mean(0)
    assert mean.abs().max() < 4.5 / 400**0.5  # 4.5 standard errors of a fair sign


def test_random_signs_in_the_backward_alone():
    built = program({"block": 16, "kind": "random_backward"})
    assert torch.equal(signs_of(built), torch.eye(64))
    diagonals = [signs_of(built, gemm).diagonal() for gemm in (Gemm.DGRAD, Gemm.WGRAD)]
    assert all({*diagonal.tolist()} == {-1.0, 1.0} for diagonal in diagonals)


@pytest.mark.parametrize(
    ("scope", "rotated"),
    [("all", {*Gemm}), ("backward", {Gemm.DGRAD, Gemm.WGRAD}), (["wgrad"], {Gemm.WGRAD}), (["fprop"], {Gemm.FPROP})],
)
def test_scope_names_the_gemms_that_are_rotated(scope, rotated):
    built = program({"scope": scope})
    assert {gemm for gemm in Gemm if getattr(built, gemm).transforms} == rotated


def test_the_backward_reads_fprop_operands_rotated_back(data):
    x, w, dy = data
    exact = {"backward": "keep", "wgrad.input": "fprop"}
    _, dx, dw = layer.products(x, w, dy, {"block": 16, "kind": "deterministic"}, operands=exact)
    h = sylvester(16)  # its entries, ±1/4, are exact
    back = on_blocks(fp4graph.fake_quantize(on_blocks(x, h), SPEC), h.T)
    torch.testing.assert_close(dw, dy.T @ back, rtol=1e-5, atol=1e-5)  # sums in another order
    torch.testing.assert_close(dx, dy @ w, rtol=1e-5, atol=1e-5)
