"""Reference pages: the committed ones are current and complete; every other technique and policy can have one."""

from __future__ import annotations

import re
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
import yaml
from pydantic import Field

from fp4graph import load_policy
from fp4graph.commands import catalogue, reference
from fp4graph.technique import Overhead, Technique, registry
from fp4graph.technique.operands import Gemm
from fp4graph.technique.options import OperandList, Operands
from fp4graph.technique.registry import Registry
from tests.helpers.techniques import Broken, offering

DOCS = Path(__file__).parents[2] / "docs/reference"
SHIPPED = catalogue.shipped_registry()
PAGES = reference.pages(SHIPPED)


def test_committed_pages_are_what_the_code_generates():
    assert not SHIPPED.failures
    assert not reference.differences(DOCS, PAGES), "run: make docs"
    assert {f"policies/{name}.md" for name in SHIPPED.policies} <= PAGES.keys()


@pytest.mark.parametrize("name", sorted(SHIPPED.techniques))
def test_a_shipped_technique_is_described_in_full(name):
    technique = SHIPPED.techniques[name]
    assert [option for option, field in technique.model_fields.items() if not field.description] == []
    order = [heading for heading in reference.docstring_parts(technique) if heading != "Complexity weight"]
    assert order == ["Summary", "Definition", "Source", "Stage", "Cost", "When to use it"]
    if isinstance(technique.complexity, property):
        assert technique.complexity.__doc__
    else:
        assert "The complexity weight is" in " ".join(str(technique.__doc__).split())
    for option in catalogue.technique_data(technique, SHIPPED)["options"].values():
        assert not any(sign in option["type"] for sign in ("[", "typing", "NoneType", "<"))


@pytest.mark.parametrize("name", sorted(SHIPPED.techniques))
def test_the_example_of_a_page_is_accepted(name):
    page = reference.technique_page(SHIPPED.techniques[name], SHIPPED)
    example = page.partition("```yaml\n")[2].partition("```")[0]
    entry = yaml.safe_load(example)["techniques"][-1]
    options = {} if isinstance(entry, str) else entry[name]
    if "..." not in options.values():
        SHIPPED.techniques[name].model_validate(options)


@pytest.mark.long
@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+\.md)\)", PAGES[page]):
        path = (Path("/") / page).parent.joinpath(target)
        assert str(Path(*path.resolve().parts[1:])) in PAGES, target


class Bare(Technique):
    name: ClassVar[str] = "bare"
    overhead: ClassVar[Overhead] = Overhead("O(1)", "O(1)", fusable=False)
    strength: float

    @property
    def complexity(self):
        return self.strength


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Rich(Technique):
    """One sentence
    on two lines with x*y and ``code*``.

    y = |x|, for a <b> tag.

        y   x
        1   -1*

    Source: a paper, Eq. 1.

    Second paragraph of the source.

    Stages: element rounding.

    Cost: u per element.

    The complexity weight is ours: O(n).

    Use it when it helps.
    """

    name: ClassVar[str] = "rich"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=True)
    conflicts: ClassVar[frozenset[str]] = frozenset({"bare", "absent"})
    requires: ClassVar[frozenset[str]] = frozenset({"bare"})
    kind: Literal["a", "b", "free"] = Field("a", description="a | b")
    on: bool = Field(False, alias="is_on", description="Whether.")

    @property
    def complexity(self):
        """1.5, but nothing when free."""
        return 0.0 if self.kind == "free" else 1.5


PLUGINS = [("stranger", offering(techniques=[Bare, Rich]))]
REGISTRY = Registry(PLUGINS, entry_point_group=None)


def test_a_technique_without_a_docstring_has_a_page():
    assert reference.technique_page(Bare, REGISTRY) == (
        "# bare\n\n"
        "|  |  |\n| --- | --- |\n"
        "| complexity weight | by options |\n"
        "| weight declared as | not documented |\n"
        "| overhead | compute O(1), memory O(1), not fusable |\n"
        "| stages | none |\n"
        "| acts on | depends on options and site |\n"
        "| conflicts with | none |\n| requires | none |\n| plugin | `stranger` |\n\n"
        "## Options\n\n"
        "| option | type | default | meaning |\n| --- | --- | --- | --- |\n| `strength` | number | required |  |\n\n"
        "In a policy:\n\n```yaml\ntechniques:\n  - bare: {strength: '...'}\n```\n\n"
        "## Policies that use it\n\nNo shipped policy.\n"
    )


