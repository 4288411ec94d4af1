"""Search spaces: choices that each change a policy, written in YAML, and the policies that they give.

A configuration takes one choice of every parameter whose ``when`` holds. Its policy is the space's ``base``, merged
with the fragments of its choices in the order of the parameters, then with the fragments of ``also`` whose ``when``
holds. In a fragment, ``quantize`` changes the quantize block of every rule, ``operands`` the exceptions of every rule,
``techniques`` are appended or replace techniques of the same name, and ``run`` sets options of the training.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from fp4graph.errors import Error, PolicyError, PolicyWarning, suggest
from fp4graph.lab.runs.run import Run
from fp4graph.lab.sweeps.space_schema import Fragment, SpaceSection, overlaid
from fp4graph.policy import Policy, load_policy
from fp4graph.policy.document import Node, Place, parse
from fp4graph.policy.resolve import resolve
from fp4graph.policy.validation import validate
from fp4graph.technique.registry import default_registry

#: The choice of each parameter whose condition holds.
Assignment = Mapping[str, str]

#: The number of combinations tried before a choice counts as impossible.
TRIED = 200


def _holds(when: Mapping[str, tuple[str, ...]], assignment: Assignment) -> bool:
    return all(assignment.get(parameter) in labels for parameter, labels in when.items())


@dataclass(frozen=True)
class Part:
    """A fragment and its place in the file."""

    fragment: Fragment
    node: Node


@dataclass(frozen=True)
class Parameter:
    """A parameter: its choices by label, the plain choice first, and the condition under which it applies."""

    name: str
    choices: Mapping[str, Part]
    when: Mapping[str, tuple[str, ...]]
    node: Node

    def open_to(self, assignment: Assignment) -> list[str]:
        """Return the labels that fit the choices of earlier parameters; empty if the condition does not hold."""
        if not _holds(self.when, assignment):
            return []
        return [label for label, part in self.choices.items() if _holds(part.fragment.when, assignment)]

    def extended(self, assignments: Iterator[Assignment]) -> Iterator[Assignment]:
        """Yield each assignment extended by every open choice, or unchanged if no choice is open."""
        for assignment in assignments:
            labels = self.open_to(assignment)
            for label in labels:
                yield {**assignment, self.name: label}
            if not labels:
                yield assignment

    def only(self, labels: Iterable[str]) -> Parameter:
        """Return this parameter with only the choices ``labels``."""
        return replace(self, choices={label: self.choices[label] for label in labels})

    def shown(self, label: str) -> str:
        """Return a choice's text in a summary; empty for a plain choice without a title."""
        plain = label == next(iter(self.choices))
        return self.choices[label].fragment.title or ("" if plain else f"{self.name} {label}")


