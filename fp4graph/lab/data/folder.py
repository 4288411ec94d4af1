"""The folder for data, and the files of a folder."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder(name: str, folder: str | None = None) -> Path:
    """Return ``folder``, or by default ``name`` in ``$FP4GRAPH_DATA`` or the user's cache."""
    if folder:
        return Path(folder).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4graph"
    return Path(os.environ.get("FP4GRAPH_DATA") or cache) / name


def visible_files(root: Path) -> list[Path]:
    """Return the files anywhere under ``root``, sorted, without hidden files and hidden folders such as ``.git``."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts)]
