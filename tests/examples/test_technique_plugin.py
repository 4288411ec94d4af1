"""A technique in somebody else's package: the tutorial's code on its page, and installed from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import fp4graph
from fp4graph.technique.registry import Registry

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples/technique_plugin"


@pytest.fixture
def tutorial():
    """The Python code of the tutorial."""
    section = (ROOT / "docs/first_technique.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    return code


def test_the_tutorial_is_short_and_is_the_package(tutorial):
    assert tutorial == (PACKAGE / "mse_scale.py").read_text(encoding="utf-8")
    assert len([line for line in tutorial.splitlines() if line.strip()]) < 40


def test_the_tutorial_runs(tutorial):
    module = types.ModuleType("mse_scale_of_the_readme")
    exec(compile(tutorial, "first_technique.md", "exec", dont_inherit=True), module.__dict__)
    registry = Registry([("readme", module)], entry_point_group=None)
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
    """The environment of a process for which the package is installed, which it is not for this one."""
    folder = tmp_path_factory.mktemp("stranger")
    # A copy: building leaves files beside the sources.
    shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--no-build-isolation", "--target", str(folder / "site"), str(folder / "source")]
    subprocess.run(command, check=True)
    return {**os.environ, "PYTHONPATH": str(folder / "site"), "SOURCE": str(folder / "source")}


def run(environment, *arguments):
    """Standard output of a Python process outside the repository."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=environment["SOURCE"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_command_lists_the_installed_technique(installed):
    listed = run(installed, "-c", "from fp4graph.__main__ import main; main()", "techniques")
    assert re.search(r"mse_scale +│ 0\.5 +│ O\(n\) +│ O\(1\) +│ yes +│ mse_scale", listed)


@pytest.mark.long
def test_the_packages_own_tests_pass_and_train(installed):
    """They load the technique and the format through the entry point, and train a model under ``eager``."""
    report = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert re.search(r"^\d+ passed", report, re.MULTILINE)


@pytest.mark.long
def test_the_reference_holds_what_is_shipped_whatever_else_is_installed(installed):
    code = "from fp4graph.commands import catalogue; print('mse_scale' in catalogue.shipped_registry().techniques)"
    assert run(installed, "-c", code) == "False\n"
