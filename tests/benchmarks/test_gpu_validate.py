"""``make gpu-validate``, rehearsed on the CPU."""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch

from benchmarks import results
from benchmarks.gpu import checks, run, steps, validate
from benchmarks.gpu.record import failure, markdown, predictions
from fp4graph.kernels import operators
from tests.gpu.cases import operands
from tests.helpers import processes

CPU = torch.device("cpu")


def rehearse(folder, *arguments):
    """Run the command, and return its exit status, the rows of its file and its page."""
    status = validate.main(["--rehearse", "--backend=eager", f"--folder={folder}", *arguments])
    return status, *stored(folder)


def stored(folder):
    files = list(folder.glob("gpu_validate.*"))
    assert sorted(file.suffix for file in files) == [".json", ".md"]  # and no half-written one
    texts = {file.suffix: file.read_text("utf-8") for file in files}
    return json.loads(texts[".json"])["rows"], texts[".md"]


@pytest.mark.slow
@pytest.mark.compiler
def test_kernels_are_compared_with_tensor_code(tmp_path, monkeypatch):
    """One wrong element is found, and a case that has ended is not run again."""
    status, (row,), page = rehearse(tmp_path, "--part=kernels")
    assert status == 0
    assert row["figures"]["equal"]
    assert len(row["figures"]["differs"]) == 10
    assert row["figures"]["compared"] >= 10 * 7 * 200 * 136  # operators, kinds of values (7 or 8), elements
    assert "1 of 1 cases have the same bits" in page

    quantize = operators.quantize

    def wrong(x, *arguments):
        y = quantize(x, *arguments).clone()
        y[0, 0] = 0 if y[0, 0].isnan() else torch.nan
        return y

    monkeypatch.setattr(operators, "quantize", wrong)
    assert rehearse(tmp_path, "--part=kernels")[1] == [row]
    status, (again,), page = rehearse(tmp_path, "--part=kernels", "--again")
    assert status == 1
    assert not again["figures"]["equal"]
    differing = {name for name, count in again["figures"]["differs"].items() if count}
    assert differing == {"quantize, rows", "quantize, columns"}
    assert "0 of 1 cases have the same bits" in page
    assert f"{again['case']['dtype']}: other bits than expected" in page.partition("## Failed")[2]
    kinds = len(list(operands(checks.SHAPE, next(iter(checks.kernel_specs().values())))))
    assert f"quantize, rows {kinds}, quantize, columns {kinds}\n" in page


@pytest.mark.slow
@pytest.mark.compiler
def test_kernels_that_draw_have_the_bits_of_tensor_code():
    """An element's random bits depend on its place in the quantized matrix: x for rows, its transpose for columns."""
    spec = next(spec for spec in checks.kernel_specs().values() if spec.needs_key)
    figures = checks.kernels(spec, torch.float32, CPU)
    assert figures["equal"], figures["differs"]


@pytest.mark.long
@pytest.mark.inductor
def test_every_part_has_rows_and_a_section(tmp_path):
    status, rows, page = rehearse(tmp_path)
    assert status == 0
    assert {row["case"]["part"] for row in rows} == set(validate.PARTS)
    for heading in ("Kernels beside", "Quantizers that", "Short trainings", "Training steps"):
        assert f"## {heading}" in page
    (parity,) = [row["figures"] for row in rows if row["case"]["part"] == "parity"]
    assert parity["ratio"] == 0  # eager beside eager
    assert parity["ulp"] > 0
    for row in rows:
        if row["case"]["part"] in ("steps", "switches"):
            assert row["figures"]["ratio"] > 1
            assert row["figures"]["compile_seconds"] > 0


@pytest.mark.long
@pytest.mark.inductor
def test_a_training_that_inductor_compiles_is_within_the_bound(tmp_path):
    status, (row,), _ = rehearse(tmp_path, "--part=parity", "--backend=inductor")
    assert status == 0
    assert 0 < row["figures"]["ratio"] <= 3


