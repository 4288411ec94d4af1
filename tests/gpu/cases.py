"""Quantizers and rotations of all programs as functions of tensors, and operands that find mistakes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp4graph
from fp4graph.graph.plan import plan_site
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.noise import make_key, make_step
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.gemm import GemmProgram, MatmulProgram
from fp4graph.ops.operand import OperandProgram
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import BlockPosition, SiteView
from tests.helpers.floats import any_floats, around, blocks_of_every_scale
from tests.helpers.policies import MXFP4, NVFP4, one_rule, quantizer

POLICIES = sorted(file.stem for file in (Path(__file__).parents[2] / "policies").glob("*.yaml"))
ENCODE = {**NVFP4, "scale": {**NVFP4["scale"], "convention": "encode"}}
#: Techniques that no shipped policy uses, each with a format for which it is meant.
OTHERS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "stochastic_scale_rounding": (NVFP4, ["stochastic_scale_rounding"]),
    "tensor_scaling_gradient": (NVFP4, ["tensor_scaling", {"tensor_scaling_gradient": {"kind": "absmax"}}]),
    "smooth_max": (NVFP4, [{"smooth_max": {"kind": "softmax"}}]),
    "scale_gradient": (NVFP4, [{"smooth_max": {"kind": "absmax"}}, "scale_gradient"]),
    "low_rank_residual": (MXFP4, [{"low_rank_residual": {"rank": 4}}]),
    "four_over_six": (NVFP4, [{"tensor_scaling": {"target": 256}}, "four_over_six"]),
    "conditional_scaling": (ENCODE, ["conditional_scaling"]),
    "quest_scale": (quantizer(rounding="floor"), ["quest_scale"]),
    "stochastic_rounding": (MXFP4, [{"stochastic_rounding": {"operands": "all_activation", "bits": 8}}]),
}
VIEW = SiteView("blocks.5.mlp.fc2", "linear", 256, 256, 1 << 16, BlockPosition("blocks", 5, 12))
KEY, STEP = make_key("gpu"), make_step(0, 0, 7)


@dataclass(frozen=True)
class Quantizer:
    """An operand's quantizer as a function of tensors: ``(x, key, step, *state)`` to terms, multipliers, observations.

    Attributes:
        transposed: whether the operand is the transpose of ``x``, so that blocks run down the columns of ``x``.
    """

    program: OperandProgram
    operand: Operand
    transposed: bool

    def __call__(self, x: Tensor, key: Tensor, step: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        x, draw, entries = self.called_on(x, key, step, state)
        terms = self.program(x, draw, entries)
        multipliers = [term.multiplier for term in terms if term.multiplier is not None]
        observed = self.program.observe(x, draw, entries)
        return (*(term.values for term in terms), *multipliers, *observed.values())

    def called_on(
        self, x: Tensor, key: Tensor, step: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Draw | None, dict[str, dict[str, Tensor]]]:
        entries: dict[str, dict[str, Tensor]] = {}
        for slot, tensor in zip(self.program.state, state, strict=True):
            entries.setdefault(slot.technique, {})[slot.entry.name] = tensor
        return x.mT if self.transposed else x, operand_draw(Draw(key, step), self.operand), entries

    def state(self, x: Tensor) -> list[Tensor]:
        """Return values that the state may have after some steps of training."""
        x = x.mT if self.transposed else x
        generator = torch.Generator().manual_seed(2)
        entries = []
        for slot in self.program.state:
            entry = slot.entry.init(x)
            step = 1 + 0.25 * torch.rand(entry.shape, generator=generator)
            entries.append((entry * step).to(entry.dtype).contiguous())
        return entries


@dataclass(frozen=True)
class GradientFactor:
    """The factor of the gradient of a quantizer's operand, as a function of the same tensors."""

    quantizer: Quantizer

    def __call__(self, x: Tensor, key: Tensor, step: Tensor, *state: Tensor) -> tuple[Tensor]:
        x, draw, entries = self.quantizer.called_on(x, key, step, state)
        factor = self.quantizer.program.gradient_factor(x, draw, entries)
        assert factor is not None
        return (factor,)


