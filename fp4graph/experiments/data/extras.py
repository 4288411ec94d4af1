"""Packages that only some data or some models need, and where data is kept."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from fp4graph.errors import Error


def needs(package: str, why: str) -> None:
    """Raise an Error that names the extra to install unless ``package`` is there; ``why`` begins its sentence."""
    if importlib.util.find_spec(package) is None:
        raise Error(f"{why}, which is not installed; pip install 'fp4graph[tasks]'")


def data_folder(name: str) -> Path:
    """Where data that is downloaded or derived is kept: ``$FP4GRAPH_DATA/name``, or below the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4graph"
    return Path(os.environ.get("FP4GRAPH_DATA") or cache) / name
