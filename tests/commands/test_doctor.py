"""``fp4graph doctor`` reports what is installed, what is missing and how to install it; ``--version``."""

import json
import re
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fp4graph import errors
from fp4graph.__main__ import app
from fp4graph.commands import doctor
from fp4graph.kernels import build, switches
from fp4graph.technique.registry import Registry
from tests.helpers.processes import python, run
from tests.helpers.techniques import Offers, technique


def report(*words):
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_versions_and_shipped_techniques_are_reported():
    facts = json.loads(report("--json"))["facts"]
    assert facts["torch"] == torch.__version__
    assert facts["fp4graph"] == metadata.version("fp4graph")
    assert facts["techniques"].startswith("29 shipped")


def test_a_compiler_command_that_cannot_be_split_is_reported(monkeypatch):
    monkeypatch.setenv("CXX", "g++ '-I/my include")
    compiler = json.loads(report("--json"))["facts"]["C++ compiler"]
    assert re.fullmatch(r"none \(the compiler command .*my include.* cannot be split into words: .*\)", compiler)


def test_missing_and_outdated_packages_are_reported_with_the_command_that_installs_them(monkeypatch):
    version = metadata.version

    def without(name):
        if name in ("optuna", "timm"):
            raise metadata.PackageNotFoundError(name)
        return "1.0" if name == "transformers" else version(name)

    monkeypatch.setattr(doctor.metadata, "version", without)
    missing = json.loads(report("--json"))["missing"]
    assert missing["sweep"] == ["optuna>=4.5"]
    assert "timm>=1.0.22" in missing["vision"]
    assert "transformers>=5.23" in missing["hf"]  # too old
    monkeypatch.setenv("COLUMNS", "200")
    assert re.search(r"pip install .*\[sweep\]'", report())


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "'fp4graph[hf]'"),
        ({"url": "file:///src/fp4graph", "dir_info": {"editable": True}}, "-e '/src/fp4graph[hf]'"),
        ({"url": "file:///src/fp4graph", "dir_info": {}}, "'/src/fp4graph[hf]'"),
        ({"url": "file:///my%20src/fp4graph", "dir_info": {}}, "'/my src/fp4graph[hf]'"),
        ({"url": "file:///dist/fp4graph.whl", "archive_info": {}}, "'fp4graph[hf] @ file:///dist/fp4graph.whl'"),
        (
            {"url": "https://a.org/fp4graph.git", "vcs_info": {"vcs": "git", "commit_id": "b108"}},
            "'fp4graph[hf] @ git+https://a.org/fp4graph.git@b108'",
        ),
    ],
    ids=["index", "editable", "folder", "folder with a space", "wheel", "repository"],
)
def test_an_extra_is_installed_from_where_the_package_was(origin, command, monkeypatch):
    recorded = SimpleNamespace(read_text=lambda name: origin and json.dumps(origin))
    monkeypatch.setattr(metadata, "distribution", lambda name: recorded)
    assert errors.install.__wrapped__("hf") == f"pip install {command}"


def test_a_missing_compiler_and_switched_off_kernels_are_reported(monkeypatch):
    monkeypatch.setattr(build, "command", lambda: ["no-such-g++"])
    with switches.using(quantizers=False):
        facts = json.loads(report("--json"))["facts"]
    assert facts["C++ compiler"] == "none (no-such-g++ not found)"
    assert "switched off" in facts["CPU kernels"]


def test_third_party_plugins_and_their_failures_are_reported(monkeypatch):
    clip = technique("clip")
    plugins = [("mine", Offers(clip)), ("hers", Offers(clip))]  # the second fails: its name is taken
    monkeypatch.setattr(doctor, "installed_registry", lambda: Registry(plugins))
    facts = json.loads(report("--json"))["facts"]
    assert "clip (plugin mine)" in facts["techniques"]
    assert facts["plugin hers"].startswith("fails: ")


@pytest.mark.process
def test_the_option_version_prints_the_installed_version():
    assert run(python("-m", "fp4graph", "--version")).strip() == metadata.version("fp4graph")


def test_a_torch_that_cannot_be_imported_is_a_row(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # import raises
    facts = json.loads(report("--json"))["facts"]
    assert facts["torch"].startswith("fails: ModuleNotFoundError: ")
    assert facts["fp4graph"] == metadata.version("fp4graph")
