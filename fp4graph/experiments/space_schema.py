"""The shape of a search space's file: which keys there are, and of what type."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from fp4graph.policy.schema import OperandException, QuantizeSection, TechniqueEntry
from fp4graph.policy.section import Text
from fp4graph.text import suggest

VERSION = 1

#: What of a training a choice may set. The rest is the sweep's, the same for all, so that losses compare.
RUN_KEYS = (
    "optimizer",
    "optimizer_options",
    "seed",
    "lr",
    "weight_decay",
    "schedule",
    "warmup",
    "clip",
    "batch_size",
    "accumulate",
    "dtype",
    "autocast",
)


def _must_be(what: str) -> PydanticCustomError:
    return PydanticCustomError("must_be", "must be {what}", {"what": what})


def _known(data: Any, known: tuple[str, ...]) -> Any:
    """``data`` if each of its keys is ``known`` and has a value."""
    errors = []
    for key, value in data.items() if isinstance(data, dict) else ():
        if key not in known:
            context = {"key": repr(key), "hint": suggest(key, known)}
            error = PydanticCustomError("unknown", "unknown key {key}; {hint}", context)
            errors.append(InitErrorDetails(type=error, loc=(key,), input=value))
        elif value is None:
            error = PydanticCustomError("must_be", "must have a value, or be left out")
            errors.append(InitErrorDetails(type=error, loc=(key,), input=value))
    if errors:
        raise ValidationError.from_exception_data("space", errors)
    return data


def _labels(value: Any) -> Any:
    labels = (value,) if isinstance(value, str) else value
    if not isinstance(labels, list | tuple) or not labels or not all(isinstance(label, str) for label in labels):
        raise _must_be("the label of a choice, or a list of labels")
    return tuple(labels)


def _policy(value: Any) -> Any:
    if not isinstance(value, str | dict) or not value:
        raise _must_be("the name or file of a policy, or a policy without version and name")
    return value


class _Section(BaseModel):
    """A mapping with known keys, each of them given a value or left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        return _known(data, tuple(cls.model_fields))


#: Parameters and the labels that each must have.
Condition = dict[str, Annotated[tuple[str, ...], BeforeValidator(_labels)]]


class Fragment(_Section):
    """What a choice changes: of the policy, and of the training."""

    title: Text | None = None
    when: Condition = {}
    quantize: QuantizeSection | None = None
    operands: dict[str, OperandException] = {}
    techniques: tuple[TechniqueEntry, ...] = ()
    run: dict[str, Any] = {}

    @field_validator("run", mode="before")
    @classmethod
    def _of_a_run(cls, data: Any) -> Any:
        return _known(data, RUN_KEYS)


class ParameterSection(_Section):
    choices: Annotated[dict[str, Fragment], Field(min_length=1)]
    when: Condition = {}


class SpaceSection(_Section):
    """A whole search space."""

    version: StrictInt
    name: Text | None = None
    description: Annotated[str, Field(strict=True)] = ""
    base: Annotated[str | dict[str, Any], BeforeValidator(_policy)]
    family: Text | None = None
    #: Whether techniques without effect are configurations like others, as in a published space; else they are refused.
    inert: StrictBool = False
    baselines: Annotated[dict[str, Fragment], Field(min_length=1)] = {"bf16": Fragment()}
    parameters: Annotated[dict[str, ParameterSection], Field(min_length=1)]
    also: tuple[Fragment, ...] = ()

    @field_validator("baselines")
    @classmethod
    def _unquantized(cls, baselines: dict[str, Fragment]) -> dict[str, Fragment]:
        for name, fragment in baselines.items():
            other = sorted(fragment.model_fields_set - {"techniques", "run"})
            if other:
                raise ValueError(f"baseline {name!r} quantizes nothing: it takes techniques and run; remove {other[0]}")
        return baselines

    @field_validator("version")
    @classmethod
    def _supported(cls, version: int) -> int:
        if version != VERSION:
            raise ValueError(f"space version {version} is not supported; this fp4graph reads version {VERSION}")
        return version
