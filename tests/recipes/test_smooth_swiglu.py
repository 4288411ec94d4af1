"""Values of nvfp4-smooth-swiglu at the product whose input is a SwiGLU; at other sites it equals nvfp4-best."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp4graph
from tests.recipes.bits import SiteBits
from tests.recipes.linear import Data, mismatches
from tests.recipes.mx_references import EL_NVFP4, STOCHASTIC_BACKWARD, everywhere, replace

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """The product of a SwiGLU with a weight; with its other linears, the module counts as a block of the model."""

    def __init__(self, weight: np.ndarray) -> None:
        super().__init__()
        self.down = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.more = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():
            self.down.weight.copy_(torch.from_numpy(weight))

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.down(nn.functional.silu(gate) * up)


class Blocks(nn.Module):
    def __init__(self, weight: np.ndarray) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(weight) for _ in range(2))

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.blocks[1](gate, up) + 0.0 * self.blocks[0](gate.detach(), up.detach())


def channel_maxima(x: np.ndarray) -> np.ndarray:
    """Return the absolute maximum of each channel of x [T, K], 1 for a channel of zeros."""
    s = np.abs(x).max(0)
    return np.where(s > 0, s, 1.0)


def reference(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: SiteBits) -> tuple[np.ndarray, ...]:
    """Return (y, dx, dw) of Smooth-SwiGLU (Fishman et al. 2025): y = Q(X/s) Q(W s)^T, s = `channel_maxima`.

    The backward quantizes the original operands, as in all recipes of the design-space paper: dx = Q(dY) Q(W),
    dw = Q(dY)^T Q(X), with the tensor scale and the stochastic rounding of the NVFP4 recipe in that paper's Table 4.
    """
    quantizer = replace(EL_NVFP4, headroom=0.5, zero="to_one")
    s = channel_maxima(x)
    # The engine divides and multiplies in fp32.
    smooth, weight = (x / s).astype(np.float32).astype(np.float64), (w * s).astype(np.float32).astype(np.float64)
    y = quantizer(smooth, 1, "fprop.input", draw) @ quantizer(weight, 1, "fprop.weight", draw).T
    _, dx, dw = everywhere(quantizer, STOCHASTIC_BACKWARD)(x, w, dy, draw)
    return y, dx, dw


def test_values_at_the_product_of_a_swiglu() -> None:
    wide = Data.wide(0)
    # At 32 a sigmoid is 1 in fp32: silu(32) = 32, and X = 32·up exactly.
    gate, up = torch.full(wide.x.shape, 32.0), torch.from_numpy(wide.x / 32).float().requires_grad_()
    data = Data(32 * up.detach().double().numpy(), wide.w, wide.dy)
    model = fp4graph.apply(Blocks(wide.w), "nvfp4-smooth-swiglu", backend="eager")
    y = model(gate, up)
    y.backward(torch.from_numpy(wide.dy).float())
    weight = model.blocks[1].down.weight
    assert up.grad is not None
    assert weight.grad is not None
    got = tuple(t.detach().double().numpy() for t in (y, up.grad / 32, weight.grad, y))
    expected = reference(data.x, data.w, data.dy, SiteBits("blocks.1.down"))
    # y sums products of X/s and W·s, whose rows have other norms than the rows of X and W.
    s = channel_maxima(data.x)
    smooth = Data(data.x / s, data.w * s, data.dy)
    assert [line for line in mismatches(got, [expected], data) if line[:2] in ("dx", "dw")] == []
    assert [line for line in mismatches(got, [expected], smooth) if line[:2] == "y:"] == []
    plain = everywhere(replace(EL_NVFP4, headroom=0.5))(data.x, data.w, data.dy, SiteBits("blocks.1.down"))[0]
    assert np.abs(plain - expected[0]).max() > 1  # the technique acts
