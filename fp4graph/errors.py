"""The errors that fp4graph raises on purpose, all caught by ``except fp4graph.Error``, and the words of their messages:
suggestions of the nearest name, differences between two policies, what a terminal may show.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_SHOWN = 12  # lines of a difference
_LONGEST = 10_000  # characters of a message
#: Characters that move a terminal's cursor, start its commands or turn the direction of text, and halves of characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Error(Exception):
    """Base of all errors of fp4graph."""


class PolicyError(Error):
    """A policy cannot be loaded, or the model that it is applied to cannot follow it.

    Args:
        message: the mistake, and what to do about it.
        file: the policy file, or None for a policy given as data.
        line: 1-based line in that file, or None.
    """

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None) -> None:
        self.message = message
        self.file = file
        self.line = line
        place = ":".join(str(part) for part in (file, line) if part is not None)
        super().__init__(f"{place}: {message}" if place else message)


class SpecError(Error, TypeError, ValueError):
    """A field of a quantizer's spec has the wrong type or an impossible value; the message names the field.

    The error is also a TypeError and a ValueError, which wrong arguments raise elsewhere.
    """


class PolicyWarning(UserWarning):
    """Warns about a policy that is valid but probably not what its author meant."""


class PluginError(Error):
    """A plugin cannot be loaded, or broke its contract.

    Args:
        message: the failure.
        plugin: the plugin's name, or None where it is not known.
        site: the place in the model, or None; code that knows the place may set it while the error passes.
    """

    def __init__(self, message: str, *, plugin: str | None = None, site: str | None = None) -> None:
        self.message = message
        self.plugin = plugin
        self.site = site
        super().__init__(message)

    def __str__(self) -> str:
        # Not from args: torch.fx appends the whole graph to them when an error passes.
        where = [f"plugin {self.plugin!r}"] if self.plugin else []
        where += [f"at {self.site}"] if self.site else []
        return f"{', '.join(where)}: {self.message}" if where else self.message


class NonFiniteError(Error):
    """``fp4graph.detect_nonfinite`` found NaN or Inf; ``site`` names the place where it arose."""

    def __init__(self, message: str, *, site: str) -> None:
        self.message = message
        self.site = site
        super().__init__(f"{site}: {message}")


class CaptureError(Error):
    """The policy cannot be applied to a captured graph; ``site`` names the place in the model."""

    def __init__(self, message: str, *, site: str | None = None) -> None:
        self.message = message
        self.site = site
        super().__init__(f"{site}: {message}" if site else message)


class UncompiledError(CaptureError):
    """A module with quantized sites was called outside its compiled graph, where it would run in high precision."""


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
