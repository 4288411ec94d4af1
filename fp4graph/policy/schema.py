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
    WithJsonSchema,
    field_validator,
    model_validator,
)

from fp4graph.numerics.spec import Block, Convention, Rounding, ScaleRounding, ScaleTies, Selector, Source, Ties, Zero
from fp4graph.policy.match import Match, Range
from fp4graph.policy.section import COUNT_OR_SHARE, Name, Section, Text, Texts, must_be, only_known, wrong
from fp4graph.technique.operands import ADDRESSES

VERSION = 1
#: The most rules of a policy, counted again in every phase, and the most phases.
MOST_RULES = 500
MOST_PHASES = 100
#: The most elements of a block whose size is written in numbers, since axes are padded with zeros to whole blocks.
LARGEST_BLOCK = 2**16
_BLOCKS = "a whole number from 1, a pair of these, row or tensor"
_SIZE = {"type": "integer", "minimum": 1, "maximum": LARGEST_BLOCK}
_BLOCK_SCHEMA = WithJsonSchema({
    "anyOf": [_SIZE, {"type": "array", "items": [_SIZE] * 2, "minItems": 2, "maxItems": 2}, {"enum": ["row", "tensor"]}]
})  # fmt: skip


class ScaleSection(Section):
    """The scale of a block. Fields that are left out are inherited, as those of its quantizer are."""

    format: Text | None = Field(None, description="Format of a stored scale: e8m0, e4m3, fp32, ...")
    max: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = Field(
        None, description="The largest scale that is used, if it is not the format's largest."
    )
    rounding: ScaleRounding | None = Field(None, description="How the ideal scale becomes a value of the format.")
    convention: Convention | None = Field(
        None, description="decode: dequantizing multiplies elements by the scale; encode: divides them by it."
    )
    zero: Zero | None = Field(None, description="What a scale that underflows becomes.")
    ties: ScaleTies | None = Field(None, description="Where nearest_even rounds a tie between powers of two.")


class QuantizeSection(Section):
    """A quantizer. An exception for operands inherits the fields that it leaves out from its rule or default; a rule or
    default takes them from OCP's MXFP4."""

    element: Texts | None = Field(None, description="Format of the elements, or formats that each block chooses from.")
    selector: Selector | None = Field(None, description="The error by which a block chooses one of several formats.")
    block: Annotated[Block, must_be(_BLOCKS), _BLOCK_SCHEMA] | None = Field(
        None, description="Elements with one scale: n along K, [rows, n], row, or tensor."
    )
    scale: ScaleSection | None = Field(None, description="The scale of a block.")
    rounding: Rounding | None = Field(None, description="Rounding of elements.")
    ties: Ties | None = Field(None, description="Where nearest rounds a tie.")
    random_bits: Annotated[StrictInt, Field(ge=1, le=24)] | None = Field(
        None, description="Random bits of stochastic rounding."
    )
    source: Source | None = Field(
        None, description="What is quantized for the backward: the original operand, or the one that fprop quantized."
    )
    from_master: StrictBool | None = Field(
        None, description="Whether the operand is quantized before autocast rounds it to 16 bits."
    )

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
    """A quantizer with exceptions for operands."""

    operands: dict[str, OperandException] = Field(default={}, description="Exceptions by operand or group of operands.")


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


class RuleSection(_HasOperands, json_schema_extra={"oneOf": [{"required": ["keep"]}, {"required": ["quantize"]}]}):
    """A rule: the sites that it matches, and what becomes of them. The first rule that matches a site decides."""

    name: Name | None = Field(None, description="Name of the rule in reports and errors.")
    match: Match = Field(description="The sites of the rule; all predicates must hold.")
    quantize: QuantizeSection | None = Field(None, description="The quantizer of all six operands.")
    operands: dict[str, OperandException] = Field(
        default={},
        description="Exceptions by operand or group of operands. An operand's wins over a group's, and a later group's "
        "over an earlier group's.",
    )
    techniques: tuple[TechniqueEntry, ...] = Field(
        (), description="Techniques of this rule; they replace those of the policy with the same name."
    )
    required: StrictBool = Field(True, description="Whether it is an error if the rule matches no site of the model.")
    keep: Annotated[Text, must_be("the reason to keep these in high precision, as text")] | None = Field(
        None, description="Keep the sites in high precision; the text is the reason that explain shows."
    )

    @model_validator(mode="after")
    def _one_action(self) -> Self:
        if (self.keep is None) == (self.quantize is None):
            have = "neither keep nor quantize" if self.keep is None else "both keep and quantize"
            raise ValueError(f"a rule keeps its sites or quantizes them, and this rule has {have}; give it one of them")
        if self.keep is not None and (self.operands or self.techniques):
            raise ValueError("operands and techniques do nothing in a rule that keeps; remove them, or remove keep")
        return self


_RuleList = Annotated[tuple[RuleSection, ...], Field(max_length=MOST_RULES)]


class RulesAheadSection(Section):
    """Rules ahead of the inherited ones: of the policy that this policy extends, or that a phase changes."""

    before: _RuleList = Field(description="Rules that are asked before the inherited ones.")


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
    """Expected numbers of sites; any other number is an error at the first forward."""

    quantized: Range | None = Field(None, description="How many sites are quantized.")
    kept: Range | None = Field(None, description="How many sites are kept in high precision.")


class PhaseSection(_HasOperands):
    """Changes that hold from one point of the training on, merged as under ``extends``."""

    at: Annotated[int | float, COUNT_OR_SHARE] = Field(
        description="The number of training forwards before the phase begins, or their share of total_forwards."
    )
    operands: dict[str, OperandException] = Field(default={}, description="Exceptions for the operands of every rule.")
    default: _Default | None = Field(None, description="What becomes of sites that no rule matches.")
    rules: _Rules | None = Field(None, description="Rules in place of the inherited ones, or ahead of them.")
    techniques: tuple[TechniqueEntry, ...] = Field((), description="Techniques in addition to the inherited ones.")

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
    """A policy file."""

    version: StrictInt = Field(description="Version of the language: 1.", json_schema_extra={"const": VERSION})
    name: Name | None = Field(
        None, description="Name of the policy; the file's by default.", json_schema_extra={"pattern": r"^[^/\\]*$"}
    )
    extends: Text | None = Field(None, description="The policy that this one changes: a shipped name or a path.")
    description: Annotated[str, Field(strict=True)] = Field("", description="One line for reports.")
    default: _Default | None = Field(
        None, description="What becomes of sites that no rule matches: keep (the default), or a quantizer."
    )
    rules: _Rules = Field((), description="Rules in order; the first one that matches a site decides.")
    techniques: tuple[TechniqueEntry, ...] = Field((), description="Techniques of every rule that quantizes.")
    phases: Annotated[tuple[PhaseSection, ...], Field(max_length=MOST_PHASES)] = Field(
        (), description="Changes at points of the training."
    )
    expect: ExpectSection = Field(ExpectSection(), description="Numbers of sites that the model must have.")

    @field_validator("version")
    @classmethod
    def _supported(cls, version: int) -> int:
        if version != VERSION:
            raise ValueError(f"policy version {version} is not supported; this fp4graph reads version {VERSION}")
        return version

    @field_validator("name")
    @classmethod
    def _in_a_folder(cls, name: str | None) -> str | None:
        if name is not None and {"/", "\\"} & {*name}:  # folders of runs have the policy's name
            raise ValueError(f"{name!r} has a slash, and folders and files get the policy's name; use - instead")
        return name