PARITY = {"ratio": 2.0, "eager": [2.0, 1.0], "compiled": [2.0, 1.5]}


def case(model, run=lambda: dict(PARITY)):
    return validate.Case("parity", {"model": model, "policy": "p", "dtype": "float32"}, run)


fault = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access\nand a page of advice"))


@pytest.fixture
def planned(monkeypatch):
    """Make ``plan(*cases)``: the command then has only these cases. It returns their list, which a test may edit."""

    def plan(*cases):
        made = list(cases)
        monkeypatch.setattr(validate, "cases", lambda *_: iter(made))
        return made

    return plan


def models(rows):
    return [row["case"]["model"] for row in rows]


def test_a_case_that_fails_is_on_the_page_and_tried_again(tmp_path, planned):
    made = planned(case("bad", fault), case("good"))
    status, rows, page = rehearse(tmp_path)
    assert (status, models(rows)) == (1, ["bad", "good"])
    assert "bad, p, float32: RuntimeError: CUDA error: an illegal memory access\n" in page
    assert "| good | float32 | p | 2.00 | 2 | 1 | 1.5 |" in page
    made[:] = [case("bad"), case("good", fault)]
    status, _, page = rehearse(tmp_path)
    assert (status, "Failed" in page) == (0, False)


def test_differences_above_the_bound_are_failures(tmp_path, planned):
    nothing = {"ratio": 0.0, "eager": [2.0, 1.0], "compiled": [2.0, float("nan")]}
    planned(case("far", lambda: {**PARITY, "ratio": 4.0}), case("nan", lambda: nothing), case("near"))
    status, _, page = rehearse(tmp_path)
    assert status == 1
    assert "| far | float32 | p | 4.00 **above 3** | 2 | 1 | 1.5 |" in page
    failed = page.partition("## Failed")[2]
    assert "far, p, float32: 4.00 times an ulp's effect, above 3\n" in failed
    assert "nan, p, float32: losses are not finite\n" in failed
    assert "near" not in failed


def test_other_bits_are_a_failure_unless_they_are_exempt():
    for exempt in (False, True):
        row = {"case": {"part": "quantizers"}, "figures": {"equal": False, "exempt": exempt}}
        assert (failure(row) is None) is exempt


def test_what_failed_or_is_of_another_commit_is_measured_again_after_the_others(tmp_path, planned, monkeypatch):
    ratios = {"a": 1.0, "b": 4.0, "c": 1.0, "new": 1.0}
    runs = {name: Mock(return_value={**PARITY, "ratio": ratio}) for name, ratio in ratios.items()}
    ran = Mock(**runs).mock_calls
    a, b, c, new = (case(name, run) for name, run in runs.items())
    made = planned(a, b, c)
    times = (f"2026-01-01T00:00:{second:02}+00:00" for second in range(60))
    monkeypatch.setattr(results, "now", lambda: next(times))
    monkeypatch.setattr(results, "commit", lambda: {"commit": "one"})
    assert rehearse(tmp_path)[0] == 1
    made.append(new)
    assert rehearse(tmp_path)[0] == 1
    assert ran[3:] == [call.new(), call.b()]
    monkeypatch.setattr(results, "commit", lambda: {"commit": "two"})
    rehearse(tmp_path)
    assert ran[5:] == [call.a(), call.c(), call.new(), call.b()]  # the longest ago first
    monkeypatch.setattr(results, "versions", lambda packages: dict.fromkeys(packages, "another"))
    rehearse(tmp_path)
    assert ran[9:] == [call.a(), call.c(), call.new(), call.b()]


def test_a_case_that_was_killed_is_marked_and_goes_behind_the_others(tmp_path, planned):
    fine = Mock(return_value=dict(PARITY))
    planned(case("killed", Mock(side_effect=KeyboardInterrupt)), case("fine", fine))  # ends the command
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            rehearse(tmp_path)
    fine.assert_called_once()
    (file,) = tmp_path.glob("*.md")
    assert "killed, p, float32: begun and not ended" in file.read_text("utf-8")


