"""A technique in a third-party package: the tutorial's code as its page prints it, and as an installed package."""

import re
import shutil
import types

import pytest
import torch

import fp4graph
from fp4graph.technique.registry import Registry
from tests.helpers.processes import ROOT, python, run

pytestmark = pytest.mark.process

PACKAGE = ROOT / "examples/technique_plugin"


def test_the_tutorial_is_short_is_the_package_and_runs():
    section = (ROOT / "docs/first_technique.md").read_text(encoding="utf-8")
    (tutorial,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    assert tutorial == (PACKAGE / "mse_scale.py").read_text(encoding="utf-8")
    assert len([line for line in tutorial.splitlines() if line.strip()]) < 40
    module = types.ModuleType("mse_scale_of_the_page")
    exec(compile(tutorial, "first_technique.md", "exec", dont_inherit=True), module.__dict__)
    registry = Registry([("page", module)], entry_point_group=None)
    assert not registry.failures
    options = {"factors": [1.0, 0.75]}  # the page's own example
    data = {"version": 1, "default": {"element": "e1m2"}, "techniques": [{"mse_scale": options}]}
    policy = fp4graph.load_policy(data, registry)
    assert policy.complexity == 0.5
    model = fp4graph.apply(torch.nn.Linear(64, 32), policy, backend="eager")
    x = torch.randn(8, 64)
    before = model(x).square().mean()
    before.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert model(x).square().mean() < before


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return options of a process that sees the package installed; this process does not."""
    folder = tmp_path_factory.mktemp("stranger")
    # A copy: building leaves files beside the sources.
    shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    options = "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"
    run(python("-m", "pip", "install", *options, "--target", folder / "site", folder / "source"))
    return {"env": {"PYTHONPATH": str(folder / "site")}, "cwd": folder / "source"}


@pytest.mark.long
def test_the_command_lists_the_installed_technique(installed):
    listed = run(python("-c", "from fp4graph.__main__ import main; main()", "techniques"), **installed)
    assert re.search(r"mse_scale +│ 0\.5 +│ O\(n\) +│ O\(1\) +│ yes +│ mse_scale", listed)


@pytest.mark.long
def test_the_packages_own_tests_pass_and_train(installed):
    """They load the technique and the format through the entry point, and train a model under ``eager``."""
    report = run(python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"), **installed)
    assert re.search(r"^\d+ passed", report, re.MULTILINE)


@pytest.mark.long
def test_the_reference_leaves_out_installed_plugins_that_are_not_shipped(installed):
    code = "from fp4graph.commands import catalogue; print('mse_scale' in catalogue.shipped_registry().techniques)"
    assert run(python("-c", code), **installed) == "False\n"
