"""Comparing policies: the table, the files that are kept, going on after a kill, several seeds, and bad input."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from fp4graph.errors import Error
from fp4graph.lab import compare as comparing
from fp4graph.lab.compare import PICTURE, RESULTS, Result, compare, table
from fp4graph.lab.runs.run import Run
from fp4graph.lab.runs.train import train
from tests.helpers.policies import one_rule

BRIEF = ["digits", "--batch-size=16", "--steps=7", "--validate-every=7", "--validation-batches=1", "--device=cpu"]


def runs(*policies: str, **options: Any) -> list[Run]:
    brief: dict[str, Any] = {"batch_size": 16, "steps": 2, "validate_every": 1, "validation_batches": 1}
    return [Run(**{"task": "digits", "policy": name, "device": "cpu", **brief, **options}) for name in policies]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs ``fp4graph compare`` in an empty folder: (exit code, stdout, stderr or the error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        from fp4graph.cli import app

        result = CliRunner().invoke(app, ["compare", *arguments])
        if isinstance(result.exception, Error):
            return 1, result.stdout, str(result.exception)
        return result.exit_code, result.stdout, result.stderr

    return call


@pytest.mark.slow
def test_prints_a_table_and_keeps_what_it_found(command: Any, tmp_path: Path) -> None:
    code, out, err = command(*BRIEF, "--policies=bf16", "--policies=tetrajet, tetrajet-qema")
    assert code == 0, err
    assert "digits under tetrajet-qema, seed 0" in err
    folder = tmp_path / "runs" / "compare-digits"
    kept = json.loads((folder / RESULTS).read_text())
    baseline, tetrajet, qema = kept["runs"]
    assert [run["policy"] for run in kept["runs"]] == ["bf16", "tetrajet", "tetrajet-qema"]
    assert [run["complexity"] for run in kept["runs"]] == [0, 0.5, 2.5]
    # Two blocks' qkv, proj, fc1 and fc2 are quantized; the patch convolution, two attentions and the head are not.
    assert [(run["quantized"], run["sites"]) for run in kept["runs"]] == [(0, 12), (8, 12), (8, 12)]
    assert len({run["train_loss"] for run in kept["runs"]}) == 3
    # From the same weights on the same data: near the baseline.
    assert tetrajet["train_loss"] == pytest.approx(baseline["train_loss"], rel=0.1)
    assert {"fp4graph", "torch"} <= qema["versions"].keys()
    lines = {line.split()[0]: line for line in out.splitlines() if line.rstrip().endswith("/12")}
    for run in kept["runs"]:
        assert 0 < run["step_seconds"] < run["seconds"]
        assert lines[run["policy"]].split()[1:] == [
            f"{run['complexity']:g}",
            f"{run['train_loss']:.3f}",
            f"{run['validation_loss']:.3f}",
            f"{100 * run['metrics']['accuracy']:.1f}",
            "%",
            f"{1000 * run['step_seconds']:.1f}",
            f"{run['step_seconds'] / baseline['step_seconds']:.2f}×",
            f"{run['first_step_seconds']:.1f}",
            "s",
            f"{run['quantized']}/12",
        ]
    with Image.open(folder / PICTURE) as picture:
        assert picture.format == "PNG"
        assert picture.width > 600
        picture.load()
    names = ["bf16-0", "comparison.json", "loss.png", "tetrajet-0", "tetrajet-qema-0"]
    assert sorted(file.name for file in folder.iterdir()) == names


@pytest.mark.slow
def test_a_comparison_is_what_train_gives(tmp_path: Path) -> None:
    (result,) = compare(runs("mxfp4"), tmp_path)
    (run,) = runs("mxfp4")
    assert result.outcome["validation_loss"] == train(run).validation_loss


@pytest.mark.slow
def test_goes_on_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = runs("bf16", "tetrajet-qema")
    whole = compare(both, tmp_path / "whole")

    def killed(run: Run, *, report: Any, **options: Any) -> Any:
        def until_the_kill(step: int, loss: float) -> None:
            if run.policy != "bf16":
                raise KeyboardInterrupt

        return train(run, report=until_the_kill, **options)

    with monkeypatch.context() as patch:
        patch.setattr(comparing, "train", killed)
        with pytest.raises(KeyboardInterrupt):
            compare(both, tmp_path / "killed")
    assert len(json.loads((tmp_path / "killed" / RESULTS).read_text())["runs"]) == 1
    with pytest.raises(Error, match="bf16-0 holds a run already"):
        compare(both, tmp_path / "killed")
    with pytest.raises(Error, match="holds another run: lr was"):
        compare(runs("bf16", lr=1.0), tmp_path / "killed", resume=True)
    resumed = compare(both, tmp_path / "killed", resume=True)
    assert [result.outcome["history"] for result in resumed] == [result.outcome["history"] for result in whole]


@pytest.mark.slow
def test_policies_that_do_not_fit_are_all_named_before_the_first_training(command: Any, tmp_path: Path) -> None:
    (tmp_path / "nowhere.yaml").write_text(json.dumps(one_rule(match={"module": "absent.*"}, default="keep")))
    code, _, err = command(*BRIEF, "--policies=bf16,tetrajet,tetrajett,nvfp4-te,nowhere.yaml", "--output=here")
    assert code == 1
    first, *lines = err.splitlines()
    assert first == "3 of the policies cannot train digits, so none was trained:"
    assert "tetrajett: " in lines[0]
    assert "did you mean the shipped policy 'tetrajet'" in lines[0]
    assert "nvfp4-te: " in lines[1]
    assert "Kept: 4 by rule 'first block' (sensitive to quantization), 4 by rule 'last block'" in lines[2]
    assert "nowhere.yaml: " in lines[3]
    assert "matches no site of this model" in lines[3]
    assert not (tmp_path / "here").exists()


@pytest.mark.slow
def test_several_seeds_have_a_mean_and_a_deviation(command: Any, tmp_path: Path) -> None:
    code, out, err = command(
        "digits", "--batch-size=16", "--steps=1", "--validation-batches=1", "--policies=mxfp4", "--seed=3", "--seeds=2"
    )
    assert code == 0, err
    kept = json.loads((tmp_path / "runs" / "compare-digits" / RESULTS).read_text())["runs"]
    losses = [run["validation_loss"] for run in kept]
    assert [run["settings"]["seed"] for run in kept] == [3, 4]
    assert f"{statistics.fmean(losses):.3f} ± {statistics.stdev(losses):.3f}" in out
    assert "2 seeds" in out


def test_a_run_that_diverged_is_a_row_of_the_table() -> None:
    settings = {"task": "gaussian", "batch_size": 1, "accumulate": 1, "autocast": False, "dtype": "bf16",
                "device": "cpu", "backend": "eager"}  # fmt: skip
    history = [{"step": 1, "train_loss": 0.0, "validation_loss": 2.0}]
    outcome = {"complexity": 0.0, "quantized": 0, "sites": 1, "train_loss": None, "validation_loss": None,
               "metrics": {}, "step_seconds": None, "first_step_seconds": 0.1, "history": history}  # fmt: skip
    result = Result("wild", 0, {"settings": settings, "steps": 4}, outcome)
    drawn = table([result])
    assert [next(iter(column.cells)) for column in drawn.columns] == [
        "wild", "0", "diverged", "diverged", "-", "-", "0.1 s", "0/1",
    ]  # fmt: skip


@pytest.mark.slow
def test_prints_json(command: Any, tmp_path: Path) -> None:
    brief = ["digits", "--batch-size=16", "--steps=1", "--validation-batches=1", "--policies=bf16", "--json"]
    code, out, err = command(*brief, "--output=here")
    assert code == 0
    assert err == ""
    assert json.loads(out) == json.loads((tmp_path / "here" / RESULTS).read_text())
    assert math.isfinite(json.loads(out)["runs"][0]["validation_loss"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["digits"], "say which policies to compare"),
        (["digitz", "--policies=bf16"], "unknown task 'digitz'; did you mean"),
        (["digits", "--policies=bf16,tetrajett"], "tetrajett"),
        (["digits", "--policies=bf16,bf16"], "two of the policies are called 'bf16'"),
        (["digits", "--policies=bf16", "--device=abacus"], "device 'abacus' cannot be used"),
        (["digits", "--policies=bf16", "--batch-size=2000"], "batch size 2000 is more than the 1437 training samples"),
        (["imagenet100", "--policies=bf16"], "task 'imagenet100' needs ImageNet-100"),
    ],
)
def test_a_mistake_is_one_sentence(command: Any, tmp_path: Path, arguments: list[str], says: str) -> None:
    code, _, error = command(*arguments)
    assert code != 0
    assert says in error
    assert not list(tmp_path.rglob(RESULTS))
