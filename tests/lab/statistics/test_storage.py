"""What was recorded stays readable: after a kill, a full disk, a resumed training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fp4graph
from fp4graph.lab import read
from fp4graph.lab.statistics.storage import FILE, Log
from tests.helpers.processes import python, run


def row(step, value=1.0, site="a"):
    return {"step": step, "site": site, "tensor": "weight", "value": value}


def write(directory, rows, **header):
    log = Log(directory, {"step": 0, **header})
    for each in rows:
        log.append([each])


def test_written_and_read(tmp_path):
    write(tmp_path, [row(50, 1 / 3), row(100, float("nan")), row(100, 2.0, "b")], policy="p")
    recorded = read(tmp_path)
    assert recorded.header["policy"] == "p"
    assert recorded.steps == [50, 100]
    assert recorded.sites == ["a", "b"]
    assert [r["value"] for r in recorded.rows] == [0.333333, None, 2.0]
    assert recorded.series("value", site="a") == {
        "step": [50],
        "site": ["a"],
        "tensor": ["weight"],
        "value": [0.333333],
    }


def test_the_directory_of_the_run_will_do(tmp_path):
    write(tmp_path / "statistics", [row(1)])
    assert read(tmp_path).rows == read(tmp_path / "statistics" / FILE).rows


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.99])
def test_a_line_that_a_kill_cut_off_is_left_out_and_cut_away(tmp_path, keep):
    write(tmp_path, [row(1), row(2)])
    file = tmp_path / FILE
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][: int(keep * len(lines[-1]))])
    assert read(tmp_path).steps == [1]
    write(tmp_path, [row(3)], step=2)
    assert read(tmp_path).steps == [1, 3]
    for line in file.read_text().splitlines():
        json.loads(line)


KILLED = """
import sys
from fp4graph.lab.statistics.storage import Log
log = Log(sys.argv[1], {"step": 0})
step = 0
while True:
    step += 1
    log.append([{"step": step, "site": "a", "tensor": "weight", "values": list(range(20000))}])
    print(step, flush=True)
"""


@pytest.mark.process
def test_killed_while_writing(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    last = 0
    for line in process.stdout:
        last = int(line)
        if last == 5:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert set(range(1, last + 1)) <= set(read(tmp_path).steps)


def test_a_resumed_training_takes_the_place_of_what_came_after(tmp_path):
    write(tmp_path, [row(50, 1.0), row(100, 1.0), row(150, 1.0)])
    write(tmp_path, [row(100, 2.0)], step=80)
    recorded = read(tmp_path)
    assert [(r["step"], r["value"]) for r in recorded.rows] == [(50, 1.0), (100, 2.0)]


def full_disk(tmp_path, limit):
    """Appends rows under a limit on the size of files, in a process of its own; returns what it printed."""
    code = f"""
import resource, signal, sys
import fp4graph
from fp4graph.lab.statistics.storage import Log
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
log = Log({str(tmp_path)!r}, {{"step": 0}})
try:
    for step in range(1, 1000):
        log.append([{{"step": step, "site": "a", "tensor": "weight", "values": list(range(200))}}])
except fp4graph.Error as error:
    print(step, error)
"""
    return run(python("-c", code))


@pytest.mark.process
@pytest.mark.skipif(os.name != "posix", reason="limits of file sizes are POSIX's")
def test_a_disk_that_fills_up_is_an_error_and_what_was_written_stays(tmp_path):
    said = full_disk(tmp_path, 10_000)
    failed = int(said.split()[0])
    assert "cannot write statistics to" in said
    assert "recorded before is there and readable" in said
    assert read(tmp_path).steps == list(range(1, failed))
    assert (tmp_path / FILE).read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no statistics are in it"),
        ('{"a": 1}\n', "not a line of statistics"),
        ('{"format": "fp4graph.statistics", "version": 99}\n', "another version"),
        ('{"format": "fp4graph.statistics", "version": 1}\n{oops\n', ":2 is not JSON"),
        ('{"format": "fp4graph.statistics", "version": 1}\n[1]\n', ":2: this is not a line"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, text, message):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(fp4graph.Error, match=message):
        read(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(fp4graph.Error, match="no statistics there"):
        read(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(fp4graph.Error, match="cannot write statistics"):
        Log(tmp_path / "taken" / "statistics", {})
