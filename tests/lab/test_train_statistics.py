"""``fp4graph train --statistics``: a run that its report can say everything of, in one command each."""

import json

import pytest
from typer.testing import CliRunner

import fp4graph
from fp4graph.cli import app
from fp4graph.lab import read
from fp4graph.lab.report import PICTURES
from fp4graph.lab.runs.train import Run, train

DIGITS = ["train", "digits", "--policy", "tetrajet", "--optimizer", "adamw", "--validate-every", "9", "--json"]


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_a_training_and_its_report(tmp_path):
    """Statistics change nothing of the training, and the report has every picture."""
    plain = json.loads(command(*DIGITS, "--steps", 12, "--output", tmp_path / "plain"))
    watched = json.loads(command(*DIGITS, "--steps", 12, "--output", tmp_path / "run", "--statistics", 4))
    for name in ("validation_loss", "train_loss", "metrics", "history"):
        assert watched["outcome"][name] == plain["outcome"][name], name
    recorded = read(tmp_path / "run")
    assert recorded.steps == [4, 8, 12]
    assert {row["step"] for row in recorded.rows if row["tensor"] == "weight"} == {12}  # a window at the end
    assert {row["tensor"] for row in recorded.rows} >= {"fprop.input", "wgrad", "output"}
    command("report", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    for part in PICTURES:
        assert f'<section id="{part.__name__}">' in page, part.__name__


@pytest.mark.long
@pytest.mark.slow
def test_in_tensorboard_beside_the_curves(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = Run("digits", policy="tetrajet", optimizer="sgd", steps=4, validate_every=4, device="cpu")
    train(run, directory=tmp_path, statistics=2)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (site,) = {row["site"] for row in read(tmp_path).rows if row["site"].endswith("blocks.0.mlp.fc1")}
    rows = [row for row in read(tmp_path).rows if (row["site"], row["tensor"]) == (site, "fprop.input")]
    got = [(event.step, event.value) for event in events.Scalars(f"snr_db/{site}/fprop.input")]
    assert [step for step, _ in got] == [2, 4]
    assert [value for _, value in got] == pytest.approx([row["snr_db"] for row in rows], rel=1e-4)
    assert "validation_loss" in events.Tags()["scalars"]


@pytest.mark.long
@pytest.mark.slow
def test_a_resumed_run(tmp_path):
    """Goes on recording where the checkpoint is; what was recorded beyond it is recorded anew."""
    run = Run("digits", policy="tetrajet", optimizer="sgd", steps=8, validate_every=4, device="cpu")
    whole = train(run, directory=tmp_path / "whole", statistics=2)

    def stop(step, steps, loss):
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, directory=tmp_path / "run", statistics=2, tick=stop)
    assert read(tmp_path / "run").steps == [2, 4, 6]
    resumed = train(run, directory=tmp_path / "run", statistics=2, resume=True)
    assert resumed.validation_loss == whole.validation_loss
    recorded, expected = read(tmp_path / "run"), read(tmp_path / "whole")
    assert recorded.header["step"] == 4  # though plain SGD counts no steps
    assert recorded.steps == expected.steps == [2, 4, 6, 8]
    # All but what the window that began before the kill would have said, of weights and outputs.
    assert recorded.rows == tuple(row for row in expected.rows if row["tensor"] not in ("weight", "output"))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("task", "policy"), [("text", "mxfp4"), ("digits-diffusion", "nvfp4"), ("gaussian", "mxfp4")])
def test_the_other_families(task, policy, tmp_path):
    """What goes into the model is the task's, noise and timesteps of a diffusion included."""
    small = {"batch_size": 4, "validation_batches": 1, "steps": 2}
    train(Run(task, policy=policy, device="cpu", **small), directory=tmp_path, statistics=2)
    rates = read(tmp_path).series("rate_of_change", tensor="output")["value"]
    assert rates
    assert all(rate > 0 for rate in rates)


@pytest.mark.parametrize("every", [13, 0])
def test_intervals_that_record_nothing(every, tmp_path):
    run = Run("digits", policy="tetrajet", steps=12, device="cpu")
    with pytest.raises(fp4graph.Error, match="give a number from 1 to 12"):
        train(run, directory=tmp_path / "run", statistics=every)
    assert not (tmp_path / "run").exists()


def test_without_a_folder():
    with pytest.raises(fp4graph.Error, match="kept in the folder of the run"):
        train(Run("digits", policy="tetrajet", steps=12, device="cpu"), statistics=5)
