"""The keys of a search space's file with their types, and the merge of a fragment into a policy's document."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, field_validator

from fp4graph.policy.document import Node, merge
from fp4graph.policy.schema import OperandException, QuantizeSection, TechniqueEntry
from fp4graph.policy.section import Section, Text, only_known, wrong

VERSION = 1

#: Settings of the training that a choice may change. The sweep fixes all others, so that losses are comparable.
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


#: The labels, by parameter, with which a condition holds.
Condition = dict[str, Annotated[tuple[str, ...], BeforeValidator(_labels)]]


class Fragment(Section):
    """The changes of a choice to the policy and the training."""

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
    """A search space."""

    version: StrictInt
    name: Text | None = None
    description: Annotated[str, Field(strict=True)] = ""
    base: Annotated[str | dict[str, Any], BeforeValidator(_policy)]
    family: Text | None = None
    #: True accepts techniques without effect, which a published space may contain.
    inert: StrictBool = False
    baselines: dict[str, Fragment] = Field(default_factory=lambda: {"bf16": Fragment()}, min_length=1)
    parameters: Annotated[dict[str, ParameterSection], Field(min_length=1)]
    also: tuple[Fragment, ...] = ()

    @field_validator("baselines")
    @classmethod
    def _unquantized(cls, baselines: dict[str, Fragment]) -> dict[str, Fragment]:
        for name, fragment in baselines.items():
            if extra := sorted(fragment.model_fields_set - {"techniques", "run"}):
                raise ValueError(f"baseline {name!r} quantizes nothing: it takes techniques and run; remove {extra[0]}")
        return baselines

    @field_validator("version")
    @classmethod
    def _supported(cls, version: int) -> int:
        if version != VERSION:
            raise ValueError(f"space version {version} is not supported; this fp4graph reads version {VERSION}")
        return version


def overlaid(document: Node, fragment: Node) -> Node:
    """Return ``document`` with a fragment's quantization and techniques."""
    over = _selected(fragment, "quantize", "operands")
    if over.value:
        document = _each_rule(document, over)
    return merge(document, _selected(fragment, "techniques")) if "techniques" in fragment.value else document


def _selected(node: Node, *keys: str) -> Node:
    return node.without(*(node.value.keys() - set(keys)))


def _each_rule(document: Node, over: Node) -> Node:
    """Merge ``quantize`` and ``operands`` into everything that quantizes: rules, rules of phases, and the default."""
    changed: dict[str, Node] = {}
    rules, default, phases = map(document.child, ("rules", "default", "phases"))
    if rules is not None:
        changed["rules"] = _laid(rules, over)
    if default is not None and isinstance(default.value, dict):  # keys of quantize, and operands beside them
        flat = over.child("quantize") or Node({}, over.place)
        changed["default"] = _deep(_deep(default, flat), _selected(over, "operands"))
    if phases is not None:
        changed["phases"] = Node([_each_rule(phase, over) for phase in phases.value], phases.place)
    return document.replacing({key: (document.where(key), node) for key, node in changed.items()})


def _laid(rules: Node, over: Node) -> Node:
    if ahead := rules.child("before"):  # the rules that a phase puts before the policy's
        return rules.replacing({"before": (rules.where("before"), _laid(ahead, over))})
    return Node([_deep(rule, over) if rule.child("quantize") else rule for rule in rules.value], rules.place)


def _deep(under: Node, over: Node) -> Node:
    """Merge mappings at every depth; ``over`` wins, and a new scale format drops the old format's ``max``."""
    if not (isinstance(under.value, dict) and isinstance(over.value, dict)):
        return over
    if "format" in over.value and "max" in under.value:
        kept = {key: item for key, item in under.value.items() if key != "max"}
        under = Node(kept, under.place, under.keys)
    items = {
        key: (over.where(key), _deep(under.value[key], item) if key in under.value else item)
        for key, item in over.value.items()
    }
    return under.replacing(items)
