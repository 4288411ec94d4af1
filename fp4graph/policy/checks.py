"""Checks of options and rules that techniques share: each raises ValueError with the reason and a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator

from fp4graph.numerics.blocking import Granularity, block_length
from fp4graph.numerics.formats import element_format
from fp4graph.numerics.spec import Block, ScaleSpec
from fp4graph.technique import Gemm, Operand, OperandSpecs, Technique, acts_at, gemms_at, operands_at

#: The type of an option that names a built-in element format.
ElementName = Annotated[str, AfterValidator(lambda name: element_format(name).name)]


def refuse_noise(specs: OperandSpecs) -> None:
    """Refuse a quantizer of the forward weight that draws noise, under which Q(w) moves though w does not."""
    spec = specs.get(Operand.FPROP_WEIGHT)
    if spec is not None and "stochastic" in (spec.rounding, spec.scale.rounding):
        raise ValueError(
            "fprop.weight rounds stochastically, under which every weight seems to oscillate; round it to nearest"
        )


def refuse_transforms(techniques: Mapping[str, Technique], consequence: str) -> None:
    """Refuse techniques that transform the operands of fprop; ``consequence`` is a clause that says why."""
    for name, technique in techniques.items():
        if Gemm.FPROP in gemms_at(technique):
            raise ValueError(
                f"{name} transforms the operands of fprop, so that {consequence}; take fprop out of the scope of "
                f"{name}, or drop one of the two"
            )


def refuse_splits(techniques: Mapping[str, Technique], operand: Operand, consequence: str) -> None:
    """Refuse techniques that take a part off an operand; ``consequence`` says what they do."""
    for name, technique in techniques.items():
        if acts_at(technique, "split") and operand in operands_at(technique):
            raise ValueError(f"{name} {consequence}; drop one of the two")


def check_target(target: float | None, operand: Operand, scale: ScaleSpec, headroom: float = 1.0) -> None:
    """Refuse a decode scale of an operand's largest block, ``target`` times ``headroom``, beyond its format's range.

    Without a target a headroom needs a format that the range of a tensor can exceed.
    """
    number = scale.format
    if target is None:
        if headroom != 1 and number.spans_fp32:
            raise ValueError(
                f"headroom is a share of a format's range, and {number.name} scales of {operand} have range to spare; "
                "give a target with it, or leave it out"
            )
    elif target > number.max:
        raise ValueError(f"target {target:g} is above the largest scale of {operand}, {number.max:g}; lower it")
    elif scale.convention == "encode" and (encode := 1 / (headroom * target)) > number.max:
        raise ValueError(
            f"target {target:g} makes the encode scale of the largest block of {operand} {encode:g}, and {number.name} "
            f"ends at {number.max:g}; give a larger target"
        )


def check_groups(option: str, length: Granularity, operand: Operand, block: Block) -> None:
    """Refuse groups of ``length`` elements along the contraction axis that are not whole blocks of an operand."""
    if isinstance(length, int) and length % block_length(block):
        multiple = f"a multiple of the block of {operand}, {block_length(block)} elements"
        raise ValueError(f"{option} {length} is not {multiple}; give one")
