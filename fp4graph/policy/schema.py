"""The shape of a policy file: its keys and their types.

Blocks that may be partial (``quantize``, ``scale``, exceptions of an operand) hold only the fields that are written;
:mod:`fp4graph.policy.specs` merges them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    Tag,
    field_validator,
    model_validator,
)

from fp4graph.numerics.spec import Block, Convention, Rounding, ScaleRounding, ScaleTies, Selector, Source, Ties, Zero
from fp4graph.policy.match import Match, Range
from fp4graph.policy.section import Name, Section, Text, Texts, must_be, only_known, wrong
from fp4graph.technique.operands import ADDRESSES

VERSION = 1
#: The most rules of a policy, counted again in every phase, and the most phases.
MOST_RULES = 500
MOST_PHASES = 100
#: The most elements of a block of given size. (Axes are padded with zeros to whole blocks.)
LARGEST_BLOCK = 2**16
_BLOCKS = "a whole number from 1, a pair of these, row or tensor"


class ScaleSection(Section):
    """The written fields of a :class:`~fp4graph.numerics.spec.ScaleSpec`."""

    format: Text | None = None
    max: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    rounding: ScaleRounding | None = None
    convention: Convention | None = None
    zero: Zero | None = None
    ties: ScaleTies | None = None


class QuantizeSection(Section):
    """The written fields of a :class:`~fp4graph.numerics.spec.QuantSpec`."""

    element: Texts | None = None
    selector: Selector | None = None
    block: Annotated[Block, must_be(_BLOCKS)] | None = None
    scale: ScaleSection | None = None
    rounding: Rounding | None = None
    ties: Ties | None = None
    random_bits: Annotated[StrictInt, Field(ge=1, le=24)] | None = None
    source: Source | None = None
    from_master: StrictBool | None = None

    @field_validator("block", mode="before")
    @classmethod
    def _sizes(cls, block: Any) -> Any:
        sizes = block if isinstance(block, list | tuple) else (block,)
        if block in ("row", "tensor"):
            return block
        if not all(type(size) is int and size >= 1 for size in sizes):
            raise wrong(_BLOCKS)
        if math.prod(sizes) > LARGEST_BLOCK:
            raise ValueError(f"a block has at most {LARGEST_BLOCK:,} elements; row and tensor may have more")
        return block


def _kept_or_quantized(value: Any) -> str:
    return "quantized" if isinstance(value, dict | BaseModel) else "kept"


_Keep = Annotated[Literal["keep"], must_be("keep, or a quantize block such as {rounding: stochastic}"), Tag("kept")]
#: ``keep`` uses the original operand in high precision, ``fprop`` the dequantized fprop operand.
_Exact = Annotated[
    Literal["keep", "fprop"], must_be("keep, fprop, or a quantize block such as {rounding: stochastic}"), Tag("kept")
]
OperandException = Annotated[_Exact | Annotated[QuantizeSection, Tag("quantized")], Discriminator(_kept_or_quantized)]


class _HasOperands(Section):
    """A section with ``operands``. An unknown address is reported before its block is validated."""

    @field_validator("operands", mode="before", check_fields=False)
    @classmethod
    def _addresses(cls, data: Any) -> Any:
        return only_known(data, ADDRESSES, "operand")


class DefaultSection(QuantizeSection, _HasOperands):
    """A quantize block with exceptions for operands."""

    operands: dict[str, OperandException] = Field(default={})


_Default = Annotated[_Keep | Annotated[DefaultSection, Tag("quantized")], Discriminator(_kept_or_quantized)]


class TechniqueEntry(BaseModel, frozen=True):
    """``name`` or ``{name: {options}}``; the technique itself validates the options."""

    name: str
    options: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _either_form(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data, "options": {}}
        if isinstance(data, dict) and len(data) == 1:
            ((name, options),) = data.items()
            if isinstance(options, dict) or options is None:
                return {"name": name, "options": options or {}}
        raise wrong("a technique's name, or {name: {option: value}}")


class RuleSection(_HasOperands):
    name: Name | None = None
    match: Match
    quantize: QuantizeSection | None = None
    operands: dict[str, OperandException] = Field(default={})
    techniques: tuple[TechniqueEntry, ...] = ()
    required: StrictBool = True
    keep: Annotated[Text, must_be("the reason to keep these in high precision, as text")] | None = None

    @model_validator(mode="after")
    def _one_action(self) -> Self:
        if (self.keep is None) == (self.quantize is None):
            have = "neither keep nor quantize" if self.keep is None else "both keep and quantize"
            raise ValueError(f"a rule keeps its sites or quantizes them, and this rule has {have}; give it one of them")
        if self.keep is not None and (self.operands or self.techniques):
            raise ValueError("operands and techniques do nothing in a rule that keeps; remove them, or keep")
        return self


_RuleList = Annotated[tuple[RuleSection, ...], Field(max_length=MOST_RULES)]


class RulesAheadSection(Section):
    """Rules ahead of the inherited ones: of the policy that this policy extends, or that a phase changes."""

    before: _RuleList


def _listed_or_ahead(value: Any) -> Any:
    ahead = isinstance(value, RulesAheadSection) or (isinstance(value, dict) and "before" in value)
    if not ahead and not isinstance(value, list | tuple):
        raise wrong("a list, or {before: [...]} with rules ahead of the inherited ones")
    return value


_Rules = Annotated[
    Annotated[
        Annotated[_RuleList, Tag("list")] | Annotated[RulesAheadSection, Tag("ahead")],
        Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "ahead"),
    ],
    BeforeValidator(_listed_or_ahead),
]


class ExpectSection(Section):
    quantized: Range | None = None
    kept: Range | None = None


class PhaseSection(_HasOperands):
    """The changes at one point of the training: rules, default and techniques, merged as under ``extends``, and
    exceptions for the operands of every rule."""

    at: int | float
    operands: dict[str, OperandException] = Field(default={})
    default: _Default | None = None
    rules: _Rules | None = None
    techniques: tuple[TechniqueEntry, ...] = ()

    @field_validator("at", mode="before")
    @classmethod
    def _when(cls, at: Any) -> Any:
        if not (type(at) is int and at >= 1) and not (isinstance(at, float) and 0 < at < 1):
            raise wrong("a number of training forwards from 1, or a fraction of all of them between 0 and 1")
        return at

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.model_fields_set == {"at"}:
            raise ValueError("a phase changes something: add operands, rules, default or techniques")
        return self


class PolicySection(Section):
    """A whole policy."""

    version: StrictInt
    name: Name | None = None
    extends: Text | None = None
    description: Annotated[str, Field(strict=True)] = ""
    default: _Default | None = None
    rules: _Rules = ()
    techniques: tuple[TechniqueEntry, ...] = ()
    phases: Annotated[tuple[PhaseSection, ...], Field(max_length=MOST_PHASES)] = ()
    expect: ExpectSection = ExpectSection()

    @field_validator("version")
    @classmethod
    def _supported(cls, version: int) -> int:
        if version != VERSION:
            raise ValueError(f"policy version {version} is not supported; this fp4graph reads version {VERSION}")
        return version