@dataclass(frozen=True)
class Configuration:
    """The policy and the training settings of one trial.

    ``kind`` is baseline, pure (the plain choices in one family), or trial. ``family`` is the choice of the space's
    family parameter, "all" without such a choice, or a baseline's name. An impossible configuration has an ``error``
    and no ``policy``.
    """

    kind: str
    summary: str
    family: str
    assignment: Assignment
    document: Mapping[str, Any]
    policy: Policy | None
    error: PolicyError | None = None
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A hash that is equal for configurations with the same training."""
        policy = self.policy.fingerprint if self.policy else self.document
        return _digest({"policy": policy, "run": dict(sorted(self.run.items()))})


@dataclass(frozen=True)
class Space:
    """A search space, as :func:`load_space` reads it.

    ``inert`` accepts techniques without effect. ``text`` is the space as YAML, base included; ``digest`` is its hash.
    """

    name: str
    family: str | None
    parameters: tuple[Parameter, ...]
    baselines: Mapping[str, Part]
    also: tuple[Part, ...]
    base: Node
    inert: bool
    text: str
    digest: str

    def assignments(self) -> Iterator[Assignment]:
        """Yield all assignments, the last parameter changing fastest."""
        return reduce(lambda partial, parameter: parameter.extended(partial), self.parameters, iter([{}]))

    def size(self, limit: int = 1_000_000) -> int:
        """Return the number of assignments, at most ``limit``."""
        return sum(1 for _ in itertools.islice(self.assignments(), limit))

    def assigned(self, choose: Callable[[Parameter, list[str]], str]) -> Assignment:
        """Return the assignment with the choice ``choose(parameter, labels)`` of each parameter with open labels."""
        taken: dict[str, str] = {}
        for parameter in self.parameters:
            if labels := parameter.open_to(taken):
                taken[parameter.name] = choose(parameter, labels)
        return taken

    def draw(self, generator: random.Random) -> Assignment:
        """Draw an assignment; each parameter takes any of its open choices with equal probability."""
        return self.assigned(lambda _, labels: generator.choice(labels))

    def contains(self, assignment: Assignment) -> bool:
        """Return whether ``assignment`` is one of :meth:`assignments`."""
        return self._plain(assignment) == assignment

    def first(self) -> list[Configuration]:
        """Return the first configurations of a sweep: the baselines, then the plain choices in every family."""
        baselines = [self._baseline(name, part) for name, part in self.baselines.items()]
        families = [parameter for parameter in self.parameters if parameter.name == self.family]
        pure = [self._plain({p.name: label}) for p in families for label in p.choices] or [self._plain({})]
        return [*baselines, *(self.configuration(assignment, "pure") for assignment in pure)]

    def _plain(self, chosen: Assignment) -> Assignment:
        """Return ``chosen``, with the first open choice for every missing or impossible choice."""
        return self.assigned(lambda p, labels: chosen[p.name] if chosen.get(p.name) in labels else labels[0])

    def configuration(self, assignment: Assignment, kind: str = "trial") -> Configuration:
        """Return the configuration of an assignment, with an error if it is impossible."""
        chosen = [(p, assignment[p.name]) for p in self.parameters if p.name in assignment]
        parts = [parameter.choices[label] for parameter, label in chosen]
        parts += [part for part in self.also if _holds(part.fragment.when, assignment)]
        # The family comes first, regardless of its parameter's place.
        chosen.sort(key=lambda item: item[0].name != self.family)
        summary = ", ".join(filter(None, (parameter.shown(label) for parameter, label in chosen))) or "plain"
        family = assignment.get(self.family or "", "all")
        policy, error = None, None
        document, run = self._laid(self.base, summary, parts)
        try:
            policy = self._resolved(document)
        except PolicyError as impossible:
            error = impossible
        return Configuration(kind, summary, family, dict(assignment), document.plain(), policy, error, run)

    def _baseline(self, name: str, part: Part) -> Configuration:
        here = part.node.place
        document, run = self._laid(Node({"version": Node(1, here), "default": Node("keep", here)}, here), name, [part])
        return Configuration("baseline", name, name, {}, document.plain(), self._resolved(document), None, run)

    def _laid(self, document: Node, summary: str, parts: Iterable[Part]) -> tuple[Node, dict[str, Any]]:
        """Return a document merged with fragments, and the fragments' settings of the run."""
        run: dict[str, Any] = {}
        for part in parts:
            document, run = overlaid(document, part.node), {**run, **part.fragment.run}
        return document.replacing({"name": (document.place, Node(f"{self.name}: {summary}", document.place))}), run

    def _resolved(self, document: Node) -> Policy:
        """Resolve the policy; unless the space is ``inert``, raise a PolicyWarning as a PolicyError."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if self.inert else "error", PolicyWarning)
            try:
                return resolve(document, "unnamed", None, default_registry())
            except PolicyWarning as warning:
                raise PolicyError(str(warning)) from None

    def check(self) -> None:
        """Raise a PolicyError at the first choice or condition that occurs in no valid policy."""
        choices = [(p, label, part) for p in self.parameters for label, part in p.choices.items()]
        for part in (*self.baselines.values(), *(part for *_, part in choices), *self.also):
            try:
                Run("digits", **part.fragment.run)
            except Error as error:
                raise part.node.where("run").error(str(error)) from None
        for part in self.baselines.values():
            self._baseline("baseline", part)
        for parameter, label, _ in choices:
            what = f"choice {label!r} of {parameter.name!r}"
            self._check_possible({parameter.name: (label,)}, parameter.node.where("choices", label), what)
        for part in self.also:
            self._check_possible(part.fragment.when, part.node.place, "this entry of also")

    def _check_possible(self, wanted: Mapping[str, tuple[str, ...]], place: Place, what: str) -> None:
        errors: list[PolicyError] = []
        for assignment in itertools.islice(self._with(wanted), TRIED):
            error = self.configuration(assignment).error
            if error is None:
                return
            errors.append(error)
        if not errors:
            raise place.error(f"the conditions of {what} never hold; correct them, or remove it")
        first, count = errors[0], len(errors)
        tried = "the only combination with it" if count == 1 else f"each of {count} combinations tried"
        exact = Place(first.file, first.line) if first.file == place.file and first.line else place
        raise exact.error(f"{what} is impossible in {tried}: {first.message}")

    def _with(self, wanted: Mapping[str, tuple[str, ...]]) -> Iterator[Assignment]:
        """Yield assignments with one of the ``wanted`` labels of each named parameter, the plainest first."""
        limited = replace(self, parameters=tuple(p.only(wanted.get(p.name, p.choices)) for p in self.parameters))
        generator = random.Random(0)
        drawn = (limited.draw(generator) for _ in range(100 * TRIED))
        seen: set[tuple[tuple[str, str], ...]] = set()
        for assignment in itertools.chain(itertools.islice(limited.assignments(), TRIED // 2), drawn):
            choices = tuple(assignment.items())
            if choices not in seen and _holds(wanted, assignment):
                seen.add(choices)
                yield assignment


def load_space(ref: str | Path) -> Space:
    """Load the space ``ref``: a file, or the name of a shipped space (``design-space``).

    Raises:
        PolicyError: a key, name or condition is unknown, or a choice occurs in no valid policy; names file and line.
    """
    shipped = {file.stem: file for file in Path(__file__).with_name("spaces").glob("*.yaml")}
    path = shipped.get(str(ref), Path(ref))
    if not path.is_file():
        raise PolicyError(f"{str(ref)!r} is neither a shipped search space nor a file; {suggest(str(ref), shipped)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot be read: {error}", file=str(path)) from None
    return parse_space(text, str(path))


def parse_space(text: str, file: str) -> Space:
    """Parse the space in ``text``, as :func:`load_space`; a relative path of the base is relative to ``file``."""
    if not text.strip():
        raise PolicyError("the file is empty; a search space begins with 'version: 1'", file=file)
    root = parse(text, file)
    section = validate(SpaceSection, root, ("space",))
    parameters: dict[str, Parameter] = {}
    for name, written in section.parameters.items():
        node = root.get("parameters", name)
        _check_condition(written.when, node, parameters)
        choices = {label: Part(part, node.get("choices", label)) for label, part in written.choices.items()}
        for part in choices.values():
            _check_condition(part.fragment.when, part.node, parameters)
        parameters[name] = Parameter(name, choices, written.when, node)
    also = tuple(Part(part, root.get("also", index)) for index, part in enumerate(section.also))
    for part in also:
        _check_condition(part.fragment.when, part.node, parameters)
        if not part.fragment.when:
            raise part.node.place.error("an entry of also has no condition; add 'when', or put it into the base")
    if section.family is not None:
        place = root.get("family").place
        if section.family not in parameters:
            raise place.error(f"family {section.family!r} is not a parameter; {suggest(section.family, parameters)}")
        if parameters[section.family].when:
            raise place.error(f"family must be a parameter without a condition; {section.family!r} has a condition")
    base = _base(root, section, file)
    content = {**root.plain(), "base": {key: v for key, v in base.plain().items() if key not in ("version", "name")}}
    space = Space(
        name=section.name or Path(file).stem,
        family=section.family,
        parameters=tuple(parameters.values()),
        baselines={name: Part(part, root.get("baselines", name)) for name, part in section.baselines.items()},
        also=also,
        base=base,
        inert=section.inert,
        text=yaml.safe_dump(content, sort_keys=False, allow_unicode=True),
        digest=_digest(content),
    )
    space.check()
    return space


def _base(root: Node, section: SpaceSection, file: str) -> Node:
    """Return the document of the policy that choices change."""
    node = root.get("base")
    if isinstance(section.base, str):
        path = Path(file).parent / section.base
        try:
            policy = load_policy(path if path.is_file() else section.base)
        except PolicyError as error:
            raise node.place.error(f"base: {error}") from None
        document = parse(policy.to_yaml(), section.base)
    else:
        for key, why in (("extends", "name that policy as the base"), ("name", "the space has a name")):
            if key in node.value:
                raise node.where(key).error(f"base takes no {key!r}: {why}; remove it")
        document = node.replacing({"version": (node.place, Node(1, node.place))})
        policy = resolve(document, "base", None, default_registry())
    if not policy.quantizes:
        raise node.place.error("base quantizes nothing, so choices would have no effect; give it a rule that quantizes")
    return document


def _check_condition(when: Mapping[str, tuple[str, ...]], node: Node, earlier: Mapping[str, Parameter]) -> None:
    for parameter, labels in when.items():
        place = node.where("when", parameter)
        if parameter not in earlier:
            hint = suggest(parameter, earlier) if earlier else "this is the first parameter"
            raise place.error(f"when names {parameter!r}, which is not an earlier parameter; {hint}")
        for label in labels:
            if label not in (choices := earlier[parameter].choices):
                raise place.error(f"{parameter!r} has no choice {label!r}; {suggest(label, choices)}")


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, default=str).encode()).hexdigest()
