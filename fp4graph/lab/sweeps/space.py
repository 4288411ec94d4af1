"""Search spaces: named choices that each change a policy a little, written in YAML, and the policies they make.

A configuration takes one choice of every parameter whose ``when`` holds. Its policy is the space's ``base`` with the
fragments of its choices laid over it in the order of the parameters, then those of ``also``: ``quantize`` goes into the
quantize block of every rule, ``operands`` into its exceptions, ``techniques`` are appended or replace their namesakes,
and ``run`` sets what of the training may differ, such as ``lr``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from fp4graph.errors import Error, PolicyError, PolicyWarning, suggest
from fp4graph.lab.runs.run import Run
from fp4graph.lab.sweeps.overlay import overlaid
from fp4graph.lab.sweeps.space_schema import Fragment, SpaceSection
from fp4graph.policy import Policy, load_policy
from fp4graph.policy.document import Node, Place, parse
from fp4graph.policy.resolve import resolve
from fp4graph.policy.validation import validate
from fp4graph.technique.registry import default_registry

#: The choice taken of each parameter that has one.
Assignment = Mapping[str, str]

#: Combinations tried before a choice is called impossible.
TRIED = 200


def _holds(when: Mapping[str, tuple[str, ...]], assignment: Assignment) -> bool:
    return all(assignment.get(parameter) in labels for parameter, labels in when.items())


@dataclass(frozen=True)
class Part:
    """A fragment, and where it was written."""

    fragment: Fragment
    node: Node


@dataclass(frozen=True)
class Parameter:
    """A parameter: its choices by label, the plain one first, and the condition under which it has one."""

    name: str
    choices: Mapping[str, Part]
    when: Mapping[str, tuple[str, ...]]
    node: Node

    def open_to(self, assignment: Assignment) -> list[str]:
        """Return the labels that fit the choices of earlier parameters; none if the condition does not hold."""
        if not _holds(self.when, assignment):
            return []
        return [label for label, part in self.choices.items() if _holds(part.fragment.when, assignment)]

    def extended(self, assignments: Iterator[Assignment]) -> Iterator[Assignment]:
        """Yield each assignment once for every choice open to it, with the choice; unchanged where none is open."""
        for assignment in assignments:
            labels = self.open_to(assignment)
            for label in labels:
                yield {**assignment, self.name: label}
            if not labels:
                yield assignment

    def shown(self, label: str) -> str:
        """Return a choice's text in a summary; the plain choice has one only if it has a title."""
        plain = label == next(iter(self.choices))
        return self.choices[label].fragment.title or ("" if plain else f"{self.name} {label}")