def test_a_kill_leaves_the_earlier_figures_of_its_case(tmp_path, planned, monkeypatch):
    made = planned(case("a"))
    rehearse(tmp_path)
    monkeypatch.setattr(results, "commit", lambda: {"commit": "another"})
    made[:] = [case("a", Mock(side_effect=KeyboardInterrupt))]
    with pytest.raises(KeyboardInterrupt):
        rehearse(tmp_path)
    (row,), page = stored(tmp_path)
    assert row["figures"]["eager"] == PARITY["eager"]
    assert "a, p, float32: begun and not ended" in page
    assert "| a | float32 | p | 2.00 | 2 | 1 | 1.5 |" in page
    made[:] = [case("a")]
    status, (row,), page = rehearse(tmp_path)
    assert (status, "Failed" in page, "begun" in row) == (0, False, False)


def test_the_command_ends_if_the_device_no_longer_answers(tmp_path, planned, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    assert run.answers(CPU)
    assert not run.answers(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert run.answers(torch.device("cuda"))
    planned(case("bad", fault), case("good"))
    monkeypatch.setattr(run, "answers", lambda device: False)
    status, rows, _ = rehearse(tmp_path)
    assert (status, models(rows)) == (1, ["bad"])
    said = capsys.readouterr().out
    assert "cpu no longer answers this process: run the same command again" in said
    assert "1 cases are left" in said
    assert models(rehearse(tmp_path)[1]) == ["good", "bad"]  # begins with the other one


def test_cases_begin_only_if_they_fit_into_the_minutes_but_one_always_does(tmp_path, planned, monkeypatch, capsys):
    """Each case takes four minutes: ten minutes hold two, and one minute runs one. Each command continues the last."""
    now = [0.0]

    def run():
        now[0] += 240.0
        return dict(PARITY)

    planned(*(case(name, run) for name in "abcd"))
    monkeypatch.setattr(validate.time, "perf_counter", lambda: now[0])
    for minutes, expected, names in ((10, 3, "ab"), (1, 3, "abc"), (1, 0, "abcd")):
        status, rows, _ = rehearse(tmp_path, f"--minutes={minutes}")
        assert (status, models(rows)) == (expected, [*names])
        left = f"{4 - len(names)} cases are left: run the same command again"
        assert (left in capsys.readouterr().out) == bool(expected)


def test_a_rehearsal_writes_into_a_folder_that_git_ignores():
    ignored = (validate.ROOT / ".gitignore").read_text("utf-8").splitlines()
    figures, rehearsal = validate.FOLDERS
    assert f"/{rehearsal.relative_to(validate.ROOT).parts[0]}/" in ignored
    assert figures == results.RESULTS


def test_a_compiler_and_headers_that_are_missing_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("gcc", "Python.h"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(validate.sysconfig, "get_path", lambda *_: str(tmp_path))
    assert validate._lacks() == []
    monkeypatch.setenv("CC", "another")
    (tmp_path / "Python.h").unlink()
    compiler, headers = validate._lacks()
    assert compiler.startswith("no C compiler (another), which Triton needs: install gcc")
    assert headers.startswith(f"no Python.h in {tmp_path}, which Triton needs: install python3-dev")


@pytest.mark.parametrize(  # status 2, of a missing package, ends the command at once
    ("statuses", "expected", "parts"),
    [("0 0 0 0 0", 0, 5), ("0 3 0 0 0", 3, 5), ("3 1 3 0 0", 1, 5), ("0 137 3 0 0", 1, 5), ("2 2 2 2 2", 2, 1)],
)
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.process
def test_make_runs_all_parts_and_then_fails_if_one_failed(tmp_path, statuses, expected, parts):
    """A script replaces the interpreter: for each part it ends with the next of ``statuses``."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncd {tmp_path}; echo "$4" >> parts; set -- {statuses}; shift $(($(wc -l < parts) - 1)); exit $1\n'
    )
    python.chmod(0o755)
    command = ["make", "gpu-validate", f"GPU_PYTHON={python}"]
    done = subprocess.run(command, cwd=validate.ROOT, capture_output=True, text=True)
    assert (tmp_path / "parts").read_text("utf-8").split() == list(validate.PARTS[:parts])
    assert done.returncode == (2 if expected else 0)  # make ends with 2 for any failure
    assert ("Error" in done.stderr) == bool(expected)
    assert not expected or f"Error {expected}\n" in done.stderr


def test_a_missing_package_or_gpu_ends_the_command_before_its_first_case(tmp_path, monkeypatch, capsys):
    find = validate.util.find_spec
    monkeypatch.setattr(validate.util, "find_spec", lambda name: None if name == "yaml" else find(name))
    assert validate.main(["--rehearse", f"--folder={tmp_path}"]) == 2
    assert "not installed: pyyaml." in capsys.readouterr().out
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert validate.main([f"--folder={tmp_path}"]) == 2
        assert "--rehearse" in capsys.readouterr().out


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("pytest", "typer", "psutil", "cpuinfo")))  # importing these is an error
from benchmarks.gpu import record, validate
assert list(validate.cases(list(validate.PARTS), None, "eager", True, 1.0))
"""


@pytest.mark.slow
@pytest.mark.process
def test_the_command_needs_no_packages_besides_those_that_it_names():
    """docs/gpu.md lists these too."""
    processes.run(processes.python("-c", WITHOUT), cwd=validate.ROOT)


def test_the_prediction_stands_beside_what_was_measured():
    figures = {"ratio": 1.25, "quartiles": [1.2, 1.3], "seconds": 0.05, "peak_bytes": 3 << 30, "compile_seconds": 40.0}
    figures |= {"baseline_peak_bytes": 2 << 30, "baseline_compile_seconds": 20.0}
    figures |= {"busy_seconds": 0.044, "baseline_busy_seconds": 0.04, "repeats": 47, "settled": False}
    timed = {"part": "steps", "model": "deit-base", "policy": "tetrajet", "dtype": "bfloat16", "switch": "default"}
    rows = [{"case": timed, "figures": figures, "commit": "c0ffee00aa11", "date": "2026-01-02T03:04:05+00:00"}]
    machine = {"device": "NVIDIA H200", "python": "3.12.1", "cuda": "12.8", "versions": {"torch": "2.11.0"}}
    block = {"block": "vit-b", "dtype": "bfloat16", "policy": "tetrajet", "card": "H200"}
    predicted = [
        {"case": {**block, "quantizers": "tensor code"}, "figures": {"estimate": 1.68}},
        {"case": {**block, "quantizers": "kernels"}, "figures": {"estimate": 1.18}},
    ]
    page = markdown({"machine": machine, "rows": rows}, predicted)
    cells = "1.25 | 1.20–1.30 ~ | 47 | 1.10 | 1.18 | 50 | 3.00 | 2.00 | 40 | 20"
    line = f"| deit-base | bfloat16 | tetrajet | default | {cells} |"
    assert line in page
    other = {**block, "card": "B200", "quantizers": "kernels"}
    page = markdown({"machine": machine, "rows": rows}, [{"case": other, "figures": {"estimate": 9.0}}, *predicted])
    assert line in page  # the prediction for this card
    page = markdown({"machine": {**machine, "device": "NVIDIA A100"}, "rows": rows}, predicted)
    assert "1.18 (H200)" in page
    found = predictions(results.RESULTS)  # there is a prediction for every model that is timed
    blocks = {row["case"]["block"] for row in found if row["case"]["policy"] == "tetrajet"}
    assert set(steps.PREDICTED.values()) <= blocks


def test_a_page_has_the_figures_that_earlier_versions_stored():
    """The first case of a command writes the page of all rows."""
    contents = results.load(results.RESULTS / "gpu_validate.nvidia-h200.json")
    page = markdown(contents, [])
    assert "| deit-base | bfloat16 | microscaling | default | 1.79 | 1.76–1.84 | 8 |" in page
    assert "| llama-350m | bfloat16 | microscaling | default | 2.39 | 2.30–2.64 ~ | 56 |" in page
    (graphs,) = (line for line in page.splitlines() if "| tetrajet | mode=reduce-overhead |" in line)
    assert graphs.split(" | ")[-4:-2] == ["–", "–"]  # peaks that lacked what a step computes


def test_the_cases_on_a_card_are_those_of_the_page():
    """docs/gpu.md lists parts, with their numbers of cases, and switches."""
    made = [one.name for one in validate.cases(list(validate.PARTS), CPU, "inductor", False, 1.0)]
    steps = [one for one in made if one["part"] == "steps"]
    assert {one["model"] for one in steps} == {"deit-small", "deit-base", "llama-350m"}
    assert {one["dtype"] for one in steps} == {"bfloat16", "float32"}
    policies = {one["policy"] for one in steps}
    assert {"tetrajet", "microscaling", "nvfp4"} <= policies
    assert len(steps) == 3 * 2 * len(policies)
    switches = {one["switch"] for one in made if one["part"] == "switches"}
    page = (validate.ROOT / "docs" / "gpu.md").read_text("utf-8")
    assert switches
    assert f"There are {len(made)} cases" in page
    for part in validate.PARTS:
        assert f"| `{part}` | {sum(one['part'] == part for one in made)} |" in page
    for switch in switches:
        assert switch.partition("=")[2].strip("\"'") in page
        assert switch.partition("=")[0] in page
    assert len({tuple(one.items()) for one in made}) == len(made)


def test_caches_of_compilers_are_gone_when_a_case_ends(tmp_path, monkeypatch):
    seen = []

    def compiles(training):
        Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "kernel.so").touch()

    def peak(*arguments):
        seen.append([str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.so")])
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(steps.Training, "step", compiles)
    monkeypatch.setattr(steps, "_peak", peak)
    with pytest.raises(RuntimeError, match="out of memory"):
        steps.step("trial-stack", "tetrajet", "bfloat16", "default", CPU, "inductor", 1.0)
    assert len(seen[0]) == 1  # there as long as the case runs
    assert not list(tmp_path.iterdir())


def test_options_are_those_of_the_command(tmp_path, monkeypatch):
    """The time limit of a timing, also in a rehearsal; no number of processes below one."""
    seen = []
    monkeypatch.setattr(validate, "cases", lambda *arguments: seen.append(arguments[-1]) or iter(()))
    for options in ([], ["--seconds=3"]):
        assert validate.main(["--rehearse", f"--folder={tmp_path}", *options]) == 0
    assert seen == [0.5, 3.0]
    with pytest.raises(SystemExit) as stop:
        validate.main(["--rehearse", "--jobs=0"])
    assert stop.value.code == 2


def test_after_a_fault_no_case_begins_and_those_that_run_are_recorded(tmp_path, planned, monkeypatch, capsys):
    def two_at_a_time(cases, device, jobs):
        first, second = itertools.islice(cases, 2)
        yield first, {"failed": "a fault of the card"}, False
        yield second, dict(PARITY), True
        yield from ((case, dict(PARITY), True) for case in cases)

    monkeypatch.setattr(validate, "side_by_side", two_at_a_time)
    planned(case("bad"), case("runs"), case("waits"))
    status, rows, page = rehearse(tmp_path, "--jobs=2")
    assert (status, models(rows)) == (1, ["bad", "runs"])
    assert "| runs | float32 | p | 2.00 | 2 | 1 | 1.5 |" in page
    assert "1 cases are left: run the same command again" in capsys.readouterr().out


def test_the_peak_of_a_step_is_not_counted_under_cuda_graphs(monkeypatch):
    monkeypatch.setattr(steps, "synchronize", Mock())
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", Mock())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 << 30)
    found = [steps._peak(Mock(), 1 << 30, torch.device("cuda"), mode) for mode in (None, "reduce-overhead")]
    assert found == [4 << 30, None]
