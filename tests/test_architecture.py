"""Imports of the package follow docs/architecture.md: no cycle of files, and no import of a higher layer. Plugins are
short.

Imports are read from the source, wherever they stand: at the top of a file, inside a function, under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"fp4graph": ROOT / "fp4graph", "fp4graph_plugins": ROOT / "plugins"}
PAGE = ROOT / "docs/architecture.md"
#: A row of the page's table of layers: its second cell names the folders and files of the layer.
LAYER = re.compile(r"^\| \d+ \| ([^|]+)\|", re.MULTILINE)

Imports = dict[str, set[str]]


def modules(sources: dict[str, Path]) -> dict[str, Path]:
    """Map the dotted name of every module below ``sources`` (package name to folder) to its file."""
    found = {}
    for package, folder in sources.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = file
    return found


def imports(sources: dict[str, Path]) -> Imports:
    """Map every module to the modules of ``sources`` that its source imports, for types or at run time."""
    known = modules(sources)
    return {name: set(_imported(name, file, set(known))) for name, file in known.items()}


def _imported(name: str, file: Path, known: set[str]) -> Iterator[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inside = f"{origin}.{alias.name}"
                if inside in known:
                    yield inside
                elif origin in known:
                    yield origin


def cycle(graph: Imports) -> list[str]:
    """Return modules of which each is imported by the next and the last is the first again; [] without a cycle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def layers(page: str) -> dict[str, int]:
    """Map every folder and file that the page's table of layers names to its layer, counted from the lowest."""
    rows = LAYER.findall(page)
    return {place: height for height, row in enumerate(reversed(rows)) for place in re.findall(r"`([\w./]+)`", row)}


def layer_of(place: str, heights: dict[str, int]) -> int:
    found = [
        height for name, height in heights.items() if place == name or (name[-1] == "/" and place.startswith(name))
    ]
    assert len(found) == 1, f"docs/architecture.md names {len(found)} layers of {place}, not 1"
    return found[0]


def climbs(sources: dict[str, Path], heights: dict[str, int]) -> list[str]:
    """Describe each import of a module in a higher layer."""
    parents = {package: folder.parent for package, folder in sources.items()}
    found = modules(sources).items()
    layer = {name: layer_of(str(file.relative_to(parents[name.partition(".")[0]])), heights) for name, file in found}
    pairs = ((name, other) for name, others in imports(sources).items() for other in others)
    return sorted(f"{name} imports {other}, which is above it" for name, other in pairs if layer[other] > layer[name])


@pytest.fixture(scope="module")
def heights() -> dict[str, int]:
    return layers(PAGE.read_text("utf-8"))


@pytest.mark.slow
def test_no_files_import_each_other_in_a_cycle() -> None:
    graph = imports(SOURCES)
    assert sum(map(len, graph.values())) > 300, "the imports were not read"
    assert cycle(graph) == []


@pytest.mark.slow
def test_no_module_imports_a_higher_layer(heights: dict[str, int]) -> None:
    assert climbs(SOURCES, heights) == []


def test_every_file_that_the_page_names_exists(heights: dict[str, int]) -> None:
    assert [place for place in heights if not (ROOT / place).exists()] == []
    files = re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|yaml|md))`", PAGE.read_text("utf-8"))
    assert len(files) > 40
    missing = [file for file in files if not any((base / file).exists() for base in (ROOT, ROOT / "fp4graph"))]
    assert missing == []


def test_no_plugin_has_more_than_150_lines() -> None:
    """Code that is not the technique's equation belongs in the package, where other plugins can use it."""
    lines = {path.name: len(path.read_text("utf-8").splitlines()) for path in SOURCES["fp4graph_plugins"].glob("*.py")}
    assert len(lines) > 25, "the plugins were not read"
    assert {name: count for name, count in lines.items() if count > 150} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import shop.low.a",
        "def f():\n    from shop.low import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shop.low.a import x",
        "from .a import x",
    ],
)
def test_an_added_cycle_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "low").mkdir()
    (tmp_path / "low/a.py").write_text("from shop.low import b\nx = 1")
    (tmp_path / "low/b.py").write_text("")
    assert cycle(imports({"shop": tmp_path})) == []
    (tmp_path / "low/b.py").write_text(source)
    assert set(cycle(imports({"shop": tmp_path}))) == {"shop.low.a", "shop.low.b"}


@pytest.mark.parametrize("source", ["from shop.high import b", "from shop.high.b import y", "import shop.high.b"])
def test_an_added_import_of_a_higher_layer_is_found(tmp_path: Path, source: str) -> None:
    shop = tmp_path / "shop"
    for name in ("low/a.py", "high/b.py", "errors.py"):
        (shop / name).parent.mkdir(exist_ok=True, parents=True)
        (shop / name).write_text("y = 1")
    heights = layers("| 2 | `shop/high/` | … |\n| 1 | `shop/low/`, `shop/errors.py` | … |\n")
    assert heights == {"shop/high/": 1, "shop/low/": 0, "shop/errors.py": 0}
    assert climbs({"shop": shop}, heights) == []
    (shop / "high/b.py").write_text("from shop.low import a")
    assert climbs({"shop": shop}, heights) == []
    (shop / "low/a.py").write_text(source)
    assert climbs({"shop": shop}, heights) == ["shop.low.a imports shop.high.b, which is above it"]
