"""`make oldest` installs the lowest versions that pyproject.toml allows; a torch newer than all tested ones draws a
warning. pyproject.toml lists every folder of the package."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.model import versions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
BOUND = re.compile(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)$")
PIN = re.compile(r"([\w.-]+)===?([\d.]+)$")
LINTERS = {"mypy", "ruff"}  # `make oldest` runs the tests alone


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros."""
    return tuple(map(int, re.sub(r"(\.0)+$", "", version).split(".")))


def test_the_oldest_versions_are_the_lower_bounds():
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["vision"], *extras["test"], *extras["bench"], *extras["export"]]
    bounds = {match[1].lower(): numbers(match[2]) for each in required if (match := BOUND.match(each))}
    bounded, _, others = (ROOT / "constraints-oldest.txt").read_text("utf-8").partition("# Not ours")
    pins = {match[1]: numbers(match[2]) for line in bounded.splitlines() if (match := PIN.match(line))}
    assert others
    assert pins == {name: bound for name, bound in bounds.items() if name not in LINTERS}


@pytest.mark.parametrize(
    ("newer", "version"),
    [
        (False, "2.13.0"),
        (False, "2.15.3+cpu"),
        (True, "2.16.0.dev20270101+cu130"),
        (True, "2.16.0a0+git1"),
        (True, "3.0"),
    ],
)
def test_a_torch_newer_than_all_tested_ones_has_a_warning(version, newer):
    text = versions.untested(version)
    assert (text is not None) == newer
    assert not newer or (version in text and "2.15" in text)


def test_apply_warns_once_about_a_newer_torch(monkeypatch):
    major, minor = map(int, torch.__version__.split(".")[:2])
    monkeypatch.setattr(versions, "NEWEST", (major, minor - 1))
    versions.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"tested up to torch {major}.{minor - 1} and this is torch {major}.{minor}"):
        fp4graph.apply(nn.Linear(4, 4), "bf16", backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp4graph.apply(nn.Linear(4, 4), "bf16", backend="eager")
    monkeypatch.undo()
    versions.warn_once.cache_clear()


@pytest.mark.parametrize(
    ("text", "explained"),
    [
        ("_grouped_mm(): got RuntimeError('Expected mat_a to be BFloat16, got torch.float32.')\n", True),
        ("mm(): got RuntimeError('got torch.float32.')\n", False),
        ("_grouped_mm(): got RuntimeError('shapes')\n", False),
        ("_grouped_mm(out_dtype: torch.float32): got RuntimeError('output dtype')\n out_dtype=torch.float32", False),
    ],
)
def test_only_the_refusal_of_grouped_products_in_fp32_is_explained(text, explained):
    found = versions.refused_grouped_product(torch._dynamo.exc.TorchRuntimeError(text))
    assert (found is not None) == explained
    assert versions.refused_grouped_product(RuntimeError(text)) is None  # not an error of torch.compile


def test_every_folder_of_the_package_is_listed():
    """``pyproject.toml`` names every folder with files as a package; setuptools warns at length about others."""
    settings = PROJECT["tool"]["setuptools"]
    found = set()
    for package, folder in settings["package-dir"].items():
        files = [file.relative_to(ROOT / folder) for file in (ROOT / folder).rglob("*") if file.is_file()]
        found |= {".".join((package, *file.parts[:-1])) for file in files if "__pycache__" not in file.parts}
    assert set(settings["packages"]) == found
