"""The plugin contract: which modules a plugin may import, and which stages there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fp4graph.technique
from fp4graph.technique import IMPORTABLE

ROOT = Path(__file__).parents[2]
PLUGINS = [*sorted((ROOT / "plugins").glob("*.py")), ROOT / "examples/technique_plugin/mse_scale.py"]
TECHNIQUES = (ROOT / "docs/techniques.md").read_text(encoding="utf-8")


def imported(path: Path) -> set[str]:
    """The modules of fp4graph that a file imports, for types too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            own = node.module in IMPORTABLE  # else its names are modules, as in ``from fp4graph.numerics import scaling``
            names |= {node.module if own and node.module else f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "fp4graph"}


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.stem)
def test_a_plugin_imports_only_what_is_listed(path: Path) -> None:
    assert imported(path) <= {*IMPORTABLE}


def test_every_listed_module_is_used_and_documented() -> None:
    assert set().union(*map(imported, PLUGINS)) == {*IMPORTABLE}
    section = TECHNIQUES.partition("## What a plugin may import")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(fp4graph[\w.]*)` \|", section, re.MULTILINE) == [*IMPORTABLE]


def test_the_package_exports_what_it_lists() -> None:
    assert sorted(fp4graph.technique.__all__) == sorted(set(fp4graph.technique.__all__))
    assert all(hasattr(fp4graph.technique, name) for name in fp4graph.technique.__all__)