@dataclass(frozen=True)
class Configuration:
    """The policy and the training settings of one trial.

    ``kind`` is baseline, pure (the plain choices in one family), or trial; ``family`` the choice of the space's family
    parameter, or a baseline's name. ``policy`` is None where it is impossible, and ``error`` then says why.
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
        """A hash of the training: equal for configurations that would be the same training."""
        policy = self.policy.fingerprint if self.policy else self.document
        return _digest({"policy": policy, "run": dict(sorted(self.run.items()))})


@dataclass(frozen=True)
class Space:
    """A search space, as :func:`load_space` reads it.

    ``inert`` accepts techniques without effect. ``text`` is the space as YAML with the base written out, and ``digest``
    its hash.
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
        return reduce(lambda found, parameter: parameter.extended(found), self.parameters, iter([{}]))

    def size(self, limit: int = 1_000_000) -> int:
        """Return the number of assignments, counted up to ``limit``."""
        return sum(1 for _ in itertools.islice(self.assignments(), limit))

    def assigned(self, choose: Callable[[Parameter, list[str]], str]) -> Assignment:
        """Return the assignment whose choice of each parameter ``choose`` picks among the labels open to it."""
        taken: dict[str, str] = {}
        for parameter in self.parameters:
            if labels := parameter.open_to(taken):
                taken[parameter.name] = choose(parameter, labels)
        return taken

    def draw(self, generator: random.Random) -> Assignment:
        """Draw an assignment: each parameter in turn takes any of its choices with equal probability."""
        return self.assigned(lambda _, labels: generator.choice(labels))

    def contains(self, assignment: Assignment) -> bool:
        """Return whether ``assignment`` is one of :meth:`assignments`."""
        return self._plain(assignment) == assignment

    def first(self) -> list[Configuration]:
        """Return a sweep's first configurations: the baselines, then the plain choices in every family."""
        baselines = [self._baseline(name, part) for name, part in self.baselines.items()]
        families = [parameter for parameter in self.parameters if parameter.name == self.family]
        pure = [self._plain({p.name: label}) for p in families for label in p.choices] or [self._plain({})]
        return [*baselines, *(self.configuration(assignment, "pure") for assignment in pure)]

    def _plain(self, chosen: Assignment) -> Assignment:
        """Return ``chosen`` with the first choice of every parameter of which it has no possible one."""
        return self.assigned(lambda p, labels: chosen[p.name] if chosen.get(p.name) in labels else labels[0])

    def configuration(self, assignment: Assignment, kind: str = "trial") -> Configuration:
        """Return the configuration of an assignment; it carries an error if it is impossible."""
        chosen = [(p, assignment[p.name]) for p in self.parameters if p.name in assignment]
        parts = [parameter.choices[label] for parameter, label in chosen]
        parts += [part for part in self.also if _holds(part.fragment.when, assignment)]
        # The family stands first, wherever its parameter does.
        chosen.sort(key=lambda item: item[0].name != self.family)
        summary = ", ".join(filter(None, (parameter.shown(label) for parameter, label in chosen))) or "plain"
        family = assignment[self.family] if self.family else "all"
        document = self.base
        run: dict[str, Any] = {}
        for part in parts:
            document, run = overlaid(document, part.node), {**run, **part.fragment.run}
        document = document.replacing({"name": (document.place, Node(f"{self.name}: {summary}", document.place))})
        try:
            policy, refusal = self._resolved(document), None
        except PolicyError as error:
            policy, refusal = None, error
        return Configuration(kind, summary, family, dict(assignment), document.plain(), policy, refusal, run)

    def _baseline(self, name: str, part: Part) -> Configuration:
        here = part.node.place
        own = {"version": Node(1, here), "name": Node(f"{self.name}: {name}", here), "default": Node("keep", here)}
        if part.fragment.techniques:
            own["techniques"] = part.node.value["techniques"]
        document = Node(own, here)
        policy = self._resolved(document)
        return Configuration("baseline", name, name, {}, document.plain(), policy, None, part.fragment.run)

    def _resolved(self, document: Node) -> Policy:
        """Resolve the policy. Configurations that only warn are rejected, unless the space takes them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if self.inert else "error", PolicyWarning)
            try:
                return resolve(document, "unnamed", None, default_registry())
            except PolicyWarning as warning:
                raise PolicyError(str(warning)) from None

    def check(self) -> None:
        """Raise a PolicyError at the first choice or condition that no policy can be made with."""
        for part in self.baselines.values():
            self._baseline("baseline", part)
            _check_run(part)
        for parameter in self.parameters:
            for label, part in parameter.choices.items():
                _check_run(part)
                what = f"choice {label!r} of {parameter.name!r}"
                self._check_possible({parameter.name: (label,)}, parameter.node.where("choices", label), what)
        for part in self.also:
            _check_run(part)
            self._check_possible(part.fragment.when, part.node.place, "this entry of also")

    def _check_possible(self, wanted: Mapping[str, tuple[str, ...]], place: Place, what: str) -> None:
        errors: list[PolicyError] = []
        for assignment in itertools.islice(self._with(wanted), TRIED):
            error = self.configuration(assignment).error
            if error is None:
                return
            errors.append(error)
        if not errors:
            raise place.error(f"{what}: its conditions never hold; correct them, or remove it")
        first, count = errors[0], len(errors)
        tried = "the only combination with it" if count == 1 else f"each of {count} combinations tried"
        exact = Place(first.file, first.line) if first.file == place.file and first.line else place
        raise exact.error(f"{what} is impossible in {tried}: {first.message}")

    def _with(self, wanted: Mapping[str, tuple[str, ...]]) -> Iterator[Assignment]:
        """Yield assignments with one of the ``wanted`` labels of each named parameter, the plainest ones first."""
        ancestors = set(wanted)
        for parameter in reversed(self.parameters):
            if parameter.name in ancestors:
                ancestors.update(parameter.when)
                for label in wanted.get(parameter.name, parameter.choices):
                    ancestors.update(parameter.choices[label].fragment.when)
        choices = {parameter.name: parameter.choices for parameter in self.parameters if parameter.name in ancestors}
        combined = (dict(zip(choices, labels, strict=True)) for labels in itertools.product(*choices.values()))
        generator = random.Random(0)
        drawn = (self.draw(generator) for _ in range(100 * TRIED))
        seen: set[tuple[tuple[str, str], ...]] = set()
        for assignment in itertools.chain(map(self._plain, combined), drawn):
            found = tuple(assignment.items())
            if found not in seen and _holds(wanted, assignment):
                seen.add(found)
                yield assignment


def load_space(ref: str | Path) -> Space:
    """Load the space ``ref``: the name of a shipped one (``design-space``), or a file.

    Raises:
        PolicyError: with file and line, at the first key, name or condition that is unknown, or a choice that no policy
            can be made with.
    """
    shipped = {file.stem: file for file in Path(__file__).with_name("spaces").glob("*.yaml")}
    path = shipped.get(str(ref), Path(ref))
    if not path.is_file():
        raise PolicyError(
            f"no search space {str(ref)!r} is shipped, and it is not a file; {suggest(str(ref), shipped)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot be read: {error}", file=str(path)) from None
    return parse_space(text, str(path))


def parse_space(text: str, file: str) -> Space:
    """Parse the space in ``text``, as :func:`load_space`; a relative path of the base starts from ``file``."""
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
            raise place.error(f"family names no parameter: {section.family!r}; {suggest(section.family, parameters)}")
        if parameters[section.family].when:
            raise place.error(f"family is a parameter that every configuration has; {section.family!r} has a condition")
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
    """Return the document of the policy that choices are laid over."""
    node = root.get("base")
    if isinstance(section.base, str):
        path = Path(file).parent / section.base
        try:
            policy = load_policy(path if path.is_file() else section.base)
        except PolicyError as error:
            raise node.place.error(f"base: {error}") from None
        document = parse(policy.to_yaml(), section.base)
    else:
        for key, why in (("extends", "name that policy as the base"), ("name", "the space has one")):
            if key in node.value:
                raise node.where(key).error(f"base takes no {key!r}: {why}; remove it")
        document = node.replacing({"version": (node.place, Node(1, node.place))})
        policy = resolve(document, "base", None, default_registry())
    if not policy.quantizes:
        raise node.place.error("base quantizes nothing, so that no choice can change how; give it a rule that does")
    return document


def _check_condition(when: Mapping[str, tuple[str, ...]], node: Node, earlier: Mapping[str, Parameter]) -> None:
    for parameter, labels in when.items():
        place = node.where("when", parameter)
        if parameter not in earlier:
            hint = suggest(parameter, earlier) if earlier else "there is none"
            raise place.error(f"when names {parameter!r}, which is no parameter before this one; {hint}")
        for label in labels:
            if label not in (known := earlier[parameter].choices):
                raise place.error(f"{parameter!r} has no choice {label!r}; {suggest(label, known)}")


def _check_run(part: Part) -> None:
    """Check the values of ``run`` by making a run of them."""
    try:
        Run("digits", **part.fragment.run)
    except Error as error:
        raise part.node.where("run").error(str(error)) from None


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, default=str).encode()).hexdigest()
