"""The keys of a search space's file, and their types."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, field_validator

from fp4graph.policy.schema import OperandException, QuantizeSection, TechniqueEntry
from fp4graph.policy.section import Section, Text, only_known, wrong

VERSION = 1

#: Settings of the training that a choice may change. All others are the sweep's, so that losses compare.
RUN_KEYS = (
    "optimizer", "optimizer_options", "seed", "lr", "weight_decay", "schedule", "warmup", "clip", "batch_size",
    "accumulate", "dtype", "autocast",
)  # fmt: skip


def _labels(value: Any) -> Any:
    labels = (value,) if isinstance(value, str) else value
    if not isinstance(labels, list | tuple) or not labels or not all(isinstance(label, str) for label in labels):
        raise wrong("the label of a choice, or a list of labels")
    return tuple(labels)


def _policy(value: Any) -> Any:
    if not isinstance(value, str | dict) or not value:
        raise wrong("the name or file of a policy, or a policy without version and name")
    return value


#: Parameters and the labels that each must have.
Condition = dict[str, Annotated[tuple[str, ...], BeforeValidator(_labels)]]


class Fragment(Section):
    """The changes that a choice makes to the policy and to the training."""

    title: Text | None = None
    when: Condition = Field(default_factory=dict)
    quantize: QuantizeSection | None = None
    operands: dict[str, OperandException] = Field(default_factory=dict)
    techniques: tuple[TechniqueEntry, ...] = ()
    run: dict[str, Any] = Field(default_factory=dict)

    @field_validator("run", mode="before")
    @classmethod
    def _of_a_run(cls, data: Any) -> Any:
        return only_known(data, RUN_KEYS, "key")


class ParameterSection(Section):
    choices: Annotated[dict[str, Fragment], Field(min_length=1)]
    when: Condition = Field(default_factory=dict)


class SpaceSection(Section):
    """A whole search space."""

    version: StrictInt
    name: Text | None = None
    description: Annotated[str, Field(strict=True)] = ""
    base: Annotated[str | dict[str, Any], BeforeValidator(_policy)]
    family: Text | None = None
    #: True accepts techniques without effect, as a published space may need; otherwise they are refused.
    inert: StrictBool = False
    baselines: dict[str, Fragment] = Field(default_factory=lambda: {"bf16": Fragment()}, min_length=1)
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
