"""The benchmarks are run from the root of a clone, and are no part of the package."""

import importlib
import json

import pytest


@pytest.fixture
def command(tmp_path, capsys):
    """Runs a benchmark's command in this process: (exit code, rows of the file that it wrote, what it printed)."""

    def run(name, *arguments):
        module = importlib.import_module(f"benchmarks.{name}")
        with pytest.raises(SystemExit) as stop:
            module.app([*arguments, f"--folder={tmp_path}"])
        printed = capsys.readouterr().out
        (file,) = tmp_path.glob(f"{name}.*.json")
        return int(stop.value.code or 0), json.loads(file.read_text())["rows"], printed

    return run
