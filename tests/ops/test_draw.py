"""Random bits of techniques depend on the technique's name and the kind of the part that draws."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fp4graph
from fp4graph.errors import PluginError
from fp4graph.technique import Gemm, OptimizerHook, PairTransform, Part, Rounding, Technique, parts_of
from fp4graph.technique.registry import Registry
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.techniques import FPROP, Offers, technique
from tests.helpers.training import assert_equal

#: Techniques that draw random bits at different stages.
DRAWING: tuple[Any, ...] = (
    {"hadamard": {"block": 16}},
    {"low_rank_residual": {"rank": 2}},
    {"adaptive_quantization_noise": {"sigma_start": 0.1, "sigma_end": 0.01, "stages": 2, "steps_per_stage": 5}},
)


def multiplied(*techniques: Any) -> tuple[Tensor, ...]:
    """Y, dX and dW of one layer under these techniques."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 48), torch.randn(32, 64, requires_grad=True)
    policy = fp4graph.load_policy(one_rule(*techniques, quantize=quantizer(16)))
    model = fp4graph.apply(torch.nn.Sequential(layer), policy, backend="eager")
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.slow
def test_the_order_of_techniques_changes_no_draw() -> None:
    first, *others = [multiplied(*order) for order in itertools.permutations(DRAWING)]
    for other in others:
        assert_equal(other, first)
    for left_out in range(3):  # each technique changes the results
        fewer = multiplied(*DRAWING[:left_out], *DRAWING[left_out + 1 :])
        assert not torch.equal(first[0], fewer[0])


def test_techniques_of_other_names_draw_other_bits() -> None:
    drawn: dict[str, Tensor] = {}

    def noise(self: Any, ratio: Tensor, scale: Tensor, context: Any) -> Tensor:
        drawn[self.name] = context.bits(64)
        return ratio

    for name in ("one", "two"):
        made = technique(name, draws=True, round=noise)
        registry = Registry([(name, Offers(made))], entry_point_group=None)
        policy = fp4graph.load_policy(one_rule(name, quantize=quantizer(16)), registry)
        fp4graph.apply(torch.nn.Sequential(torch.nn.Linear(32, 32)), policy, backend="eager")(torch.ones(4, 32))
    assert not torch.equal(drawn["one"], drawn["two"])


class Drawing(Rounding):
    mixes = "none"
    draws = True

    def round(self, ratio: Tensor, scale: Tensor, context: Any) -> Tensor:
        return ratio


class Turning(PairTransform):
    mixes = "none"
    draws = True

    def transform(self, x: Tensor, side: Any, shared: Any) -> Tensor:
        return x

    inverse = transform


def test_two_transforms_of_one_gemm_that_would_draw_the_same_bits_are_refused() -> None:
    def gemms(*chosen: Gemm) -> Any:
        return lambda self, site: tuple(Turning(options=self, gemms={gemm}) for gemm in chosen)

    assert len(parts_of(technique("apart", parts=gemms(Gemm.FPROP, Gemm.DGRAD))())) == 2
    with pytest.raises(TypeError, match="Turning and Turning are of one kind and would draw the same bits at fprop"):
        parts_of(technique("twice", parts=gemms(Gemm.FPROP, Gemm.FPROP))())


def test_two_parts_of_one_kind_that_would_draw_the_same_bits_are_refused() -> None:
    def twice(self: Technique, site: Any) -> tuple[Part, ...]:
        return Drawing(options=self, operands=FPROP), Drawing(options=self, operands=FPROP), OptimizerHook(options=self)

    registry = Registry([("twice", Offers(technique("twice", parts=twice)))], entry_point_group=None)
    with pytest.raises(PluginError, match=r"Drawing and Drawing are of one kind and would draw .* at fprop\.input"):
        fp4graph.load_policy(one_rule("twice", quantize=quantizer(16)), registry)
