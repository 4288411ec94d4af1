"""Before its first step, a training reports that it compiles."""

import time
from types import SimpleNamespace

import torch

from fp4graph.commands import train
from fp4graph.lab.runs import waiting as module
from fp4graph.lab.runs.run import Run
from fp4graph.lab.runs.waiting import waiting


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_graphs_are_counted_until_the_first_step(monkeypatch):
    said = []
    with waiting(lambda *words: said.append(words)) as stepped:
        stepped()
    assert said == []  # a fast training reports nothing
    monkeypatch.setattr(module, "PATIENCE", 0.02)
    with waiting(lambda *words: said.append(words)) as stepped:
        wait_for(lambda: said)
        assert said[0] == ("preparing the first step", True)
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        wait_for(lambda: ("compiling (once): 1 graph so far", False) in said)
        stepped()
        time.sleep(0.1)
        count = len(said)
        time.sleep(0.1)
        assert len(said) == count


def test_without_a_terminal_progress_is_printed_as_lines(monkeypatch, capsys):
    monkeypatch.setattr(module, "PATIENCE", 0.02)
    monkeypatch.setattr(train, "EVERY", 10.0)
    now = [0.0]
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with train.progress_of(Run("digits"), quiet=False) as (tick, report):
        wait_for(lambda: "preparing the first step" in capsys.readouterr().err)
        for step in range(1, 26):
            now[0] = float(step)
            tick(step, 25, 2.0)
        report(25, 1.5)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert lines == [
        "step 11 of 25: loss 2, 1 steps/s", "step 22 of 25: loss 2, 1 steps/s", "step 25: validation loss 1.5",
    ]  # fmt: skip