@dataclass(frozen=True)
class Rotation:
    """The pair transforms of a GEMM as a function of tensors: ``(left, right, key, step)`` to both operands."""

    gemm: GemmProgram

    def __call__(self, left: Tensor, right: Tensor, key: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        rotation = self.gemm.rotate(left, right, operand_draw(Draw(key, step), self.gemm.gemm.operands[0]))
        return rotation.left, rotation.right


@cache
def programs() -> list[tuple[str, MatmulProgram]]:
    """Return the programs of a linear layer under each rule of every shipped policy, and with each of ``OTHERS``.

    The name is the policy's. After the first rule that quantizes, it has the rule's name too.
    """
    others = [one_rule(*techniques, quantize=format) | {"name": name} for name, (format, techniques) in OTHERS.items()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp4graph.PolicyWarning)  # a technique may be idle in a linear layer
        policies = [*map(fp4graph.load_policy, POLICIES), *map(fp4graph.load_policy, others)]
    named: dict[str, MatmulProgram] = {}
    for policy in policies:
        for rule in (*policy.rules, policy.default):
            program = plan_site(VIEW, rule).program if rule.quantizes else None
            if program is not None:
                name = f"{policy.name}, {rule.name}" if policy.name in named else policy.name
                assert named.setdefault(name, program) is program
    return [*named.items()]


@cache
def quantizers(later_rules: bool = False) -> dict[str, Quantizer]:
    """Return the quantizers of the programs, each once, named after the first operand that has it.

    Args:
        later_rules: whether to include quantizers that only a later rule of a policy has; docs/gpu.md counts the rest.
    """
    named: dict[tuple[OperandProgram, bool], tuple[str, Quantizer]] = {}
    for name, program in programs():
        if "," in name and not later_rules:
            continue
        for operand in Operand:
            # As in ops/matmul.py: the contraction axis of these operands is not the last axis in memory.
            transposed = operand in (Operand.DGRAD_WEIGHT, Operand.WGRAD_GRAD_OUTPUT, Operand.WGRAD_INPUT)
            quantizer = Quantizer(program.operand(operand), operand, transposed)
            if quantizer.program.spec is not None:
                named.setdefault((quantizer.program, transposed), (f"{name}:{operand}", quantizer))
    return dict(named.values())


@cache
def rotations() -> dict[str, Rotation]:
    """Return the pair transforms of all programs' GEMMs, each once."""
    named: dict[GemmProgram, str] = {}
    for name, program in programs():
        for gemm in (program.fprop, program.dgrad, program.wgrad):
            if gemm.transforms:
                named.setdefault(gemm, f"{name}:{gemm.gemm}")
    return {name: Rotation(gemm) for gemm, name in named.items()}


def operands(shape: tuple[int, int], spec: QuantSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield fp32 values ``[R, K]`` of every kind, each kind in a tensor, because one element decides a tensor scale."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(rows)
    ordinary = torch.randn(shape, generator=generator)
    spread = ordinary * 2.0 ** torch.randint(-20, 8, (rows, 1), generator=generator)
    poisoned = spread.clone()
    poisoned[1, 3], poisoned[rows // 2, columns - 1], poisoned[-1, 0] = torch.nan, torch.inf, -torch.inf
    yield "ordinary", ordinary
    yield "many magnitudes", spread
    yield "NaN and Inf", poisoned
    yield "zeros", torch.where(torch.arange(rows)[:, None] % 3 == 0, ordinary, -0.0)
    yield "every exponent", any_floats(shape)
    yield "subnormal", (any_floats(shape).view(torch.int32) & ~0x7F800000).view(torch.float32)
    length = spec.block if isinstance(spec.block, int) else 16
    yield "edges of scales", _in_blocks(blocks_of_every_scale(length), shape, generator)
    if spec.scale.format.code_bits <= 8:
        yield "ties of scales", _in_blocks(_scale_ties(spec, length), shape, generator)


def _scale_ties(spec: QuantSpec, length: int) -> Tensor:
    """Return ``[n, length]``: blocks whose ideal scale is the midpoint of two values, and such with Z an ulp off."""
    values = spec.scale.format.values()
    ideal = torch.tensor([(low + high) / 2 for low, high in pairwise(values) if low > 0 and high < 2.0**100])
    maxima = ideal * spec.element.max if spec.scale.convention == "decode" else spec.element.max / ideal
    maxima = torch.tensor(around(maxima.tolist())).abs()
    return torch.randn(len(maxima), length).clamp(-0.9, 0.9).index_fill(1, torch.tensor(1), 1) * maxima[:, None]


def _in_blocks(blocks: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return ``[R, K]`` whose blocks along K are random rows of ``blocks [n, l]``; a line's last block is cut off."""
    rows, columns = shape
    length = blocks.shape[1]
    across = -(-columns // length)
    chosen = torch.randint(len(blocks), (rows * across,), generator=generator)
    return blocks[chosen].reshape(rows, across * length)[:, :columns].contiguous()
