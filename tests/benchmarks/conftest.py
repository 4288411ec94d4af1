"""Runs benchmarks, which belong to a clone and not to the package."""

import importlib
import json

import pytest


@pytest.fixture
def command(tmp_path, capsys):
    """Make a function that runs a benchmark's command in this process: (exit code, rows of its file, its output)."""

    def run(name, *arguments):
        module = importlib.import_module(f"benchmarks.{name}")
        with pytest.raises(SystemExit) as stop:
            module.app([*arguments, f"--folder={tmp_path}"])
        printed = capsys.readouterr().out
        (file,) = tmp_path.glob(f"{name}.*.json")
        return int(stop.value.code or 0), json.loads(file.read_text())["rows"], printed

    return run
