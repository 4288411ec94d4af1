"""Texts for messages: suggestions of the nearest name, and differences between two policies."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_SHOWN = 12  # lines of a difference


def nearest(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return at most ``count`` of ``known`` that are spelled almost like ``name``, the best first."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=cutoff)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that names the nearest of ``known``, or all of them when none is near."""
    known = sorted(known)
    near = nearest(name, known)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"


def shortened(text: str) -> str:
    """Return ``text``, its end cut off beyond 80 characters."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def dotted(path: Sequence[str | int]) -> str:
    """Return ``rules[0].match.block`` for ``("rules", 0, "match", "block")``."""
    return re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else part for part in path))


def name_in(text: str) -> str:
    """Return the name in a policy's YAML as ``Policy.to_yaml`` writes it, on the second line."""
    return next((line[6:] for line in text.splitlines() if line.startswith("name: ")), "?")


def difference(old: str, new: str) -> str:
    """Return the changed lines from one policy's YAML (-) to another's (+), indented, a dozen lines at most.

    Names and descriptions alone make no difference: the result is then "".
    """
    ignored = "-description:", "+description:", "+++", "---"
    changed = [
        line
        for line in difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        if line[:1] in "+-" and not line.startswith(ignored)
    ]
    if not any(line[1:6] != "name:" for line in changed):
        return ""
    shown = "\n".join(f"  {line}" for line in changed[:_SHOWN])
    return shown + (f"\n  ... and {len(changed) - _SHOWN} lines more" if len(changed) > _SHOWN else "")
