"""Cases of ``make gpu-validate`` in several processes."""

import os
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest

from benchmarks.gpu.run import SPAWN, Case, prepared_together, side_by_side

pytestmark = pytest.mark.process
CPU = SimpleNamespace(type="cpu")  # instead of torch.device("cpu"): each process would import torch for seconds


def check(name):
    if name == "fails":
        raise RuntimeError("wrong")
    if name == "killed":
        os._exit(9)
    return {"name": name}


def timing(name, log, ready):
    check(name)
    note(log, f"prepares {name}")
    if name == "slow":
        time.sleep(60)
    note(log, f"prepared {name}")
    ready()
    note(log, f"begins {name}")
    time.sleep(0.2)
    note(log, f"ends {name}")
    return {"name": name}


def prepare(log):
    # A background job of a shell ignores SIGINT, and so do its processes: restore the default handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    list(prepared_together([Case("steps", {}, partial(timing, "slow", log))], 2))


def note(log, text):
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def test_checks_run_side_by_side_and_the_figures_of_one_that_fails_say_why():
    cases = [Case("kernels", {"name": name}, partial(check, name)) for name in ("a", "fails", "b")]
    outcomes = {case.about["name"]: (figures, works) for case, figures, works in side_by_side(cases, CPU, 2)}
    assert {name: works for name, (_, works) in outcomes.items()} == {"a": True, "fails": True, "b": True}
    assert outcomes["a"][0]["name"] == "a"
    assert outcomes["fails"][0]["failed"] == "RuntimeError: wrong"


def test_a_check_whose_process_is_killed_is_a_failure():
    cases = [Case("kernels", {"name": "killed"}, partial(check, "killed"))]
    ((_, figures, works),) = side_by_side(cases, CPU, 2)
    assert not works
    assert figures["failed"].startswith("BrokenProcessPool")


def test_timings_are_measured_one_at_a_time_when_all_are_prepared(tmp_path):
    log = tmp_path / "log"
    cases = [Case("steps", {"name": name}, partial(timing, name, log)) for name in ("a", "fails", "killed", "b")]
    outcomes = {case.about["name"]: figures for case, figures, _ in prepared_together(cases, 4)}
    lines = log.read_text("utf-8").splitlines()
    assert sorted(lines[:4]) == ["prepared a", "prepared b", "prepares a", "prepares b"]
    assert lines[4:] == ["begins a", "ends a", "begins b", "ends b"]
    assert outcomes["a"]["name"] == "a"
    assert outcomes["b"]["prepared_beside"] == 3
    assert outcomes["fails"]["failed"] == "RuntimeError: wrong"
    assert outcomes["killed"]["failed"] == "its process was killed"


def test_an_interrupted_command_does_not_wait_for_a_preparation(tmp_path):
    log = tmp_path / "log"
    process = SPAWN.Process(target=prepare, args=(log,))
    process.start()
    while not log.exists():
        assert process.is_alive()
        time.sleep(0.02)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(30)
    ended = process.exitcode
    process.kill()
    assert ended == 1
