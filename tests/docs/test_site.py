"""The site has every page; ``make docs-site`` builds it and fails at a broken link."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
import yaml

from tests.docs.blocks import PAGES, ROOT


def test_the_navigation_has_every_page():
    def pages(entries):
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else pages(value)

    named = [*pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])]
    made = {"index.md", "api.md", "changelog.md"}  # by docs/hooks.py
    assert {*named} == made | {"reference/README.md", "reference/policy.md"} | {
        page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")
    } | {f"notebooks/{p.stem}.md" for p in (ROOT / "notebooks").glob("*.ipynb")}
    assert len(named) == len({*named})


def test_tests_that_pages_name_exist():
    for page in PAGES:
        for path, name in re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", (ROOT / page).read_text("utf-8")):
            assert (ROOT / path).exists(), f"{page}: {path}"
            assert not name or f"def {name}(" in (ROOT / path).read_text("utf-8"), f"{page}: {path}::{name}"


def test_drawings_are_those_that_the_script_draws():
    script = runpy.run_path(str(ROOT / "docs/drawings.py"))
    for name, draw in script["DRAWINGS"].items():
        assert (ROOT / "docs/images" / name).read_text("utf-8") == draw(), "run python docs/drawings.py"


@pytest.mark.long  # needs what ``make docs-site`` installs, as continuous integration does for long tests
def test_the_api_page_is_made_without_the_libraries_of_integrations(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "fp4graph.integrations.lightning", raising=False)
    page = runpy.run_path(str(ROOT / "docs/hooks.py"))["_api"]()
    assert "\n::: fp4graph.integrations.lightning.FP4GraphLightningCallback\n" in page
