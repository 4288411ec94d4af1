"""Loads a policy from a file, a shipped name or data."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fp4graph.errors import nearest
from fp4graph.policy.document import MOST_BYTES, Node, Place, from_data, merge, parse
from fp4graph.policy.policy import Policy
from fp4graph.policy.resolve import listed, resolve
from fp4graph.policy.schema import PolicySection
from fp4graph.policy.validation import validate
from fp4graph.policy.words import shortened
from fp4graph.technique.registry import Registry, default_registry

PolicyRef = str | PathLike[str] | Mapping[str, Any] | Policy
#: Other names of shipped policies: ``bf16`` quantizes nothing, and so is the baseline in any dtype.
ALIASES = {"baseline": "bf16"}
#: The longest chain of files that extend one another.
MOST_EXTENDS = 16


def shipped_policies(registry: Registry) -> dict[str, Path]:
    """Return the file of every policy that can be called by name, :data:`ALIASES` included, sorted by name."""
    aliases = {alias: registry.policies[name] for alias, name in ALIASES.items() if name in registry.policies}
    return dict(sorted({**aliases, **registry.policies}.items()))


def load_policy(ref: PolicyRef, registry: Registry | None = None) -> Policy:
    """Return the policy that ``ref`` names or holds.

    Args:
        ref: a path, the name of a policy that fp4graph or a plugin ships, the content of a policy file as a dict, or
            a policy, which is returned unchanged. Text without a directory and without the suffix ``.yaml`` or ``.yml``
            is looked up first as a shipped name, then as a path. ``baseline`` is another name of ``bf16``.
        registry: where techniques, formats and shipped policies are looked up; everything installed by default.

    Raises:
        PolicyError: at the first mistake, with file and line.
    """
    if isinstance(ref, Policy):
        return ref
    registry = registry or default_registry()
    if isinstance(ref, Mapping):
        document = _extended(from_data(ref), Path(), (), registry)
        return resolve(document, "unnamed", None, registry)
    if not isinstance(ref, str | PathLike):
        raise Place().error(f"a policy is a path, a shipped name, a dict or a Policy; got {type(ref).__name__}")
    path = _find(ref, Path(), registry, Place())
    return resolve(_extended(_read(path), path.parent, (path,), registry), path.stem, str(path), registry)


def _find(ref: str | PathLike[str], directory: Path, registry: Registry, place: Place) -> Path:
    """Return the file of ``ref``, a shipped name or a path relative to ``directory``; errors are about ``place``."""
    path = Path(ref)
    is_name = isinstance(ref, str) and path.name == ref and path.suffix not in (".yaml", ".yml")
    names = shipped_policies(registry)
    if is_name and ref in names:
        return names[str(ref)]
    try:
        if (directory / path).is_file():
            return directory / path
        problem = "is a directory" if (directory / path).is_dir() else "is not a file"
    except (OSError, ValueError) as error:  # the path is too long, or has a NUL
        problem = f"cannot be a file ({error.strerror if isinstance(error, OSError) else error})"
    close = nearest(path.stem, names)
    every = f"shipped policies: {', '.join(names) or 'none'}"
    hint = f"did you mean the shipped policy {close[0]!r}? fp4graph policies lists all" if close else every
    name = repr(shortened(str(ref)))
    unshipped = f"no policy {name} is shipped{registry.why_missing(str(ref))}, and it {problem}"
    described = unshipped if is_name else f"policy {name} {problem}"
    raise place.error(f"{described}; {hint}")


def _read(path: Path) -> Node:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise Place(str(path)).error(f"too large: a policy has at most {MOST_BYTES:,} bytes")
        return parse(content.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Place(str(path), line).error(f"not text in UTF-8 ({error.reason}); save it as UTF-8") from None
    except OSError as error:
        raise Place(str(path)).error(f"cannot be read: {error.strerror}") from None


def _extended(document: Node, directory: Path, chain: tuple[Path, ...], registry: Registry) -> Node:
    """Return ``document`` merged onto the policy that it extends; ``chain`` holds the files that led to it."""
    written = validate(PolicySection, document)
    if written.extends is None:
        listed(written, document)
        return document
    place = document.get("extends").place
    path = _find(written.extends, directory, registry, place)
    if any(path.resolve() == step.resolve() for step in chain):
        names = " → ".join(step.name for step in (*chain, path))
        raise place.error(f"policies extend each other in a circle: {names}; extend another policy or none")
    if len(chain) >= MOST_EXTENDS:
        raise place.error(f"more than {MOST_EXTENDS} policies extend one another; write some of them out")
    parent = _extended(_read(path), path.parent, (*chain, path), registry).without("description")
    merged = merge(parent, document)
    # An inherited default does not show that the new rules are meant to quantize nothing.
    if _quantizes(parent) and not _quantizes(merged) and written.default is None:
        remedy = "'default: keep' to say that nothing is to be quantized"
        if isinstance(document.get("rules").value, dict):
            cause = f"a rule without a match keeps every site, so no rule of {written.extends!r} is reached"
            raise document.error(("rules",), f"{cause}; give it a match, or write {remedy}")
        raise document.error(
            ("rules",),
            f"no rule quantizes, because these rules replace those of {written.extends!r}; write 'rules: {{before: "
            f"[...]}}' to put them ahead of the inherited rules, or {remedy}",
        )
    return merged


def _quantizes(document: Node) -> bool:
    """Return whether a rule or the default of a document without phases quantizes."""
    for rule in document.value["rules"].value if "rules" in document.value else ():
        match = rule.child("match")
        if rule.child("quantize") or match is None or not match.value:  # no rule after it is reached
            return rule.child("quantize") is not None
    return isinstance(document.get("default").value, dict)
