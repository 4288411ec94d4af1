"""Timing by turns, rows of results, and floors counted by hand."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import typer

from fp4graph import Operand

pytest.importorskip("psutil", reason="benchmarks need the extra 'bench'")
pytest.importorskip("cpuinfo", reason="benchmarks need the extra 'bench'")

from benchmarks import tables, timing
from benchmarks.command import Benchmark, choices, device_of, policies_of
from benchmarks.floor import numel, quantizer_bytes
from benchmarks.models import MODELS, explained, llama_blocks
from benchmarks.processes import Inapplicable
from benchmarks.results import Results, load
from benchmarks.timing import Patience, alternate
from tests.helpers.policies import one_rule


def cycle(log, name, *seconds):
    values = itertools.cycle(seconds)

    def call():
        log.append(name)
        return next(values)

    return call


def test_two_functions_are_timed_by_turns_until_their_ratio_is_settled():
    log = []
    comparison = alternate(cycle(log, "base", 1.0, 2.0), cycle(log, "own", 3.0, 6.1), Patience(60, least=6, most=50))
    assert log == ["base", "own"] * 6
    assert comparison.pairs == ((1.0, 3.0), (2.0, 6.1)) * 3
    assert comparison.quartiles == pytest.approx((3.0, 3.025, 3.05))
    assert (comparison.settled, comparison.baseline, comparison.seconds) == (True, 1.5, pytest.approx(4.55))


def test_a_ratio_that_does_not_settle_ends_at_the_limit_and_says_so():
    comparison = alternate(cycle([], "", 1.0), cycle([], "", 1.0, 1.5), Patience(60, least=3, most=9))
    assert (len(comparison.pairs), comparison.settled) == (9, False)
    assert len(alternate(cycle([], "", 1.0), cycle([], "", 1.0, 2.0), Patience(0.0)).pairs) == 1


def test_functions_are_called_before_they_are_timed_and_short_ones_many_times(monkeypatch):
    """Only the calls move the clock."""
    lasts, calls, now = {"base": 1e-5, "own": 2e-5}, {"base": 0, "own": 0}, 0.0

    def count(name):
        nonlocal now
        calls[name] += 1
        now += lasts[name]

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    options = {"patience": Patience(60, least=1, most=1), "warm_up": 2, "sample": 1e-3}
    comparison = timing.compare(lambda: count("base"), lambda: count("own"), torch.device("cpu"), **options)
    assert list(comparison.pairs) == [pytest.approx((1e-5, 2e-5))]
    # There are two calls to warm up, one to learn the duration, and a millisecond of calls.
    assert calls["base"] == pytest.approx(3 + 100, abs=1)
    assert calls["own"] == pytest.approx(3 + 50, abs=1)


def results(folder):
    return Results("step", {"policies": "all", "folder": Path("anywhere")}, torch.device("cpu"), folder)


@pytest.mark.process
def test_a_row_measured_again_replaces_its_like_and_keeps_the_others(tmp_path):
    first = results(tmp_path)
    first.add({"policy": "a"}, {"ratio": 1.0})
    first.add({"policy": "b"}, {"ratio": 2.0})
    second = results(tmp_path)
    second.add({"policy": "b"}, {"ratio": 3.0})
    content = load(second.file)
    rows = [(row["case"]["policy"], row["figures"]["ratio"], row["run"]) for row in content["rows"]]
    assert rows == [("a", 1.0, "1"), ("b", 3.0, "2")]
    assert content["runs"].keys() == {"1", "2"}
    assert content["machine"].keys() >= {"cpu", "cores", "logical_cores", "threads", "gpu", "ram_gib", "system"}
    lines = [line for line in second.file.read_text().splitlines() if line.startswith('  {"run"')]
    assert [json.loads(line.rstrip(","))["case"]["policy"] for line in lines] == ["a", "b"]  # a line for each
    run = content["runs"]["2"]
    assert run.keys() >= {"date", "commit", "dirty", "versions", "settings", "load_average"}
    assert run["settings"] == {"policies": "all"}
    assert run["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert run["commit"] is None or len(run["commit"]) == 40
    third = results(tmp_path)
    third.add({"policy": "a"}, {"ratio": 4.0})
    assert load(third.file)["runs"].keys() == {"2", "3"}  # nothing is left of the first
    assert {path.name for path in tmp_path.iterdir()} == {first.file.name}


def test_a_case_that_cannot_be_measured_here_leaves_its_earlier_figures(tmp_path):
    results(tmp_path).add({"policy": "a"}, {"ratio": 1.0})
    second = results(tmp_path)
    for policy in "ab":
        second.add({"policy": policy}, {"inapplicable": "not installed"})
    stored = {row["case"]["policy"]: row["figures"] for row in load(second.file)["rows"]}
    assert stored == {"a": {"ratio": 1.0}, "b": {"inapplicable": "not installed"}}
    assert [row["figures"] for row in second.rows] == 2 * [{"inapplicable": "not installed"}]  # what the table shows


@pytest.mark.slow
def test_a_failure_sets_the_exit_code_and_a_case_that_does_not_apply_does_not(tmp_path, capsys):
    def cases(settings, fails: bool = True):
        assert settings.patience.most >= settings.patience.least
        yield {"policy": "a"}, Mock(side_effect=Inapplicable("not installed"))
        if fails:
            yield {"policy": "b"}, Mock(side_effect=ValueError("the compiler\nsaid much"))

    benchmark = Benchmark("step", "Title", (*tables.cases("policy"), *tables.RATIO), cases, without=["seconds"])
    for arguments, code in ((["--no-fails"], 0), (["--no-fails", "--repeats=500"], 0), ([], 1), (["--seconds=1"], 2)):
        with pytest.raises(SystemExit) as stop:
            benchmark.app([f"--folder={tmp_path}", *arguments])
        assert stop.value.code == code
    printed = capsys.readouterr().out
    assert "a: not measured: not installed" in printed
    assert "b: not measured: ValueError: the compiler\n" in printed


@pytest.mark.slow
def test_a_kill_while_writing_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    stored = results(tmp_path)
    stored.add({"policy": "a"}, {"ratio": 1.0})
    before = stored.file.read_bytes()
    monkeypatch.setattr("os.replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        stored.add({"policy": "b"}, {"ratio": 2.0})
    assert stored.file.read_bytes() == before


def test_the_floor_of_six_quantized_operands_is_three_reads_and_six_writes():
    x, w, dy = 5 * 7, 11 * 7, 5 * 11
    assert quantizer_bytes(x, w, dy, 4, frozenset(Operand)) == 4 * 3 * (x + w + dy)
    assert quantizer_bytes(x, w, dy, 2, {Operand.FPROP_INPUT, Operand.FPROP_WEIGHT}) == 2 * 2 * (x + w)
    assert quantizer_bytes(x, w, dy, 2, {Operand.WGRAD_GRAD_OUTPUT}) == 2 * 2 * dy
    assert quantizer_bytes(x, w, dy, 2, set()) == 0


@pytest.mark.slow
def test_the_sites_of_a_model_have_the_elements_of_its_products():
    sites = explained(MODELS["trial-vit"], "tetrajet", 4).sites
    quantized = [numel(site) for site in sites if site.quantized]
    extents = ((68, 64, 192), (68, 64, 64), (68, 64, 256), (68, 256, 64))
    assert quantized[:4] == [(m * k, k * n, m * n) for m, k, n in extents]
    sites = explained(MODELS["trial-vit"], one_rule(op="sdpa"), 4).sites
    site = next(site for site in sites if site.quantized)
    assert numel(site) == (8 * 17 * 32, 8 * 17 * 32, 8 * 17 * 17)  # Q·Kᵀ of 4 images and 2 heads


@pytest.mark.slow
def test_policies_see_the_first_and_the_last_decoder_of_a_stack():
    sites = explained(llama_blocks(64, 128, 2, tokens=16, size=2, depth=3), "nvfp4-te", 2).sites
    assert {site.module.split(".")[1] for site in sites if site.quantized} == {"1"}
    assert {site.module.split(".")[1] for site in sites if site.op == "linear"} == {"0", "1", "2"}


def test_choices_are_checked(tmp_path):
    assert choices("all", "ab") == ["a", "b"]
    assert choices("b, a, b", "ab") == ["b", "a"]
    assert choices("", "ab") == []
    with pytest.raises(typer.BadParameter, match="c: choose from a, b"):
        choices("a,c", "ab")
    with pytest.raises(typer.BadParameter):
        device_of("abacus")
    assert "tetrajet" in policies_of("all")
    file = tmp_path / "my.yaml"
    file.write_text("version: 1\nname: my\nextends: tetrajet\n")
    assert policies_of(f"bf16,{file}") == ["bf16", str(file)]
    with pytest.raises(typer.BadParameter, match="tetrajett"):
        policies_of("bf16,tetrajett")
