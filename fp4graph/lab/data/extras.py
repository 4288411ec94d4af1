"""Checks for optional packages, and the folder for data."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from fp4graph.errors import Error


def needs(package: str, why: str, extra: str = "tasks") -> None:
    """Raise an Error that names the ``extra`` to install if ``package`` is missing; ``why`` begins its text."""
    if importlib.util.find_spec(package) is None:
        raise Error(f"{why}, which is not installed; pip install 'fp4graph[{extra}]'")


def data_folder(name: str, folder: str | None = None) -> Path:
    """Return ``folder``, or by default ``name`` in ``$FP4GRAPH_DATA`` or the user's cache."""
    if folder:
        return Path(folder).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4graph"
    return Path(os.environ.get("FP4GRAPH_DATA") or cache) / name
