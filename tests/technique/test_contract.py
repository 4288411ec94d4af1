"""docs/techniques.md states the plugin contract: modules that a plugin may import, parts, their methods and fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import fp4graph.technique
from fp4graph.commands.catalogue import shipped_registry, stages_of
from fp4graph.kernels.request import INSIDE, OUTSIDE
from fp4graph.technique import (
    IMPORTABLE,
    QUANTIZER_STAGES,
    STAGES,
    TENSOR_STAGES,
    ChannelSplit,
    OptimizerHook,
    PairTransform,
    Part,
    Technique,
)
from fp4graph.technique.parts import KINDS

ROOT = Path(__file__).parents[2]
PLUGINS = [*sorted((ROOT / "plugins").glob("*.py")), *sorted((ROOT / "examples/technique_plugin").glob("*_*.py"))]
TECHNIQUES = (ROOT / "docs/techniques.md").read_text(encoding="utf-8")


def imported(path: Path) -> set[str]:
    """Return the modules of fp4graph that a file imports, also those for types alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            from_module = node.module in IMPORTABLE  # else the names are modules of a package
            names |= {node.module if from_module else f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "fp4graph"}


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.stem)
def test_a_plugin_imports_only_what_is_listed(path: Path) -> None:
    assert imported(path) <= {*IMPORTABLE}


def test_every_listed_module_is_used_and_documented() -> None:
    assert set().union(*map(imported, PLUGINS)) == {*IMPORTABLE}
    table = section("## What a plugin may import")
    assert re.findall(r"^\| `(fp4graph[\w.]*)` \|", table, re.MULTILINE) == [*IMPORTABLE]


def section(heading: str) -> str:
    """Return the text of docs/techniques.md under a heading, up to the next heading."""
    return TECHNIQUES.partition(f"{heading}\n")[2].partition("\n#")[0]


def test_kernels_know_every_stage_of_a_quantizer() -> None:
    """A kernel would take an operand despite a stage that it does not know, and the stage would not be called."""
    assert {*INSIDE, *OUTSIDE} == {*QUANTIZER_STAGES}


def test_the_table_of_parts_has_every_method_and_the_techniques_that_act_there() -> None:
    rows = re.findall(
        r"^\| (`[A-Z]\w+`|any part.*?) \| ([^|]*) \| ([^|]*) \|$", section("## Where parts act"), re.MULTILINE
    )
    techniques = {name: {*stages_of(cls)} for name, cls in shipped_registry().techniques.items()}
    stages = {kind.__name__: [stage for stage in kind.stages if stage != "observe"] for kind in KINDS}
    assert [title.strip("`") for title, _, _ in rows[:-1]] == [*stages]
    for title, methods, users in rows:
        expected = stages.get(title.strip("`"), ["observe"])
        assert [name for name in re.findall(r"`(\w+)`", methods) if name in STAGES] == expected
        acting = {name for name, acted in techniques.items() if acted & {*expected}}
        assert {*re.findall(r"`(\w+)`", users)} == acting, title


def test_every_methods_signature_is_documented() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", TECHNIQUES, re.DOTALL | re.MULTILINE)
    block = next(block for block in blocks if block.startswith("pair_context"))
    order = [*PairTransform.stages, *TENSOR_STAGES, *ChannelSplit.stages, *OptimizerHook.stages]
    assert sorted(order) == sorted(STAGES)
    assert block.splitlines() == [signature(stage) for stage in order]


def signature(stage: str) -> str:
    """Return the signature of a method as the page writes it."""
    kind = next(kind for kind in KINDS if stage in kind.stages)
    whole = inspect.signature(getattr(kind, stage))
    without_self = whole.replace(parameters=list(whole.parameters.values())[1:])
    return f"{stage}{without_self}".replace("'", "").replace('"Literal[left, right]"', '"left" | "right"')


def test_every_field_of_a_part_is_documented() -> None:
    fields = {field.name: kind for kind in (Part, *KINDS) for field in dataclasses.fields(kind)}
    rows = re.findall(r"^\| `(\w+)`(?: \(`(\w+)`\))? \|", section("## Fields of a part"), re.MULTILINE)
    assert {name for name, _ in rows} == {*fields}
    for name, kind in rows:
        owner = next(cls for cls in (Part, *KINDS) if name in {field.name for field in dataclasses.fields(cls)})
        assert owner.__name__ == (kind or "Part")


def test_every_member_of_a_technique_that_an_author_overrides_is_documented() -> None:
    elsewhere = {"name", "overhead", "complexity", "plugin", "operand_lists", "operands_listed", "addresses_given"}
    members = {name for name in vars(Technique) if not name.startswith(("_", "model_"))} | {*Technique.__class_vars__}
    table = section("## What the technique says of itself")
    named = {*re.findall(r"`(\w+)", " ".join(re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)))}
    assert members - elsewhere - {"specs_listed"} == named - {"Operands"}


def test_the_package_exports_what_it_lists() -> None:
    assert sorted(fp4graph.technique.__all__) == sorted(set(fp4graph.technique.__all__))
    assert all(hasattr(fp4graph.technique, name) for name in fp4graph.technique.__all__)
