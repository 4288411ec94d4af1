"""Optional packages: whether they are installed, and the command that installs them."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from importlib import metadata

from fp4graph.errors import Error


@cache
def install(extra: str) -> str:
    """Return the command that installs an extra from where fp4graph itself was installed: an index, a folder or a file
    (PEP 610)."""
    origin = json.loads(metadata.distribution("fp4graph").read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    if "dir_info" not in origin:
        return f"pip install 'fp4graph[{extra}]{' @ ' + url if url else ''}'"
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return f"pip install {editable}'{url.removeprefix('file://')}[{extra}]'"


def needs(package: str, why: str, extra: str = "tasks") -> None:
    """Raise an Error that names the ``extra`` to install if ``package`` is missing; ``why`` begins its text."""
    if importlib.util.find_spec(package) is None:
        raise Error(f"{why}, which is not installed; {install(extra)}")
