"""learned_scale against autograd: an nn.Module with the amax as a parameter, trained by torch's AdamW."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.experts import Mixture, tokens
from tests.helpers.models import module_of
from tests.helpers.policies import NVFP4, loaded
from tests.helpers.training import applied, prepared, uncompiled
from tests.recipes.arithmetic import round_nearest

SCALED = {"tensor_scaling": {"operands": ["fprop.weight"]}}
EXACT = {"fprop.input": "keep", "backward": "keep", "dgrad.weight": "fprop"}
STATE = "_fp4graph_learned_scale_amax"
N, K, TOKENS, STEPS = 24, 48, 16, 6
LR, FACTOR, BETAS, EPS = 1e-3, 7.0, (0.8, 0.9), 1e-7

policy = partial(loaded, "learned_scale", quantize=NVFP4, operands=EXACT, more=[SCALED])
OPTIONS = {"lr_factor": FACTOR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS}


def nearest(u: Tensor) -> Tensor:
    """E2M1 to nearest, ties to the even code, saturating."""
    return torch.from_numpy(round_nearest(u.detach().numpy(), "e2m1"))


def e4m3(s: Tensor) -> Tensor:
    return s.float().clamp(2.0**-9, 448).to(torch.float8_e4m3fn).double()


def straight(x: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return ``value``, with the derivative ``mask`` by ``x``."""
    return value.detach() + torch.where(mask, x - x.detach(), 0)


class Reference(nn.Module):
    """ŵ = s·E2M1(w/s), s = γ·E4M3(a/6γ), γ = max abs(W)/2688, of blocks along the last axis, in float64."""

    def __init__(self, weight: Tensor, mse: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.double())
        blocks = self.blocks
        amax, gamma = blocks.abs().amax(-1, keepdim=True), self.gamma
        if mse:
            candidates = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
            errors = [((nearest(blocks / (c * gamma)) * c * gamma - blocks) ** 2).sum(-1) for c in candidates]
            amax = 6 * gamma * candidates[torch.stack(errors).argmin(0)].unsqueeze(-1)
        self.amax = nn.Parameter(amax.detach())

    @property
    def blocks(self) -> Tensor:
        return self.weight.unflatten(-1, (-1, 16))

    @property
    def gamma(self) -> Tensor:
        return self.weight.detach().abs().amax((-2, -1), keepdim=True).unsqueeze(-1) / 2688

    def quantized(self) -> Tensor:
        gamma, ideal = self.gamma, self.amax / 6 / self.gamma
        inside = (ideal >= 2.0**-10) & (ideal <= 448 * (1 + 1e-6))
        scale = straight(ideal, e4m3(ideal), inside) * gamma
        u = self.blocks / scale
        return (straight(u, nearest(u), u.abs() <= 6 * (1 + 1e-6)) * scale).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.quantized().mT


def spread(amax: Tensor) -> Tensor:
    """Return the value of each block, ``[..., N, K/16, 1]``, at its elements, ``[..., N, K]``."""
    return amax.expand(*amax.shape[:-1], 16).flatten(-2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the outputs of all forwards; two forwards accumulate the gradients of a step."""
    generator, outputs = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        for _ in range(2):
            x, dy = (torch.randn(TOKENS, size, generator=generator) for size in (K, width))
            y = model(x.to(dtype))
            y.backward(dy.to(dtype))
            outputs.append(y.detach().double())
        optimizer.step()
        optimizer.zero_grad()
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("init", ["mse", "amax"])
@pytest.mark.parametrize("transposed", [False, True])
def test_it_trains_as_autograd_and_adam_do(init: str, transposed: bool) -> None:
    """On this data both round to the same values, so weights and scales differ only by fp32's rounding. Adam divides
    moments by each other and steps by lr, so a few ulps of dW, 2⁻²⁴·√32 for 32 tokens, change a step by 1e-5 of lr."""
    torch.manual_seed(0)
    model = nn.Linear(K, N, bias=False)
    if transposed:  # W is stored as [K, N], and square, so that the shape does not show the layout
        model = module_of(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.randn(K, K)))
    with torch.no_grad():
        model.weight[:2, :17] *= 8
        (model.weight.mT if transposed else model.weight)[5, 16:32] *= 1e-6  # a/6γ underflows, so a stays
    reference = Reference(model.weight.detach().mT if transposed else model.weight.detach(), init == "mse")
    model = applied(model, policy({"init": init, **OPTIONS}))
    optimizer = prepared(model, lr=LR)
    scales = {"params": [reference.amax], "lr": FACTOR * LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
    reference_optimizer = torch.optim.AdamW([{"params": [reference.weight]}, scales], lr=LR)
    first, width = reference.amax.detach().clone(), K if transposed else N
    outputs = trained(model, optimizer, width, torch.float32)
    expected = trained(reference, reference_optimizer, width, torch.float64)
    assert ((reference.amax - first).abs() > LR).any()
    assert (reference.blocks.abs() > reference.amax).any()  # some elements are clipped and have masked gradients
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    weight, amax = (x.detach().mT if transposed else x.detach() for x in (model.weight, getattr(model, STATE)))
    torch.testing.assert_close(weight.double(), reference.weight.detach(), rtol=0, atol=STEPS * LR * 1e-3)
    scale = spread(reference.amax.detach())
    torch.testing.assert_close(amax.double(), scale, rtol=1e-6, atol=FACTOR * STEPS * LR * 1e-3)


@pytest.mark.slow
@uncompiled
@pytest.mark.parametrize("form", ["grouped", "loop"])
def test_each_expert_learns_by_itself(form: str) -> None:
    """The first step of Adam is a ← a − lr·da/(abs(da) + ε), here under the γ of each expert."""
    model = Mixture(form, 2)
    with torch.no_grad():
        model.layers[0].experts.w1[2] *= 64
    model = applied(model, policy({"lr_factor": FACTOR, "eps": EPS}, match={"op": ["grouped", "linear"]}))
    optimizer = prepared(model, torch.optim.SGD, lr=LR)
    model(*tokens()).square().sum().backward()
    experts, expected = model.layers[0].experts, {}
    for name in ("w1", "w2"):
        weight, state = experts.get_parameter(name), experts.get_buffer(f"_fp4graph_{name}_learned_scale_amax")
        turned = weight.mT if name == "w2" else weight  # w2 is stored [E, K, N]
        reference = Reference(turned.detach(), mse=True)
        (reference.quantized() * (weight.grad.mT if name == "w2" else weight.grad)).sum().backward()
        slope, first = reference.amax.grad, reference.amax.detach()
        expected[turned] = turned.detach() - LR * reference.weight.grad
        expected[state.mT if name == "w2" else state] = spread(first - FACTOR * LR * slope / (slope.abs() + EPS))
    optimizer.step()
    for actual, value in expected.items():
        torch.testing.assert_close(actual.detach().double(), value, rtol=1e-5, atol=FACTOR * LR * 1e-3)
