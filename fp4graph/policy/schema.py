"""The shape of a policy file: which keys there are, and of what type.

Blocks that may be given in part (``quantize``, ``scale``, an operand's exceptions) leave out what they do not say;
:mod:`fp4graph.policy.resolve` merges them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from fp4graph.numerics.spec import Block, Convention, Rounding, ScaleRounding, Source, Ties, Zero
from fp4graph.policy.match import Match, Op, Range
from fp4graph.technique.operands import ADDRESSES
from fp4graph.text import suggest

VERSION = 1


def _must_be(what: str) -> WrapValidator:
    """Say ``what`` a value must be, in place of one message for each member of a union."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("must_be", "must be {what}", {"what": what}) from None

    return WrapValidator(validate)


def only_known(data: Any, known: Collection[str], kind: str) -> Any:
    """``data`` if each of its keys is ``known`` and has a value: looked at before anything else."""
    errors = [
        InitErrorDetails(type=_EMPTY if key in known else _unknown(kind, key, known), loc=(key,), input=value)
        for key, value in (data.items() if isinstance(data, dict) else ())
        if key not in known or value is None
    ]
    if errors:
        raise ValidationError.from_exception_data("policy", errors)
    return data


_EMPTY = PydanticCustomError("must_be", "must have a value, or be left out")


def _unknown(kind: str, key: str, known: Collection[str]) -> PydanticCustomError:
    context = {"kind": kind, "key": repr(key), "hint": suggest(key, known)}
    return PydanticCustomError("unknown", "unknown {kind} {key}; {hint}", context)


class Section(BaseModel):
    """A mapping with known keys, each of them given a value or left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        return only_known(data, cls.model_fields, "key")


Text = Annotated[str, Field(strict=True, min_length=1)]
Count = Annotated[StrictInt, Field(ge=1)]
#: The root is called "".
Glob = Annotated[str, Field(strict=True)]
Globs = Annotated[
    Glob | Annotated[tuple[Glob, ...], Field(min_length=1)], _must_be("text, or a list of at least one text")
]
Texts = Annotated[
    Text | Annotated[tuple[Text, ...], Field(min_length=1)], _must_be("text, or a list of at least one text")
]


def _listed(value: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    return (value,) if isinstance(value, str) else value


class Bounds(Section):
    """``{min, max, multiple_of}``, where a whole number stands for one allowed value."""

    min: Annotated[StrictInt, Field(ge=0)] | None = None
    max: Annotated[StrictInt, Field(ge=0)] | None = None
    multiple_of: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _exact(cls, data: Any) -> Any:
        return {"min": data, "max": data} if isinstance(data, int) and not isinstance(data, bool) else data

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("give at least one of min, max and multiple_of")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: nothing is in this range")
        return self

    def build(self) -> Range:
        return Range(self.min, self.max, self.multiple_of)


class Counts(Section):
    """``{min, max, exactly}``, where a whole number stands for ``exactly``."""

    min: Annotated[StrictInt, Field(ge=0)] | None = None
    max: Annotated[StrictInt, Field(ge=0)] | None = None
    exactly: Annotated[StrictInt, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _exact(cls, data: Any) -> Any:
        return {"exactly": data} if isinstance(data, int) and not isinstance(data, bool) else data

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("give at least one of min, max and exactly")
        if self.exactly is not None and (self.min is not None or self.max is not None):
            raise ValueError("exactly leaves nothing for min and max to say; give one or the other")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: no count can satisfy this")
        return self

    def build(self) -> Range:
        return Range(self.min, self.max) if self.exactly is None else Range(self.exactly, self.exactly)


class MatchSection(Section):
    op: Annotated[Op | tuple[Op, ...], _must_be("linear, matmul, sdpa or a list of these")] | None = None
    module: Globs | None = None
    block: StrictBool | None = None
    first_blocks: Count | None = None
    last_blocks: Count | None = None
    in_features: Bounds | None = None
    out_features: Bounds | None = None
    min_numel: Count | None = None
    producer: Texts | None = None

    @model_validator(mode="after")
    def _can_match(self) -> Self:
        if self.block is False and (self.first_blocks or self.last_blocks):
            raise ValueError("block: false contradicts first_blocks and last_blocks; remove one of them")
        if self.op == ():
            raise ValueError("an empty op matches nothing; leave it out for linear and matmul")
        return self

    def build(self) -> Match:
        return Match(
            op=_listed(self.op),  # type: ignore[arg-type]  # the members keep their type
            module=_listed(self.module),
            block=self.block,
            first_blocks=self.first_blocks,
            last_blocks=self.last_blocks,
            in_features=self.in_features.build() if self.in_features else None,
            out_features=self.out_features.build() if self.out_features else None,
            min_numel=self.min_numel,
            producer=_listed(self.producer),
        )


class ScaleSection(Section):
    """What is given of a :class:`~fp4graph.numerics.spec.ScaleSpec`."""

    format: Text | None = None
    max: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    rounding: ScaleRounding | None = None
    convention: Convention | None = None
    zero: Zero | None = None


class QuantizeSection(Section):
    """What is given of a :class:`~fp4graph.numerics.spec.QuantSpec`."""

    element: Text | None = None
    block: Annotated[Block, _must_be("a whole number from 1, a pair of these, row or tensor")] | None = None
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
        if block not in ("row", "tensor") and not all(type(size) is int and size >= 1 for size in sizes):
            raise PydanticCustomError("must_be", "must be a whole number from 1, a pair of these, row or tensor")
        return block


def _kept_or_quantized(value: Any) -> str:
    return "quantized" if isinstance(value, dict | BaseModel) else "kept"


_Keep = Annotated[Literal["keep"], _must_be("keep, or a quantize block such as {rounding: stochastic}"), Tag("kept")]
#: ``keep`` is the original in high precision, ``fprop`` the dequantized fprop operand in high precision.
_Exact = Annotated[
    Literal["keep", "fprop"],
    _must_be("keep, fprop, or a quantize block such as {rounding: stochastic}"),
    Tag("kept"),
]
OperandException = Annotated[_Exact | Annotated[QuantizeSection, Tag("quantized")], Discriminator(_kept_or_quantized)]


class _HasOperands(Section):
    """Mixed into whatever has operands: an unknown address is found before its block is looked at."""

    @field_validator("operands", mode="before", check_fields=False)
    @classmethod
    def _addresses(cls, data: Any) -> Any:
        return only_known(data, ADDRESSES, "operand")


class DefaultSection(QuantizeSection, _HasOperands):
    """A quantize block with exceptions of its own."""

    operands: dict[str, OperandException] = {}


class TechniqueEntry(BaseModel):
    """``name`` or ``{name: {options}}``; the options are the technique's to judge."""

    model_config = ConfigDict(frozen=True)

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
        raise PydanticCustomError("must_be", "must be a technique's name, or {name: {option: value}}")


