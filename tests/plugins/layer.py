"""A linear layer under a technique: the quantizer of each operand, the three products, and steps of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import fp4graph
from fp4graph.graph.functions import site_function
from fp4graph.graph.plan import plan_site
from fp4graph.numerics import noise
from fp4graph.numerics.draw import Draw
from fp4graph.policy import Policy
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView
from tests.helpers import training
from tests.helpers.policies import NVFP4
from tests.helpers.steps import Stream

KEY = noise.make_key("site", "fc")
#: The quantizer of MXFP4 as fp4graph.fake_quantize takes it, with ties to even and with ties up.
SPEC = fp4graph.QuantSpec(block=32, scale=fp4graph.ScaleSpec("e8m0", "ceil"))
SPEC_TIES_UP = replace(SPEC, ties="up")
#: NVFP4 with encode scales; NVFP4 with two elements to choose from; the rotation that ms_eden requires.
ENCODE = NVFP4 | {"scale": NVFP4["scale"] | {"convention": "encode"}}
SET = NVFP4 | {"element": ["e2m1", "int4"]}
ROTATED = {"hadamard": {"scope": "backward", "block": 128}}
#: Options of adaptive_quantization_noise and of freeze.
SCHEDULE = {"sigma_start": 0.05, "sigma_end": 5e-4, "stages": 5, "steps_per_stage": 10}
FREEZE = {"momentum": 0.125, "threshold": 0.3}


def draw(count: int = 0, seed: int = 0, rank: int = 0) -> Draw:
    return Draw(KEY, noise.make_step(seed, rank, count))


DRAW = draw()


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """A linear layer ``[inputs, outputs]``. Each method passes its ``options`` and further keywords to ``policy``."""

    def __init__(self, policy: Callable[..., Policy], inputs: int = 64, outputs: int = 8, producer: Any = None) -> None:
        self.policy = policy
        self.site = SiteView("fc", "linear", inputs, outputs, inputs * outputs, producer=producer)

    def program(self, options: Any = None, **more: Any) -> Any:
        return plan_site(self.site, self.policy(options, **more).rules[0]).program

    def operand(self, options: Any = None, operand: Operand = Operand.FPROP_INPUT, **more: Any) -> Any:
        return self.program(options, **more).operand(operand)

    def quantize(self, x: Tensor, *operand: Any, **more: Any) -> Any:
        """Return the quantization of the operand: elements and scales."""
        return self.operand(*operand, **more).quantize(x, DRAW)

    def terms(self, x: Tensor, *operand: Any, draw: Draw = DRAW, **more: Any) -> list[Tensor]:
        """Return the terms of the operand, dequantized."""
        return [term.product() for term in self.operand(*operand, **more)(x, draw)]

    def quantized(self, x: Tensor, *operand: Any, **more: Any) -> Tensor:
        """Return the operand's only term."""
        (term,) = self.terms(x, *operand, **more)
        return term

    def products(
        self, x: Tensor, w: Tensor, dy: Tensor, options: Any = None, draw: Draw = DRAW, **more: Any
    ) -> tuple[Any, Any, Any]:
        """Return y, dX and dW."""
        x, w = (t.detach().clone().requires_grad_() for t in (x, w))
        y = site_function(self.program(options, **more), "linear", 1.0, 1.0)(x, w, None, draw.key, draw.step, 0)
        y.backward(dy)
        return y.detach(), x.grad, w.grad


def products_by(quantize: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Return y, dX and dW if each GEMM ``quantize``s its operands from the originals, along its contraction axis."""
    left, right = (x, dy, dy.mT), (w, w.mT, x.mT)
    return tuple(quantize(a.contiguous()) @ quantize(b.contiguous()).mT for a, b in zip(left, right, strict=True))


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 6).to(dtype)


def stepped(policy: Any, make: Callable[..., Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return :func:`linear` under the policy, and the optimizer ``make(parameters)``, prepared for the model."""
    model = training.applied(linear(dtype), policy)
    return model, fp4graph.prepare_optimizer(model, make(model.parameters()))


def step(model: Any, optimizer: Any, grad: Tensor) -> None:
    """Step once; ``grad`` is the gradient of the weight, and ones are the gradient of the bias."""
    model.weight.grad, model.bias.grad = grad.clone(), torch.ones_like(model.bias)
    optimizer.step()


def pushes(steps: int, dtype: torch.dtype = torch.float32) -> Stream:
    """Return gradients of a weight and a bias. In every eighth column of the weight they alternate in sign, so that the
    weights near a threshold oscillate."""
    generator, stream = torch.Generator().manual_seed(1), []
    for number in range(steps):
        push = torch.where(torch.arange(64) % 8 == 0, 4.0 if number % 2 else -4.0, 0.3)
        weight = 0.3 * torch.randn(6, 64, generator=generator) + push
        stream.append([weight.to(dtype), torch.randn(6, generator=generator).to(dtype)])
    return stream
