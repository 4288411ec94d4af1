"""Timing the trainings that a comparison compares, in alternation."""

import itertools
import threading
import time
from unittest.mock import Mock

import pytest
import torch

import fp4graph
from fp4graph.lab.comparison import timing
from tests.lab.trainings import loop

pytestmark = pytest.mark.usefixtures("operation_by_operation")


class Sleeper:
    """A training whose steps take a time that depends on the policy; ``trace`` has the policy of every step."""

    def __init__(self, milliseconds, steps=1000):
        self.milliseconds, self.steps, self.trace, self.running = milliseconds, steps, [], threading.Lock()

    def __call__(self, policy, seed, log):
        for number in range(1, self.steps + 1):
            assert self.running.acquire(blocking=False), "two trainings run at once"
            self.trace.append(policy.name)
            time.sleep(self.milliseconds[policy.name] / 1000)
            self.running.release()
            log(number, 1.0)


def timed(train):
    return timing.timed(train, fp4graph.load_policy("bf16"), fp4graph.load_policy("nvfp4"), 0)


@pytest.mark.slow
def test_times_alternate():
    train = Sleeper({"bf16": 2.0, "nvfp4": 10.0})
    measured = timed(train)
    assert 2 <= measured["baseline_ms_per_step"] < 6
    assert 2 < measured["ratio"] < 6
    assert [name for name, _ in itertools.groupby(train.trace)] == ["bf16", "nvfp4"] * (timing.TURNS + 1)
    assert timed(Sleeper({"bf16": 0.0, "nvfp4": 0.0}, steps=4)) == {}
    with pytest.raises(KeyError, match="nvfp4"):
        timed(Sleeper({"bf16": 0.0}))


@pytest.mark.slow
def test_times_of_a_busy_machine_are_hidden_and_measured_again(tmp_path, monkeypatch):
    """A note says why; the next call measures again, and keeps a steady ratio."""
    monkeypatch.setattr(timing, "timed", measured := Mock())
    for spread, ratio, called in ((0.4, None, 1), (0.1, 3.0, 2), (0.9, 3.0, 2)):
        measured.return_value = {"baseline_ms_per_step": 2.0, "ratio": 3.0, "spread": spread}
        result = fp4graph.compare(loop, "nvfp4", seeds=1, folder=tmp_path, statistics=0)
        assert [row["ratio"] for row in result.rows] == [ratio and 1.0, ratio]
        assert any("spread by 40 %" in note for note in result.notes) == (ratio is None)
        assert measured.call_count == called


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_whatever_ends_a_timed_training_is_raised(error):
    def train(policy, seed, log):
        raise error("done")

    with pytest.raises(error, match="done"):
        timed(train)


def test_times_are_those_of_the_default_device():
    devices = []
    with torch.device("meta"):
        timed(lambda policy, seed, log: devices.append(torch.ones(1).device.type) or log(1, 0.0))
    assert devices == ["meta"] * 2