def test_the_sections_of_a_docstring_are_laid_out():
    page = reference.technique_page(Rich, REGISTRY)
    assert page.startswith("# rich\n\nOne sentence on two lines with x\\*y and `code*`.\n\n")
    assert "| complexity weight | 1.5; 0 with `kind: free` |\n" in page
    assert "| weight declared as | 1.5, but nothing when free. |\n" in page
    assert "| acts on | no operand |\n" in page
    assert "| conflicts with | `absent`, [bare](bare.md) |\n| requires | [bare](bare.md) |\n" in page
    assert "## Definition\n\ny = |x|, for a \\<b> tag.\n\n    y   x\n    1   -1*\n\n" in page
    assert "## Source\n\nA paper, Eq. 1.\n\nSecond paragraph of the source.\n\n## Stage\n\nElement rounding.\n" in page
    assert "## Cost\n\nU" not in page  # a symbol keeps its case
    assert "## Complexity weight\n\nO(n).\n\n## When to use it\n\nUse it when it helps.\n" in page
    assert "| `kind` | a \\| b \\| free | `a` | a \\| b |\n| `is_on` | true or false | `false` | Whether. |\n" in page
    assert "  - bare\n  - rich: {kind: a, is_on: false}\n" in page


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Literal["spline", "dge"], "spline | dge"),
        (Annotated[int, Field(ge=1, le=24)], "whole number from 1 to 24"),
        (Annotated[int, Field(ge=1)], "whole number of at least 1"),
        (Annotated[float, Field(gt=0, lt=1)], "number above 0 and below 1"),
        (Annotated[float, Field(gt=0, le=1)], "number above 0 and at most 1"),
        (float | None, "number, or null"), (bool, "true or false"), (str, "text"), (dict[str, int], "dict"),
        (Literal["tensor", "row"] | int, "tensor | row, or whole number"),
        (Colour, "red | blue"),
        (Literal["all"] | tuple[Gemm, ...], "all, or list of fprop | dgrad | wgrad"),
        (tuple[int, int], "pair of whole numbers"),
        (tuple[tuple[float, float], ...], "list of pairs of numbers"),
        (tuple[str, ...], "list of names"), (Operands, "list of operands"),
        (Annotated[Literal["backward"] | tuple[str, ...], OperandList()], "backward, or list of operands"),
    ],
)  # fmt: skip
def test_types_of_options_are_put_in_words(annotation, words):
    assert catalogue.option_words(annotation) == words


def test_a_policy_without_a_file_shows_what_it_resolves_to():
    kept = {"operands": {"wgrad": "keep"}}
    policy = load_policy({"version": 1, "name": "p", "description": "A | B.", "default": kept}, REGISTRY)
    page = reference.policy_page(policy)
    assert page.startswith("# p\n\nA | B.\n\nΩ = 0, no technique.\n\n## Rules\n\n### default: every other site\n")
    assert "| Q1 | fprop.input | e2m1 | 32 | e8m0 floor | nearest, ties even | original |\n" in page
    assert "| Q6 | wgrad.input | high precision |  |  |  |  |\n" in page
    assert page.endswith(f"## YAML\n\n```yaml\n{policy.to_yaml()}```\n")


@pytest.mark.parametrize(
    ("description", "paragraph"),
    [("", ""), ("Exponents 0..7", "Exponents 0..7.\n\n"), ("Exponents 0..7.", "Exponents 0..7.\n\n")],
)
def test_a_description_becomes_a_sentence(description, paragraph):
    policy = load_policy({"version": 1, "name": "p", "description": description, "default": "keep"}, REGISTRY)
    assert reference.policy_page(policy).startswith(f"# p\n\n{paragraph}Ω = 0, no technique.\n")


def test_a_rule_called_default_shows_its_match():
    rule = {"name": "default", "match": {"op": "conv"}, "keep": "few", "required": False}
    policy = load_policy({"version": 1, "name": "p", "rules": [rule], "default": "keep"}, REGISTRY)
    headings = ["default: op conv, may match nothing", "default: every other site"]
    assert list(map(catalogue.rule_heading, (*policy.rules, policy.default))) == headings


def test_a_policy_files_comment_becomes_prose(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("# First.\n#\n# Then:\n#   a   1\n#   b   2\n# Last.\nversion: 1\nextends: bf16\n# not prose\n")
    page = reference.policy_page(load_policy(path, REGISTRY))
    assert "\n\nFirst.\n\nThen:\n\n```text\n  a   1\n  b   2\n```\n\nLast.\n\n## Rules\n" in page
    assert "## YAML\n\n```yaml\nversion: 1\nextends: bf16\n# not prose\n```\n" in page
    assert "## YAML without `extends`\n\n```yaml\nversion: 1\nname: p\n" in page
    assert str(tmp_path) not in page


def test_the_command_writes_checks_and_removes_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registry, "_shipped_policies", list)
    without_policies = Registry(PLUGINS, entry_point_group=None)
    monkeypatch.setattr(catalogue, "shipped_registry", lambda: without_policies)
    target = tmp_path / "reference"
    write, check = [str(target)], [str(target), "--check"]
    assert (reference.main(write), reference.main(check)) == (0, 0)
    (target / "techniques/bare.md").unlink()
    (target / "techniques/rich.md").write_text("old")
    (target / "policies").mkdir()
    (target / "policies/gone.md").write_text("gone")
    capsys.readouterr()
    assert reference.main(check) == 1
    faults = "missing: techniques/bare.md", "stale: techniques/rich.md", "superfluous: policies/gone.md"
    assert capsys.readouterr().out.splitlines() == [*faults, "run: make docs"]
    assert (target / "policies/gone.md").exists()
    assert reference.main(write) == 0
    assert not (target / "policies/gone.md").exists()
    assert reference.main(check) == 0
    shutil.rmtree(target)
    assert reference.main(check) == 1

    broken = Registry([("broken", Broken())], entry_point_group=None)
    monkeypatch.setattr(catalogue, "shipped_registry", lambda: broken)
    assert reference.main([str(tmp_path)]) == 1
    assert "left out: plugin 'broken': cannot be loaded: RuntimeError: out of order" in capsys.readouterr().err
