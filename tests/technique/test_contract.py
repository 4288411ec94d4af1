"""The plugin contract: which modules a plugin may import, and which stages there are."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path

import pytest

import fp4graph.technique
from fp4graph.commands.catalogue import shipped_registry
from fp4graph.kernels.request import INSIDE, OUTSIDE
from fp4graph.technique import IMPORTABLE, QUANTIZER_STAGES, STAGES, Technique, overrides
from fp4graph.technique.facts import Facts

ROOT = Path(__file__).parents[2]
PLUGINS = [*sorted((ROOT / "plugins").glob("*.py")), *sorted((ROOT / "examples/technique_plugin").glob("*_*.py"))]
TECHNIQUES = (ROOT / "docs/techniques.md").read_text(encoding="utf-8")


def imported(path: Path) -> set[str]:
    """The modules of fp4graph that a file imports, for types too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            own = node.module in IMPORTABLE  # else the names are modules of a package
            names |= {node.module if own and node.module else f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "fp4graph"}


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.stem)
def test_a_plugin_imports_only_what_is_listed(path: Path) -> None:
    assert imported(path) <= {*IMPORTABLE}


def test_every_listed_module_is_used_and_documented() -> None:
    assert set().union(*map(imported, PLUGINS)) == {*IMPORTABLE}
    table = section("## What a plugin may import")
    assert re.findall(r"^\| `(fp4graph[\w.]*)` \|", table, re.MULTILINE) == [*IMPORTABLE]


def section(heading: str) -> str:
    """The part of docs/techniques.md under a heading, up to the next one."""
    return TECHNIQUES.partition(f"{heading}\n")[2].partition("\n#")[0]


def test_kernels_know_every_stage_of_a_quantizer() -> None:
    """They would take an operand whose stage they do not know, and the stage would not be called."""
    assert {*INSIDE, *OUTSIDE} == {*QUANTIZER_STAGES}


def test_the_table_of_stages_is_what_the_techniques_override() -> None:
    table = section("# Techniques and the stages they act at")
    rows = re.findall(r"^\| ([^|]*\(.*?\)) \| [^|]* \| ([^|]*) \|$", table, re.MULTILINE)
    stages = [re.findall(r"`(\w+)`", named) for named, _ in rows]
    assert sorted(itertools.chain(*stages)) == sorted([*STAGES, "pairs"])
    techniques = shipped_registry().techniques
    for names, (_, users) in zip(stages, rows, strict=True):
        acting = {name for name, cls in techniques.items() if any(overrides(cls, stage) for stage in names)}
        assert {*re.findall(r"`(\w+)`", users)} & {*techniques} == acting, names


def test_every_stages_signature_is_documented() -> None:
    assert section("## Signatures of the stages").partition("```\n")[2].partition("```")[0].split("\n")[:-1] == [
        signature(stage) for stage in STAGES
    ]


def signature(stage: str) -> str:
    """A stage as the page writes it: a method with its arguments, or a property."""
    member = inspect.getattr_static(Technique, stage)
    if isinstance(member, property):
        return f"{stage} -> {inspect.signature(member.fget).return_annotation}"  # type: ignore[arg-type]
    whole = inspect.signature(member)
    own = whole.replace(parameters=list(whole.parameters.values())[1:])
    return f"{stage}{own}".replace("'", "").replace('"Literal[left, right]"', '"left" | "right"')


def test_the_package_exports_what_it_lists() -> None:
    assert sorted(fp4graph.technique.__all__) == sorted(set(fp4graph.technique.__all__))
    assert all(hasattr(fp4graph.technique, name) for name in fp4graph.technique.__all__)


def test_every_fact_is_documented() -> None:
    elsewhere = {
        "name",
        "overhead",
        "conflicts",
        "requires",
        "plugin",
        "complexity",
        "operands_listed",
        "addresses_given",
        "by_block",
        "by_expert",
        "divides_by",
    }
    facts = {name for name, value in vars(Facts).items() if isinstance(value, property)} | Facts.__class_vars__
    table = section("## Facts that a technique declares")
    assert facts - elsewhere == {
        *re.findall(r"`(\w+)[^`]*`", " ".join(re.findall(r"^\| ([^|]*) \| [^|]* \| [^|]* \|$", table, re.M)))
    }
