"""Checks of options and rules that techniques share: each raises ValueError with the reason and a remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

from pydantic import AfterValidator

from fp4graph.numerics.blocking import Granularity, block_length
from fp4graph.numerics.formats import element_format
from fp4graph.numerics.spec import Block, ScaleSpec
from fp4graph.technique import Gemm, Operand, OperandSpecs, Technique, acts_at, gemms_at, operands_at

#: The type of an option that names a built-in element format.
ElementName = Annotated[str, AfterValidator(lambda name: element_format(name).name)]


def refuse_noise(specs: OperandSpecs) -> None:
    """Refuse a quantizer of fprop.weight that draws noise: Q(w) would change even where w does not."""
    spec = specs.get(Operand.FPROP_WEIGHT)
    if spec is not None and "stochastic" in (spec.rounding, spec.scale.rounding):
        raise ValueError("fprop.weight rounds stochastically, so every weight seems to oscillate; round it to nearest")


def refuse_transforms(techniques: Mapping[str, Technique], consequence: str) -> None:
    """Refuse techniques that transform the operands of fprop; ``consequence`` is the clause after "so that"."""
    for name, technique in techniques.items():
        if Gemm.FPROP in gemms_at(technique):
            raise ValueError(
                f"{name} transforms the operands of fprop, so that {consequence}; take fprop out of the scope of "
                f"{name}, or drop one of the two"
            )


def refuse_wrappers(
    techniques: Mapping[str, Technique], stage: str, operands: Collection[Operand], consequence: str
) -> None:
    """Refuse techniques that act at ``stage`` on one of ``operands``; in the error ``consequence`` follows the name."""
    for name, technique in techniques.items():
        if acts_at(technique, stage) and not operands_at(technique).isdisjoint(operands):
            raise ValueError(f"{name} {consequence}; drop one of the two")


def check_target(target: float | None, operand: Operand, scale: ScaleSpec, headroom: float = 1.0) -> None:
    """Refuse a ``target`` that puts the scale of an operand's largest block beyond the range of the scale format.

    The decode scale of the largest block is target·headroom, its encode scale the reciprocal. Without a target, a
    headroom other than 1 needs a format with a smaller range than fp32.
    """
    stored = scale.format
    if target is None:
        if headroom != 1 and stored.spans_fp32:
            raise ValueError(
                f"headroom is a share of a format's range, and {stored.name} scales of {operand} have range to spare; "
                "give a target too, or leave headroom out"
            )
    elif target > stored.max:
        raise ValueError(f"target {target:g} is above the largest scale of {operand}, {stored.max:g}; lower it")
    elif scale.convention == "encode" and (encode := 1 / (headroom * target)) > stored.max:
        raise ValueError(
            f"target {target:g} makes the encode scale of the largest block of {operand} {encode:g}, and {stored.name} "
            f"ends at {stored.max:g}; give a larger target"
        )


def check_groups(option: str, length: Granularity, operand: Operand, block: Block) -> None:
    """Refuse a group ``length`` along the contraction axis that is not a multiple of the operand's block length."""
    if isinstance(length, int) and length % block_length(block):
        multiple = f"a multiple of the block of {operand}, {block_length(block)} elements"
        raise ValueError(f"{option} {length} is not {multiple}; give one")
