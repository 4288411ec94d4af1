"""Pair transforms that declare ``block_rotation``: kernels rotate the blocks, and do not call ``transform``."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from fp4graph_plugins.hadamard import BlockHadamard, Hadamard
from torch import Tensor

import fp4graph
from fp4graph.errors import PluginError
from fp4graph.graph.functions import site_function
from fp4graph.kernels import cpu, operators
from fp4graph.numerics import noise
from fp4graph.technique import Part, Technique
from fp4graph.technique.registry import Registry
from fp4graph.technique.site import SiteView
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.sites import program_of
from tests.helpers.techniques import Offers

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

K, N = 64, 48
ENDS = torch.tensor([10, 10, 40], dtype=torch.int32)


class FlippedRotation(BlockHadamard):
    """Rotates, then reverses the axis, so that it is no rotation of blocks."""

    mixes = "expert"

    @property
    def period(self) -> int:
        return 16

    def transform(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        return super().transform(x, side, shared).flip(-1)

    def inverse(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        return super().inverse(x.flip(-1), side, shared)


class Segmented(BlockHadamard):
    """Rotates with signs that depend on the positions of the experts' tokens in the left operand."""

    mixes = "none"

    def pair_context(self, left: Tensor, right: Tensor, context: Any) -> tuple[Tensor, ...]:
        segments = context.blocking.segments
        flipped = 0 if segments.ids is None else (segments.ids == 0).sum() + 3 * segments.axis
        return (torch.where(torch.arange(16) < flipped % 16, -1.0, 1.0),)


def made(name: str, part: type[BlockHadamard], **fields: Any) -> type[Technique]:
    """Return a technique with this part and the options of a rotation."""

    class Made(Hadamard):
        def parts(self, site: SiteView) -> tuple[Part, ...]:
            return (part(options=self, draws=True, **fields),)

    Made.name = name
    return Made


def trained(cls: type[Technique], block: int = 32) -> tuple[Tensor, ...]:
    """Y, dX and dW of three experts, the second without tokens, under the technique ``cls`` with blocks of 16."""
    registry = None if cls is Hadamard else Registry([(f"{cls.name}-plugin", Offers(cls))])
    rule = one_rule({cls.name: {"block": 16}}, op="grouped", quantize=quantizer(block))
    program = program_of(fp4graph.load_policy(rule, registry), "grouped", K, N)
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((40, K), (3, K, N), (40, N)))
    x, w = x.requires_grad_(), w.requires_grad_()
    key, step = noise.make_key("site"), noise.make_step(3, 0, 0)
    y = site_function(program, "grouped", 1.0, 1.0)(x, w, None, key, step, 0, ends=ENDS)
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    return y.detach(), x.grad, w.grad


OTHERS = made("flipped", FlippedRotation), made("segmented", Segmented, block_rotation=16)


@pytest.mark.parametrize("cls", [Hadamard, *OTHERS], ids=lambda cls: cls.name)
def test_kernels_multiply_in_the_basis_of_the_transform(cls: type[Technique]) -> None:
    """Tensor code, the reference, calls the transform."""
    assert cpu.available()
    by_kernel = trained(cls)
    with operators.tensor_code():
        by_tensors = trained(cls)
    for result, expected in zip(by_kernel, by_tensors, strict=True):
        # Both sum the same numbers, in different orders.
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("declared", [24, 0, "x"])
def test_a_block_rotation_that_is_no_power_of_two_is_the_plugins_error(declared: Any) -> None:
    wrong = made("wrong", BlockHadamard, block_rotation=declared)
    with pytest.raises(PluginError, match=f"block_rotation: is {declared!r}, not a power of two above 1"):
        trained(wrong, block=48 if declared == 24 else 32)


@pytest.mark.parametrize("signs", [(torch.ones(4),), (torch.ones(16), torch.ones(16))], ids=["few", "twice"])
def test_signs_of_another_shape_are_the_plugins_error(signs: tuple[Tensor, ...]) -> None:
    class Signed(BlockHadamard):
        mixes = "none"

        def pair_context(self, left: Tensor, right: Tensor, context: Any) -> tuple[Tensor, ...]:
            return signs

    with pytest.raises(PluginError, match=r"pair_context: must return signs \[16\] alone, or nothing"):
        trained(made("wrong", Signed, block_rotation=16))
