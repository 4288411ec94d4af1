"""Run an example as a user does."""

import runpy
import sys

import pytest

from tests.helpers import processes
from tests.helpers.processes import python

EXAMPLES = processes.ROOT / "examples"


@pytest.fixture
def example(capsys, monkeypatch):
    """Run an example in this process; return what it printed."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def torchrun():
    """Run an example in two processes; return what they printed."""

    def run(name, *arguments):
        command = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", EXAMPLES / name)
        return processes.run([*command, *arguments], env={"OMP_NUM_THREADS": "1"})

    return run
