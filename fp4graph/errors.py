"""The errors that fp4graph raises on purpose, and their remedies: names to try, and packages to install.

One ``except fp4graph.Error`` catches all errors.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable
from functools import cache


class Error(Exception):
    """Base of all errors of fp4graph."""


class PolicyError(Error):
    """A policy cannot be loaded, or does not fit the model that it is applied to.

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

    Code that catches the TypeError or ValueError of a wrong argument catches this error too.
    """


class PolicyWarning(UserWarning):
    """Warns about a policy that is valid but probably not what its author meant."""


class PluginError(Error):
    """A plugin cannot be loaded, or broke its contract.

    Args:
        message: the failure.
        plugin: the plugin's name, or None where it is not known.
        site: the place in the model, or None until code that knows the place sets it.
    """

    def __init__(self, message: str, *, plugin: str | None = None, site: str | None = None) -> None:
        self.message = message
        self.plugin = plugin
        self.site = site
        super().__init__(message)

    def __str__(self) -> str:
        # Do not use self.args: torch.fx appends the whole graph to the args of an error that passes through it.
        where = [f"plugin {self.plugin!r}"] if self.plugin else []
        where += [f"at {self.site}"] if self.site else []
        return f"{', '.join(where)}: {self.message}" if where else self.message


class NonFiniteError(Error):
    """``fp4graph.detect_nonfinite`` found NaN or Inf; ``site`` names the place where the value arose."""

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


def nearest(name: str, candidates: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return at most ``count`` of ``candidates`` that are spelled almost like ``name``, the closest first."""
    return difflib.get_close_matches(name, list(candidates), n=count, cutoff=cutoff)


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Return a hint that names the candidate closest to ``name``, or all candidates if none is close."""
    candidates = sorted(candidates)
    close = nearest(name, candidates)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(candidates) or 'none'}"


@cache
def install(extra: str) -> str:
    """Return the command that installs an extra from the source that fp4graph was installed from: an index, a folder, a
    file or a repository (PEP 610)."""
    import json
    from importlib import metadata  # takes longer to import than the rest of ``import fp4graph``
    from urllib.parse import unquote

    origin = json.loads(metadata.distribution("fp4graph").read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(url.removeprefix('file://'))}[{extra}]'"
    if repository := origin.get("vcs_info"):
        url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
    return f"pip install 'fp4graph[{extra}]{' @ ' + url if url else ''}'"


def needs(package: str, why: str, extra: str = "tasks") -> None:
    """If ``package`` is missing, raise an Error that begins with ``why`` and names the ``extra`` to install."""
    if importlib.util.find_spec(package) is None:
        raise Error(f"{why}, which is not installed; {install(extra)}")
