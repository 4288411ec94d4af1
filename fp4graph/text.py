"""Texts for messages: suggestions of the nearest name, differences between two policies, what a terminal may show."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_SHOWN = 12  # lines of a difference
_LONGEST = 10_000  # characters of a message
#: Characters that move a terminal's cursor, start its commands or turn the direction of text, and halves of characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return ``text`` with control characters but tabs and line feeds written as JSON escapes, such as ``\\u001b``."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def abridged(text: str) -> str:
    """Return ``text``, without the middle of a long one."""
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    return f"{text[: _LONGEST // 2]} [... {left_out} characters ...] {text[-_LONGEST // 2 :]}"


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
