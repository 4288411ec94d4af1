"""The folder for data."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder(name: str, folder: str | None = None) -> Path:
    """Return ``folder``, or by default ``name`` in ``$FP4GRAPH_DATA`` or the user's cache."""
    if folder:
        return Path(folder).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4graph"
    return Path(os.environ.get("FP4GRAPH_DATA") or cache) / name
