"""Comparing policies on a user's training: numbers, record, files, resuming after kills, and bad input."""

import csv
import dataclasses
import functools
import json
import linecache
import math
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.errors import Error
from fp4graph.integrations import runs as trainers
from fp4graph.lab import read
from fp4graph.lab.compare import Comparison
from fp4graph.lab.compare import _policies as policies_of
from fp4graph.lab.comparison import files
from fp4graph.lab.comparison import runs as runs_of
from fp4graph.lab.comparison.record import recording
from fp4graph.lab.comparison.result import paired
from fp4graph.lab.comparison.training import RESERVED, Log
from fp4graph.lab.runs.run import Run
from fp4graph.lab.runs.train import train as train_task
from fp4graph.model.listening import listening
from tests.helpers.policies import one_rule
from tests.helpers.processes import IMPORTS, PATIENCE, python
from tests.helpers.training import operation_by_operation
from tests.lab import trainings
from tests.lab.trainings import STEPS, applied, loop, step

pytestmark = pytest.mark.usefixtures("operation_by_operation")

POLICIES = ["nvfp4", "tetrajet"]
#: The quantile 0.975 of Student's distribution with 2 degrees of freedom, from a printed table.
T_2 = 4.303


@pytest.fixture
def compare(tmp_path):
    return functools.partial(fp4graph.compare, timing=False, folder=tmp_path)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Two policies and the baseline under three seeds, timed."""
    with operation_by_operation():
        return fp4graph.compare(loop, POLICIES, folder=tmp_path_factory.mktemp("compare"), statistics=2)


@functools.cache
def by_hand():
    """Return the losses by policy and seed, from a loop without ``compare``."""
    losses = {}
    for policy in ("bf16", *POLICIES):
        for seed in range(3):
            model, optimizer = applied(policy, seed)
            losses[policy, seed] = [step(model, optimizer).item() for _ in range(STEPS)]
    return losses


def last(policy, seeds=range(3)):
    return [by_hand()[policy, seed][-1] for seed in seeds]


def recorded_runs(folder):
    """Return the runs of the record; a last line that was cut off is left out."""
    file = folder / "runs.jsonl"
    lines = map(json.loads, file.read_text().split("\n")[:-1] if file.exists() else [])
    return [line for line in lines if line.get("kind") == "run"]


def test_losses_are_those_of_a_loop_by_hand(result):
    curves = {(run["policy"], run["seed"]): [loss for _, loss in run["curve"]] for run in result.runs}
    assert curves == by_hand()
    baseline, *others = result.rows
    for row, bits in zip(others, (4.5, 4.25), strict=True):
        differences = [a - b for a, b in zip(last(row["policy"]), last("bf16"), strict=True)]
        half, mean = T_2 * statistics.stdev(differences) / math.sqrt(3), statistics.fmean(differences)
        assert [row["difference"], row["low"], row["high"]] == pytest.approx([mean, mean - half, mean + half], rel=1e-3)
        assert row["loss"] == statistics.fmean(last(row["policy"]))
        assert row["deviation"] == statistics.stdev(last(row["policy"]))
        # The head's 1024 weights of 9216 are kept, and every product has as many FLOPs per weight.
        assert row["fp4_flops"] == pytest.approx(8192 / 9216)
        assert row["bits_per_weight"] == pytest.approx((8192 * bits + 1024 * 16) / 9216)
        assert (row["quantized"], row["sites"], row["square"]) == (4, 5, STEPS**2)
        assert str(row["complexity"]) in (result.folder / "table.csv").read_text()
    assert (baseline["bits_per_weight"], baseline["fp4_flops"], baseline["difference"]) == (16, 0, None)
    assert result.to_frame()["loss"].tolist() == [row["loss"] for row in result.rows]
    in_notebooks = result._repr_html_()
    assert all(f">{cell}<" in in_notebooks for row in result.cells for cell in row.values())
    assert result.verdict.split("\n")[0] in in_notebooks
    assert "<img" in in_notebooks


@pytest.mark.parametrize(
    "train",
    [trainings.generator, pytest.param(trainings.returning, marks=pytest.mark.long)],
    ids=lambda train: train.__name__,
)
def test_a_training_may_yield_or_return_its_losses(compare, train):
    (_, row) = compare(train, "tetrajet", seeds=[1]).rows
    assert (row["loss"], row["square"]) == (*last("tetrajet", [1]), STEPS**2)


@pytest.mark.long
@pytest.mark.parametrize("applies", ["callback", "factory", "compare"])
def test_a_trainer_of_transformers_is_run(compare, tmp_path, applies):
    """The policy is applied by a callback of the Trainer, by the function that makes the Trainer, or by compare."""
    transformers = pytest.importorskip("transformers")
    from fp4graph.integrations import FP4GraphCallback

    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    data = [{"x": row, "labels": row.roll(1)} for row in x]

    def make(policy, seed, log):
        options = {"per_device_train_batch_size": 8, "max_steps": 6, "logging_steps": 2, "report_to": []}
        arguments = transformers.TrainingArguments(
            str(tmp_path / "trainer"), **options, use_cpu=True, seed=seed, save_strategy="no", disable_tqdm=True
        )
        callbacks = [FP4GraphCallback(policy, seed=seed, backend="eager")] if applies == "callback" else []
        net = trainings.Net()
        if applies == "factory":
            fp4graph.apply(net, policy, seed=seed, backend="eager")
        return transformers.Trainer(net, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)

    trainer = make("tetrajet", 0, None)
    compared = compare(make, "tetrajet", seeds=1, folder=tmp_path / "out")
    row, (run,) = compared.rows[1], compared.of("tetrajet")
    assert row["quantized"] == 4
    assert [number for number, _ in run["curve"]] == [2, 4, 6]
    assert 0 < row["loss"] < run["curve"][0][1]  # the loss of the evaluation
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("data", "metrics", "says"),
    [
        ({"a": [], "b": []}, {}, "evaluates on the datasets a, b, and compare needs one loss: give one eval_dataset"),
        ([], {"eval_runtime": 1.0}, "evaluation has no eval_loss, only eval_runtime; give eval_dataset labels"),
    ],
    ids=["two datasets", "no labels"],
)
def test_a_trainer_without_one_loss_is_refused(data, metrics, says):
    transformers = pytest.importorskip("transformers")
    trainer = Mock(spec=transformers.Trainer, model=nn.Linear(2, 2), eval_dataset=data)
    trainer.evaluate.return_value = metrics
    with pytest.raises(Error, match=says):
        trainers._hugging_face(trainer, fp4graph.load_policy("bf16"), 0, Mock())
    assert trainer.train.called == isinstance(data, list)  # several datasets are refused before the training


@pytest.mark.long
def test_a_trainer_of_lightning_is_run(compare, tmp_path):
    lightning = pytest.importorskip("lightning", reason="needs fp4graph[clients]")

    class Module(lightning.LightningModule):
        def __init__(self, policy, seed):
            super().__init__()
            self.net, self.prepared = applied(policy, seed)

        def training_step(self, batch, index):
            return self.net(batch)["loss"]

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(batch)["loss"])

        def configure_optimizers(self):
            return self.prepared

    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randn(32, 32, generator=torch.Generator()), batch_size=8)

        val_dataloader = train_dataloader

    def make(policy, seed, log):
        silent = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, **silent)
        return trainer, Module(policy, seed), Data()

    (run,) = compare(make, "tetrajet", seeds=1, folder=tmp_path / "out").of("tetrajet")
    assert [number for number, _ in run["curve"]] == list(range(1, 9))
    assert run["loss"] != run["curve"][-1][1]  # it is the loss of the validation


@pytest.mark.long
def test_a_failed_and_a_diverged_run_are_recorded_and_the_others_go_on(compare, tmp_path):
    broken = [True]

    def train(policy, seed, log):
        model, optimizer = applied(policy, seed)
        for number in range(1, STEPS + 1):
            loss = step(model, optimizer).item()
            if policy.name == "nvfp4" and broken and number == 3:
                raise ZeroDivisionError("the user's own")
            log(number, math.nan if policy.name == "tetrajet" and number == 5 and seed else loss)
        return loss

    result = compare(train, POLICIES, seeds=2)
    _, nvfp4, tetrajet = result.rows
    assert [row["finished"] for row in result.rows] == [2, 0, 1]
    assert tetrajet["diverged"] == [[1, 5]]
    assert re.search(r"ZeroDivisionError: the user's own.*test_compare.py:\d+", nvfp4["failed"][0][1])
    traceback = (tmp_path / "nvfp4-0" / "traceback.txt").read_text("utf-8")
    assert traceback.endswith("ZeroDivisionError: the user's own\n")
    assert 'raise ZeroDivisionError("the user' in traceback
    assert "tetrajet: the difference is" in result.verdict
    assert "Its loss became NaN or infinite in 1 of 2 runs: seed 1 at step 5." in result.verdict
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "nvfp4: It failed in 2 of 2 runs: ZeroDivisionError: the user&#39;s own" in page
    broken.clear()  # a failed run is tried again, the others are not
    before = len(recorded_runs(tmp_path))
    assert compare(train, POLICIES, seeds=2).rows[1]["finished"] == 2
    assert len(recorded_runs(tmp_path)) == before + 2
    assert not (tmp_path / "nvfp4-0" / "traceback.txt").exists()


def test_a_run_that_fails_before_its_first_loss_has_no_curve(tmp_path):
    """The log of the former attempt stays: the training may resume from a checkpoint that it wrote itself."""
    losses = iter([2.0])

    def train(policy, seed, log):
        for loss in losses:
            log(1, loss)
        raise ZeroDivisionError

    policy = fp4graph.load_policy("bf16")
    lines = [runs_of.train_once(train, policy, 0, tmp_path) for _ in range(2)]
    attempts = [(line["state"], line["step"], line["curve"]) for line in lines]
    assert attempts == [("failed", 1, [(1, 2.0)]), ("failed", 0, [])]
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n'


@pytest.mark.parametrize(
    ("curves", "difference"),
    [
        (([(1, 3.0), (2, 2.0)], [(1, 3.5), (2, 1.0)]), [0.5, -1.0]),
        (([(1, 3.0), (2, None)], [(1, 3.5), (2, 1.0)]), [0.5]),  # a loss that is not finite
        (([(1, 3.0), (2, 2.0)], [(2, 3.5), (4, 1.0)]), None),  # means over other steps
        (([(1, 3.0)], [(1, 3.5), (2, 1.0)]), None),
    ],
)
def test_only_curves_at_the_same_steps_are_subtracted(curves, difference):
    policies = tuple(map(fp4graph.load_policy, ("bf16", "nvfp4")))
    runs = tuple(
        {"policy": policy.name, "seed": 0, "state": "finished", "curve": curve}
        for policy, curve in zip(policies, curves, strict=True)
    )
    picture = files.losses(Comparison(Path(), "training", "bf16", policies, (0,), runs, {}))
    drawn = [line for axes in picture.axes[1:] for line in axes.lines if line.get_label() == "nvfp4"]
    assert [list(line.get_ydata()) for line in drawn] == ([] if difference is None else [difference])


@pytest.mark.parametrize(
    ("train", "options", "says"),
    [
        (lambda policy, seed: 0, {}, r"calls .*<lambda> as train\(policy, seed, log\): too many positional arguments"),
        ("digits", {}, r"calls a function as train\(policy, seed, log\); got 'digits'"),
        (loop, {"policies": ["tetrajett"]}, "tetrajett.*did you mean the shipped policy 'tetrajet'"),
        *((loop, {"seeds": seeds}, "seeds must be a number of at least 1") for seeds in (0, [], [1, 1], [-1], [1.5])),
    ],
)
def test_an_invalid_call_begins_nothing(tmp_path, train, options, says):
    with pytest.raises(Error, match=says):
        fp4graph.compare(train, **{"policies": "tetrajet", **options}, timing=False, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def unreadable(file):
    raise RuntimeError(f"cannot read {file}")


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (lambda: nn.Linear(2, 2)(torch.ones(3)), r"\(.*test_compare\.py:\d+\)$"),
        (lambda: "text", "a loss must be a number or a tensor with one element; got str"),
        (lambda: unreadable(os.fsdecode(b"no-\xff")), r"Error: cannot read no-\\udcff \("),
    ],
    ids=["names the line", "text", "a name that is not UTF-8"],
)
def test_a_failed_run_says_why(compare, end, says):
    failed = compare(lambda policy, seed, log: step(*applied(policy, seed)) and end(), "tetrajet", seeds=1)
    assert re.search(says, failed.rows[0]["failed"][0][1])
    assert "tetrajet: It failed in 1 of 1 runs" in failed.verdict
    assert "Only 0 of 1 runs of the baseline bf16 finished." in failed.verdict


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (lambda policy, seed, log: step(*applied(policy, seed)) and None, "neither returned nor logged a loss"),
        (lambda policy, seed, log: log(1, 1.0), "never called fp4graph.apply"),
        (
            lambda policy, seed, log: log(1, step(*applied(policy, seed)), difference=0.5),
            "a metric cannot be called 'difference', as a column of compare's tables is; rename the metric",
        ),
        (lambda policy, seed, log: {"loss": step(*applied(policy, seed)), "Ω": 1.0}, "cannot be called 'Ω'"),
    ],
    ids=["no loss", "no apply", "a logged column", "a returned column"],
)
def test_a_training_that_cannot_be_compared(compare, tmp_path, train, says):
    with pytest.raises(Error, match=says):
        compare(train, "tetrajet")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.captured
def test_policies_that_do_not_fit_are_all_named_before_the_first_training(compare, tmp_path):
    nowhere = one_rule(match={"module": "absent.*"}, default="keep") | {"name": "nowhere"}
    late = {**one_rule(), "name": "late", "phases": [{"at": 4, "rules": nowhere["rules"]}]}
    with pytest.raises(Error) as caught:
        compare(loop, ["tetrajet", "nvfp4-te", nowhere, late])
    first, _, text = str(caught.value).partition("\n")
    assert first == "3 of the policies cannot train this model, so nothing was trained:"
    assert re.search(r"nvfp4-te: .*\n.*Kept: 2 by rule 'first block'.*2 by rule 'last block'", text)
    assert "nowhere: rule 'all': no module of the model is called 'absent.*'" in text
    assert "  late: " in text
    assert "tetrajet: " not in text
    assert not (tmp_path / "bf16-0").exists()


@pytest.mark.captured
def test_a_policy_that_joins_finished_runs_and_does_not_fit_is_named(compare):
    compare(loop, "nvfp4", seeds=1)
    nowhere = one_rule(match={"module": "absent.*"}, default="keep")
    with pytest.raises(Error, match=r"1 of the policies cannot train this model.*\n  nowhere: rule 'all': no module"):
        compare(loop, ["nvfp4", nowhere | {"name": "nowhere"}], seeds=1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*was called by itself:fp4graph.errors.PolicyWarning")
def test_a_model_that_is_called_by_its_parts_is_trained_unchecked(compare):
    def train(policy, seed, log):
        model, _ = applied(policy, seed)
        log(1, model.blocks(torch.randn(4, 32)).sum())

    result = compare(train, "tetrajet", seeds=1)
    assert "policy 'tetrajet' was not checked before the training" in result.notes[1]
    assert math.isfinite(result.rows[1]["loss"])


@pytest.mark.long
def test_a_stopped_comparison_goes_on_and_takes_further_policies_but_no_other_training(compare, tmp_path):
    began = []

    def train(policy, seed, log):
        model, _ = applied(policy, seed)
        model(torch.randn(16, 32))
        began.append((policy.name, seed))
        if len(began) == 3:
            raise KeyboardInterrupt
        loop(policy, seed, log)

    with pytest.raises(KeyboardInterrupt):
        compare(train, "tetrajet", seeds=2)
    assert "2 of 4 runs" in " ".join((tmp_path / "report.html").read_text("utf-8").split())
    with (tmp_path / "runs.jsonl").open("ab") as file:
        file.write(b'{"kind": "run", "policy": "tetra')  # as a kill leaves it
    whole = compare(train, "tetrajet", seeds=2)
    assert began[2] == began[3]
    assert len(began) == 5
    assert [run["loss"] for run in whole.of("tetrajet")] == last("tetrajet", range(2))
    compare(train, "mxfp4,tetrajet", seeds=2)
    assert began[5:] == [("mxfp4", 0), ("mxfp4", 1)]

    with pytest.raises(Error, match=r"holds a comparison of .*train, not of .*:loop; give another folder"):
        compare(loop, POLICIES)
    edited = fp4graph.load_policy("mxfp4").to_yaml().replace("name: mxfp4", "name: tetrajet")
    (tmp_path / "edited.yaml").write_text(edited)
    with pytest.raises(Error, match="runs of policy 'tetrajet' from before the policy was edited"):
        compare(train, str(tmp_path / "edited.yaml"))
    with recording(tmp_path, train, []), pytest.raises(Error, match=r"in use by process \d+ on .*; wait until it ends"):
        compare(train, POLICIES)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[2]", r"runs\.jsonl:2 is not an object; it was damaged"),
        ('{"kind": "timing"}', r"runs\.jsonl:2 is not a line of a comparison"),
        ('{"kind": "run", "policy": "nvfp4"}', r"runs\.jsonl:2 is not a line of a comparison"),
    ],
)
def test_a_damaged_record_is_an_error(compare, tmp_path, line, says):
    header = {"format": "fp4graph.comparison", "version": 1}
    (tmp_path / "runs.jsonl").write_text(f"{json.dumps(header)}\n{line}\n")
    with pytest.raises(Error, match=says):
        compare(loop, "nvfp4")


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_twenty_kills_lose_nothing_and_repeat_nothing(tmp_path, processes):
    folder, draw = tmp_path / "out", random.Random(processes)
    command = python("-m", "tests.lab.trainings", folder, str(processes))
    environment = {**os.environ, **IMPORTS, "OMP_NUM_THREADS": "1"}
    kills, recorded, began = 0, set(), 0

    def size(file):
        return file.stat().st_size if file.exists() else 0

    while True:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        # Half of the kills fall into the start and the check of the policies. The other half fall into the trainings,
        # after the second has begun, so that the first is recorded.
        watched = folder / ("ledger" if kills % 2 else "runs.jsonl")
        least, deadline = size(watched) + (len("tetrajet 19\n") if kills % 2 else 0), time.monotonic() + PATIENCE
        while process.poll() is None and size(watched) <= least:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.6))
        if kills < 20:
            process.send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=PATIENCE)
        ledger = (folder / "ledger").read_text().split("\n")[:-1] if (folder / "ledger").exists() else []
        again = {(policy, int(seed)) for policy, seed in map(str.split, ledger[began:])} & recorded
        assert not again, f"{again} began again after it was recorded"
        done = [(line["policy"], line["seed"]) for line in recorded_runs(folder)]
        assert len(done) == len(set(done)), "a run is recorded twice"
        assert recorded <= set(done), "a recorded run is lost"
        recorded, began = set(done), len(ledger)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, out.decode()
        kills += 1
    assert kills == 20
    assert recorded == {(policy, seed) for policy in ("bf16", "mxfp4", "tetrajet") for seed in range(20)}


@pytest.mark.long
@pytest.mark.process
def test_several_processes_give_the_losses_of_one(compare, tmp_path):
    runs = compare(loop, POLICIES, processes=2).runs
    assert {(run["policy"], run["seed"]): run["loss"] for run in runs} == {k: v[-1] for k, v in by_hand().items()}
    with pytest.raises(Error, match="processes= needs a train"):
        compare(lambda policy, seed, log: 0.0, POLICIES, folder=tmp_path / "other", processes=2)


def test_a_resumed_training_continues_its_log(tmp_path):
    killed = Log(tmp_path, lambda step, loss: None)
    for number in range(1, 6):
        killed(number, torch.tensor(float(number)), **({"square": number**2} if number % 2 == 0 else {}))
    resumed = Log(tmp_path, lambda step, loss: None)
    assert resumed.metrics == {"square": 16.0}  # of a training that was killed after its last step
    resumed(4, 40.0)
    assert resumed.points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert resumed.metrics == {"square": 4.0}
    again = Log(tmp_path, lambda step, loss: None)
    assert (again.points, again.metrics) == (resumed.points, resumed.metrics)
    again(1, 1.0)
    assert again.metrics == {}


def test_a_full_disk_leaves_the_log_of_a_resumed_training_whole(tmp_path, monkeypatch):
    log = Log(tmp_path, lambda step, loss: None)
    for number in range(200):
        log(number, 1.0)
    before, limits = (tmp_path / "log.jsonl").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
        with pytest.raises(Error, match="cannot write"):
            Log(tmp_path, lambda step, loss: None)(200, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "log.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_listener_hears_only_its_context_and_its_thread():
    heard = []
    listener = SimpleNamespace(applied=heard.append, prepared=lambda model, optimizer: heard.append(type(optimizer)))
    with listening(listener):
        model, _ = applied("bf16", 0)
        other = threading.Thread(target=applied, args=("bf16", 0))
        other.start()
        other.join()
    applied("bf16", 0)
    assert heard == [model, torch.optim.AdamW]


@pytest.mark.parametrize("count", [2, 5])
def test_the_interval_is_scipys(count):
    stats = pytest.importorskip("scipy.stats")
    draws = torch.randn(count, generator=torch.Generator().manual_seed(count)).double().tolist()
    mean, half = paired(draws)
    low, high = stats.ttest_1samp(draws, 0.0).confidence_interval(0.95)
    assert [mean - half, mean + half] == pytest.approx([low, high])
    assert paired(draws[:1]) == (draws[0], None)


def made(losses, folder=Path("out")):
    model = {"sites": 5, "quantized": 4, "fp4_flops": 0.8, "bits_per_weight": 5.8}
    runs = [
        {"policy": name, "seed": seed, "state": "finished", "loss": loss, "metrics": {}, "ms_per_step": 2.0,
         "model": model, "note": None, "error": None, "step": 9, "curve": [[1, 30.0], [9, loss]]}
        for name, values in losses.items() for seed, loss in enumerate(values)
    ]  # fmt: skip
    policies = tuple(fp4graph.load_policy(name) for name in losses)
    seeds = tuple(range(max(map(len, losses.values()))))
    return Comparison(folder, "a & b", "bf16", policies, seeds, tuple(runs), {})


LOWEST = r"^Among the policies beside bf16, tetrajet has the lowest loss \(\+0\."


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([[1.2, 1.31, 1.1]], r"nvfp4: its loss is higher by 0\.103 \(95 % interval \+0\.089 to \+0\.118, 3 seeds\)\."),
        ([[0.9, 1.0, 0.8]], r"nvfp4: its loss is lower by 0\.2 \(95 % interval"),
        ([[1.0, 1.4, 0.8]], r"nvfp4: 3 seeds are too few to tell it from bf16: the difference is -0\.03 \(95 % int"),
        ([[1.1, 1.2, 1.0]], r"nvfp4: its losses equal the baseline's, in all 3 seeds\."),
        ([[1.3]], r"nvfp4: the difference is \+0\.2, and one seed cannot show whether that is chance"),
        (
            [[1.5, 1.61, 1.39], [1.2, 1.31, 1.09]],
            rf"{LOWEST}1\)\. The loss of every other policy is measurably higher\.\n",
        ),
        ([[1.2, 1.31, 1.09], [1.18, 1.32, 1.08]], rf"{LOWEST}.*These seeds cannot tell it from nvfp4\.\n"),
    ],
    ids=["higher", "lower", "unclear", "equal", "one", "ranked", "unranked"],
)
def test_the_verdict(others, says):
    assert re.search(says, made({"bf16": [1.1, 1.2, 1.0], **dict(zip(POLICIES, others, strict=False))}).verdict)


def test_the_page_is_whole_and_refers_to_nothing_outside(result):
    text = (result.folder / "report.html").read_text("utf-8")
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", text)
    assert "width=device-width" in text
    for part in (*(f'data-label="policy">{row["policy"]}</td>' for row in result.rows), *result.verdict.splitlines()):
        assert part in text
    recorded = read(result.folder / "tetrajet-0")
    assert recorded.steps == [2, 4, 6, 8]
    final = [row for row in recorded.rows if row["step"] == 8 and row.get("snr_db") is not None]
    assert all("limit_blocks" in row for row in final)  # which a diagnosis of a low SNR needs
    lowest = min(final, key=lambda row: row["snr_db"])
    assert f"<td>{lowest['site']}</td>" in text
    assert f"{lowest['snr_db']:.1f} dB" in text
    assert not (result.folder / "tetrajet-1" / "statistics").exists()


def test_the_names_of_all_columns_are_reserved():
    result = made({"bf16": [0.1]})
    untimed = dataclasses.replace(result, timings={"nvfp4": {"baseline_ms_per_step": 2.0}})
    assert {*result.rows[0], *untimed.cells[0], "step"} == RESERVED


@pytest.mark.slow
def test_the_files_parse(tmp_path):
    result = made({"bf16": [0.11, 0.12, 0.1], "nvfp4": [0.2, 0.3, 0.1], "mxfp4": []}, tmp_path)
    files.write_all(result)
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text("utf-8").splitlines()))
    assert [float(row["loss"]) for row in rows[:2]] == pytest.approx([0.11, 0.2])
    assert (rows[2]["loss"], rows[1]["finished"], rows[1]["diverged"]) == ("", "3", "0")
    begin, _, head, _, *body, _, end = (tmp_path / "table.tex").read_text("utf-8").splitlines()
    assert (begin[:15], end) == (r"\begin{tabular}", r"\end{tabular}")
    columns = begin.count("r", 15)
    assert all(len(re.findall(r"(?<!\\)&", line)) == columns and line.endswith(r" \\") for line in (head, *body))
    assert r"80\%" in body[1]
    assert ElementTree.parse(tmp_path / "loss.svg").getroot().tag.endswith("svg")
    comments = (tmp_path / "loss.svg").read_text("utf-8")
    texts = {"<!-- 0.1 -->", "<!-- 10 -->", "<!-- loss (log scale) -->", "<!-- minus bf16 -->"}
    assert texts <= set(re.findall("<!-- .* -->", comments))
    assert "10^" not in comments  # no powers of ten on the axis
    assert (tmp_path / "loss.pdf").read_bytes().startswith(b"%PDF")
    assert "a &amp; b" in (tmp_path / "report.html").read_text("utf-8")
    assert r"a\_b\&c" in files.as_tex([{"a_b&c": "1"}])


def test_curves_are_thinned_to_means():
    points = [(number, float(number)) for number in range(1, 1001)]
    thin = runs_of.thinned(points)
    assert (len(thin), thin[0], thin[-1]) == (200, (5, 3.0), (1000, 998.0))
    assert runs_of.thinned(points[:7]) == points[:7]


BRIEF = {"batch_size": 16, "steps": 2, "validate_every": 1, "validation_batches": 1, "device": "cpu"}


@pytest.mark.captured
@pytest.mark.long
def test_the_command_compares_a_task(command, tmp_path):
    words = ["compare", "digits", *(f"--{name.replace('_', '-')}={value}" for name, value in BRIEF.items())]
    words += ["--no-timing", "--seeds=1"]
    code, out, err = command(*words, "--policies=bf16, mxfp4")
    assert code == 0, err
    ended = [f"{name}, seed 0: finished, loss" for name in ("bf16", "mxfp4")]
    assert [line.rpartition(" ")[0] for line in err.splitlines()] == ended
    folder = tmp_path / "runs" / "compare-digits"
    (run,) = [run for run in recorded_runs(folder) if run["policy"] == "mxfp4"]
    alone = train_task(Run("digits", "mxfp4", **BRIEF))
    assert run["loss"] == alone.validation_loss
    assert run["metrics"] == {"accuracy": alone.metrics["accuracy"], "train_loss": alone.train_loss}
    # Two blocks' qkv, proj, fc1 and fc2 are quantized; the patch convolution, two attentions and the head are not.
    lines = {line.split()[0]: line.split() for line in out.splitlines() if "/12" in line}
    assert {name: words[-2:] for name, words in lines.items()} == {"bf16": ["0/12", "1"], "mxfp4": ["8/12", "1"]}
    assert f"{alone.validation_loss:.4g}" in lines["mxfp4"]
    assert f"page: {folder / 'report.html'}" in out
    assert json.loads(command(*words, "--policies=mxfp4", "--json").out)["rows"][1]["loss"] == alone.validation_loss
    assert "its settings were changed" in command(*words, "--lr=1", "--policies=mxfp4").err


@pytest.mark.captured
@pytest.mark.long
def test_the_command_fails_with_the_users_function_and_goes_on_once_the_function_is_mended(command, tmp_path):
    """While all runs have failed, an edited function is not refused as another training."""
    source = "from tests.lab.trainings import loop\n\ndef fn(policy, seed, log):\n    return loop(policy, seed, log)"
    words = "--train=mine:fn", "--policies=tetrajet", "--seeds=2", "--seed=1", "--no-timing", "--output=runs/mended"
    for text, status in ((source + " / 0\n", 1), (source + "\n", 0)):
        (tmp_path / "mine.py").write_text(text)
        linecache.checkcache()
        code, out, err = command("compare", *words)
        assert code == status, err
        assert ("4 of 4 runs failed; the same command repeats them" in err) == bool(status)
        sys.modules.pop("mine")
    losses = last("tetrajet", [1, 2])
    assert f"{statistics.fmean(losses):.4g} ± {statistics.stdev(losses):.2g}" in out
    assert "bf16-1" in {path.name for path in (tmp_path / "runs/mended").iterdir()}
    diagnosis = fp4graph.lab.diagnose(tmp_path / "runs/mended/tetrajet-1", tmp_path / "runs/mended/bf16-1")
    assert diagnosis.baseline is False  # the losses of both are in their logs


@pytest.mark.long
@pytest.mark.parametrize(("train", "noted"), [(lambda policy, seed, log: loop(policy, 7, log), True), (loop, False)])
def test_a_training_that_sets_one_seed_for_all_is_noted(compare, train, noted):
    notes = compare(train, "mxfp4", seeds=2, statistics=0).notes
    assert ["bf16 has the same loss under every seed" in note for note in notes] == [True] * noted


@pytest.mark.parametrize("policy", [Path("policies/mxfp4.yaml"), fp4graph.load_policy("mxfp4"), {"extends": "mxfp4"}])
def test_one_policy_needs_no_list(policy):
    given = {"version": 1, "name": "mxfp4", **policy} if isinstance(policy, dict) else policy
    assert [each.name for each in policies_of(given, "bf16")] == ["bf16", "mxfp4"]


@pytest.mark.long
@pytest.mark.process
def test_a_script_without_a_guard_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import fp4graph, sys\nfrom tests.lab.trainings import loop\n"
        "fp4graph.compare(loop, 'mxfp4', seeds=2, folder=sys.argv[1], processes=2, timing=False)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        python(script, tmp_path / "out"), env=environment, capture_output=True, text=True, timeout=600
    )
    assert "call compare under if __name__ == '__main__':" in done.stderr
