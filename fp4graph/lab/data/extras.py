"""Packages that only some commands, data or models need, and the folder for data."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from fp4graph.errors import Error


def needs(package: str, why: str, extra: str = "tasks") -> None:
    """Raise an Error that names the ``extra`` to install unless ``package`` is there; ``why`` begins its sentence."""
    if importlib.util.find_spec(package) is None:
        raise Error(f"{why}, which is not installed; pip install 'fp4graph[{extra}]'")


def data_folder(name: str, given: str | None = None) -> Path:
    """Return the folder ``given``, or that of downloads: ``$FP4GRAPH_DATA/name``, or one below the user's cache."""
    if given:
        return Path(given).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4graph"
    return Path(os.environ.get("FP4GRAPH_DATA") or cache) / name