class RuleSection(_HasOperands):
    name: Text | None = None
    match: MatchSection
    quantize: QuantizeSection | None = None
    operands: dict[str, OperandException] = {}
    techniques: tuple[TechniqueEntry, ...] = ()
    required: StrictBool = True
    keep: Annotated[Text, _must_be("the reason to keep these in high precision, as text")] | None = None

    @model_validator(mode="after")
    def _one_action(self) -> Self:
        if (self.keep is None) == (self.quantize is None):
            have = "neither keep nor quantize" if self.keep is None else "both keep and quantize"
            raise ValueError(f"a rule says what happens to its sites: this one has {have}; give it one of them")
        if self.keep is not None and (self.operands or self.techniques):
            raise ValueError("operands and techniques do nothing in a rule that keeps; remove them, or keep")
        return self


class ExpectSection(Section):
    quantized: Counts | None = None
    kept: Counts | None = None


def _when(value: Any) -> Any:
    counted = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not counted and not (isinstance(value, float) and 0 < value < 1):
        what = "a number of training forwards from 1, or a fraction of all of them between 0 and 1"
        raise PydanticCustomError("must_be", "must be {what}", {"what": what})
    return value


class PhaseSection(_HasOperands):
    """What changes at a point of the training: rules, default and techniques as under ``extends``, and exceptions for
    the operands of every rule."""

    at: Annotated[int | float, BeforeValidator(_when)]
    operands: dict[str, OperandException] = {}
    default: (
        Annotated[_Keep | Annotated[DefaultSection, Tag("quantized")], Discriminator(_kept_or_quantized)] | None
    ) = None
    rules: tuple[RuleSection, ...] | None = None
    techniques: tuple[TechniqueEntry, ...] = ()

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.model_fields_set == {"at"}:
            raise ValueError("a phase says what changes: operands, rules, default or techniques")
        return self


class PolicySection(Section):
    """A whole policy."""

    version: StrictInt
    name: Text | None = None
    extends: Text | None = None
    description: Annotated[str, Field(strict=True)] = ""
    default: (
        Annotated[_Keep | Annotated[DefaultSection, Tag("quantized")], Discriminator(_kept_or_quantized)] | None
    ) = None
    rules: tuple[RuleSection, ...] = ()
    techniques: tuple[TechniqueEntry, ...] = ()
    phases: tuple[PhaseSection, ...] = ()
    expect: ExpectSection = ExpectSection()

    @field_validator("version")
    @classmethod
    def _supported(cls, version: int) -> int:
        if version != VERSION:
            raise ValueError(f"policy version {version} is not supported; this fp4graph reads version {VERSION}")
        return version
