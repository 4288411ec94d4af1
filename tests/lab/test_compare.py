"""Comparing policies on a user's training: the numbers, the record, the files, going on after kills, and bad input."""

from __future__ import annotations

import csv
import functools
import json
import linecache
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fp4graph
from fp4graph.errors import Error
from fp4graph.lab import read
from fp4graph.lab.compare import Comparison
from fp4graph.lab.comparison import files, timing
from fp4graph.lab.comparison import runs as runs_of
from fp4graph.lab.comparison.record import recording
from fp4graph.lab.comparison.result import paired
from fp4graph.lab.comparison.training import Log
from fp4graph.lab.runs.run import Run
from fp4graph.lab.runs.train import train as train_task
from fp4graph.model.listening import listening
from tests.helpers.policies import one_rule
from tests.helpers.processes import IMPORTS, PATIENCE
from tests.lab import trainings
from tests.lab.trainings import STEPS, applied, loop, step

POLICIES = ["nvfp4", "tetrajet"]
#: The quantile 0.975 of Student's distribution with 2 degrees of freedom, from a printed table.
T_2 = 4.303

compare = functools.partial(fp4graph.compare, timing=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Two policies and the baseline under three seeds, timed."""
    return fp4graph.compare(loop, POLICIES, folder=tmp_path_factory.mktemp("compare"), statistics=2)


@functools.cache
def by_hand():
    """The losses of each policy and seed, in a loop without compare."""
    losses = {}
    for policy in ("bf16", *POLICIES):
        for seed in range(3):
            model, optimizer = applied(policy, seed)
            losses.setdefault(policy, []).append([step(model, optimizer).item() for _ in range(STEPS)])
    return losses


@pytest.mark.slow
def test_losses_are_those_of_a_loop_by_hand(result):
    found = {(run["policy"], run["seed"]): [loss for _, loss in run["curve"]] for run in result.runs}
    assert found == {(policy, seed): losses for policy, own in by_hand().items() for seed, losses in enumerate(own)}
    baseline, nvfp4, tetrajet = result.rows
    last = {policy: [losses[-1] for losses in own] for policy, own in by_hand().items()}
    for row in (nvfp4, tetrajet):
        differences = [a - b for a, b in zip(last[row["policy"]], last["bf16"], strict=True)]
        half = T_2 * statistics.stdev(differences) / math.sqrt(3)
        mean = statistics.fmean(differences)
        assert [row["difference"], row["low"], row["high"]] == pytest.approx([mean, mean - half, mean + half], rel=1e-3)
        assert row["loss"] == statistics.fmean(last[row["policy"]])
        assert row["deviation"] == statistics.stdev(last[row["policy"]])
        # The head's 1024 weights of 9216 are kept, and every product has as many FLOPs per weight.
        assert row["fp4_flops"] == pytest.approx(8192 / 9216)
        assert (row["quantized"], row["sites"], row["square"]) == (4, 5, STEPS**2)
        assert str(row["complexity"]) in (result.folder / "table.csv").read_text()
    assert nvfp4["bits_per_weight"] == pytest.approx((8192 * 4.5 + 1024 * 16) / 9216)
    assert tetrajet["bits_per_weight"] == pytest.approx((8192 * 4.25 + 1024 * 16) / 9216)
    assert (baseline["bits_per_weight"], baseline["fp4_flops"], baseline["difference"]) == (16, 0, None)
    assert result.to_frame()["loss"].tolist() == [row["loss"] for row in result.rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [trainings.generator, pytest.param(trainings.returning, marks=pytest.mark.long)],
    ids=lambda train: train.__name__,
)
def test_a_training_may_yield_or_return_its_losses(tmp_path, train):
    (_, row) = compare(train, "tetrajet", seeds=[1], folder=tmp_path).rows
    assert (row["loss"], row["square"]) == (by_hand()["tetrajet"][1][-1], STEPS**2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("applies", [True, False], ids=["applied", "plain"])
def test_a_trainer_is_run(tmp_path, applies):
    transformers = pytest.importorskip("transformers")
    from fp4graph.integrations import FP4GraphCallback

    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    data = [{"x": row, "labels": row.roll(1)} for row in x]

    def make(policy, seed, log):
        options = {"per_device_train_batch_size": 8, "max_steps": 6, "logging_steps": 2, "report_to": []}
        arguments = transformers.TrainingArguments(
            str(tmp_path / "trainer"), **options, use_cpu=True, seed=seed, save_strategy="no", disable_tqdm=True
        )
        callbacks = [FP4GraphCallback(policy, seed=seed, backend="eager")] if applies else []
        net = fp4graph.apply(trainings.Net(), policy, seed=seed, backend="eager") if not applies else trainings.Net()
        return transformers.Trainer(net, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)

    if not applies:  # the factory applies the policy itself, and compare need not
        make.__name__ = "plain"
    trainer = make("tetrajet", 0, None)
    (_, row) = (found := compare(make, "tetrajet", seeds=1, folder=tmp_path / "out")).rows
    assert row["quantized"] == 4
    (run,) = found.of("tetrajet")
    assert [number for number, _ in run["curve"]] == [2, 4, 6]
    assert 0 < row["loss"] < run["curve"][0][1]  # of the evaluation
    assert trainer.state.global_step == 0


def test_a_lightning_pair_is_run(tmp_path):
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
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, default_root_dir=tmp_path,
        )  # fmt: skip
        return trainer, Module(policy, seed), Data()

    found = compare(make, "tetrajet", seeds=1, folder=tmp_path / "out")
    (run,) = found.of("tetrajet")
    assert [number for number, _ in run["curve"]] == list(range(1, 9))
    assert run["loss"] != run["curve"][-1][1]  # of the validation


@pytest.mark.slow
def test_a_failed_and_a_diverged_run_are_recorded_and_the_others_go_on(tmp_path):
    broken = [True]

    def train(policy, seed, log):
        model, optimizer = applied(policy, seed)
        for number in range(1, STEPS + 1):
            loss = step(model, optimizer).item()
            if policy.name == "nvfp4" and broken and number == 3:
                raise ZeroDivisionError("the user's own")
            log(number, math.nan if policy.name == "tetrajet" and number == 5 and seed else loss)
        return loss

    result = compare(train, POLICIES, seeds=2, folder=tmp_path)
    baseline, nvfp4, tetrajet = result.rows
    assert (baseline["finished"], nvfp4["finished"], tetrajet["finished"]) == (2, 0, 1)
    assert tetrajet["diverged"] == [[1, 5]]
    assert "ZeroDivisionError: the user's own" in nvfp4["failed"][0][1]
    assert "test_compare.py:" in nvfp4["failed"][0][1]
    traceback = (tmp_path / "nvfp4-0" / "traceback.txt").read_text("utf-8")
    assert traceback.endswith("ZeroDivisionError: the user's own\n")
    assert 'raise ZeroDivisionError("the user' in traceback
    assert "tetrajet: the difference is" in result.verdict
    assert "Its loss became NaN or infinite in 1 of 2 runs: seed 1 at step 5." in result.verdict
    assert "nvfp4: It failed in 2 of 2 runs: ZeroDivisionError: the user&#39;s own" in (
        tmp_path / "report.html"
    ).read_text("utf-8")
    broken.clear()  # a failed run is tried again, the others are not
    before = (tmp_path / "runs.jsonl").read_text().count('"kind": "run"')
    assert compare(train, POLICIES, seeds=2, folder=tmp_path).rows[1]["finished"] == 2
    assert (tmp_path / "runs.jsonl").read_text().count('"kind": "run"') == before + 2
    assert not (tmp_path / "nvfp4-0" / "traceback.txt").exists()


def test_a_run_that_fails_before_its_first_loss_has_no_curve(tmp_path):
    """The former attempt's log stays, for a training that goes on from a checkpoint of its own."""
    first = [True]

    def train(policy, seed, log):
        if first:
            log(1, 2.0)
            first.clear()
        raise ZeroDivisionError

    policy = fp4graph.load_policy("bf16")
    lines = [runs_of.train_once(train, policy, 0, tmp_path) for _ in range(2)]
    assert [(line["state"], line["step"], line["curve"]) for line in lines] == [
        ("failed", 1, [(1, 2.0)]),
        ("failed", 0, []),
    ]
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n'


@pytest.mark.parametrize(
    ("curves", "difference"),
    [
        (([(1, 3.0), (2, 2.0)], [(1, 3.5), (2, 1.0)]), [0.5, -1.0]),
        (([(1, 3.0), (2, None)], [(1, 3.5), (2, 1.0)]), [0.5]),  # a loss that is not finite
        (([(1, 3.0), (2, 2.0)], [(2, 3.5), (4, 1.0)]), None),  # means of other steps
        (([(1, 3.0)], [(1, 3.5), (2, 1.0)]), None),
    ],
)
def test_only_curves_at_the_same_steps_are_subtracted(tmp_path, curves, difference):
    policies = tuple(map(fp4graph.load_policy, ("bf16", "nvfp4")))
    runs = tuple(
        {"policy": policy.name, "seed": 0, "state": "finished", "curve": curve}
        for policy, curve in zip(policies, curves, strict=True)
    )
    picture = files.losses(Comparison(tmp_path, "training", "bf16", policies, (0,), runs, {}))
    drawn = [line for axes in picture.axes[1:] for line in axes.lines if line.get_label() == "nvfp4"]
    assert [list(line.get_ydata()) for line in drawn] == ([] if difference is None else [difference])


def test_a_training_with_other_arguments(tmp_path):
    def train(policy, seed):
        raise AssertionError

    says = r"calls .*train as train\(policy, seed, log\): too many positional arguments"
    with pytest.raises(Error, match=says):
        compare(train, "tetrajet", folder=tmp_path)
    with pytest.raises(Error, match=r"calls a function as train\(policy, seed, log\); got 'digits'"):
        compare("digits", "tetrajet", folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_failed_run_names_the_last_line_of_the_users(tmp_path):
    def train(policy, seed, log):
        model, _ = applied(policy, seed)
        log(1, model(torch.randn(16, 32))["loss"])
        nn.Linear(2, 2)(torch.ones(3))

    result = compare(train, "tetrajet", seeds=1, folder=tmp_path)
    assert re.search(r"\(.*test_compare\.py:\d+\)$", result.rows[0]["failed"][0][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("returned", "says"), [(None, "returned no loss and logged none"), ("text", "bf16: It failed")], ids=str
)
def test_a_training_without_a_loss(tmp_path, returned, says):
    def train(policy, seed, log):
        step(*applied(policy, seed))
        return returned

    if returned is None:
        with pytest.raises(Error, match=says):
            compare(train, "tetrajet", folder=tmp_path)
        assert not (tmp_path / "report.html").exists()
    else:
        result = compare(train, "tetrajet", seeds=1, folder=tmp_path)
        assert "a loss must be a number or a tensor with one element; got str" in result.rows[0]["failed"][0][1]
        assert "Only 0 of 1 runs of the baseline bf16 finished." in result.verdict


@pytest.mark.slow
def test_policies_that_do_not_fit_are_all_named_before_the_first_training(tmp_path):
    nowhere = one_rule(match={"module": "absent.*"}, default="keep") | {"name": "nowhere"}
    late = {**one_rule(match={"op": "linear"}), "name": "late"}
    late["phases"] = [{"at": 4, "rules": nowhere["rules"]}]
    with pytest.raises(Error) as caught:
        compare(loop, ["tetrajet", "nvfp4-te", nowhere, late], folder=tmp_path)
    first, *lines = str(caught.value).splitlines()
    assert first == "3 of the policies cannot train this model, so nothing was trained:"
    text = "\n".join(lines)
    assert re.search(r"nvfp4-te: .*\n.*Kept: 2 by rule 'first block'.*2 by rule 'last block'", text)
    assert "nowhere: rule 'all': no module of the model is called 'absent.*'" in text
    assert "  late: " in text
    assert "tetrajet: " not in text
    assert not (tmp_path / "bf16-0").exists()
    with pytest.raises(Error, match=r"tetrajett.*did you mean the shipped policy 'tetrajet'"):
        compare(loop, ["tetrajett"], folder=tmp_path)


@pytest.mark.slow
def test_a_training_that_never_applies_a_policy_is_refused(tmp_path):
    def train(policy, seed, log):
        log(1, 1.0)

    with pytest.raises(Error, match=r"never called fp4graph.apply"):
        compare(train, "tetrajet", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was called by itself:fp4graph.errors.PolicyWarning")
def test_a_model_that_is_called_by_its_parts_is_trained_unchecked(tmp_path):
    def train(policy, seed, log):
        model, _ = applied(policy, seed)
        log(1, model.blocks(torch.randn(4, 32)).sum())

    result = compare(train, "tetrajet", seeds=1, folder=tmp_path)
    assert "policy 'tetrajet' was not checked before the training" in result.notes[1]
    assert math.isfinite(result.rows[1]["loss"])


@pytest.mark.slow
def test_goes_on_where_it_was_stopped(tmp_path):
    began = []

    def train(policy, seed, log):
        model, _ = applied(policy, seed)
        model(torch.randn(16, 32))
        began.append((policy.name, seed))
        if len(began) == 3:
            raise KeyboardInterrupt
        loop(policy, seed, log)

    with pytest.raises(KeyboardInterrupt):
        compare(train, "tetrajet", seeds=2, folder=tmp_path)
    assert "2 of 4 runs" in " ".join((tmp_path / "report.html").read_text("utf-8").split())
    with (tmp_path / "runs.jsonl").open("ab") as file:
        file.write(b'{"kind": "run", "policy": "tetra')  # as a kill leaves it
    whole = compare(train, "tetrajet", seeds=2, folder=tmp_path)
    assert began[2] == began[3]
    assert len(began) == 5
    assert [run["loss"] for run in whole.of("tetrajet")] == [losses[-1] for losses in by_hand()["tetrajet"][:2]]
    compare(train, "mxfp4,tetrajet", seeds=2, folder=tmp_path)  # more of the same
    assert began[5:] == [("mxfp4", 0), ("mxfp4", 1)]

    with pytest.raises(Error, match=r"holds a comparison of .*train, and this is one of .*:loop; give another folder"):
        compare(loop, POLICIES, folder=tmp_path)
    edited = fp4graph.load_policy("mxfp4").to_yaml().replace("name: mxfp4", "name: tetrajet")
    (tmp_path / "edited.yaml").write_text(edited)
    with pytest.raises(Error, match="runs of policy 'tetrajet' from before it was edited"):
        compare(train, str(tmp_path / "edited.yaml"), folder=tmp_path)
    with (
        recording(tmp_path, train, []),
        pytest.raises(Error, match=r"is in use by process \d+ on .*; wait until it ends"),
    ):
        compare(train, POLICIES, folder=tmp_path)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_kills_lose_nothing_and_repeat_nothing(tmp_path, processes):
    folder, draw = tmp_path / "out", random.Random(processes)
    command = [sys.executable, "-m", "tests.lab.trainings", str(folder), str(processes)]
    environment = {**os.environ, **IMPORTS, "OMP_NUM_THREADS": "1"}
    kills, recorded, began = 0, set[tuple[str, int]](), 0
    while True:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        # Half of the kills fall into the start and the check of the policies, half into the trainings: after the second
        # one has begun, so that the first one is recorded.
        watched = folder / ("ledger" if kills % 2 else "runs.jsonl")
        size, deadline = _size(watched), time.monotonic() + PATIENCE
        while process.poll() is None and _size(watched) <= size + (len("tetrajet 19\n") if kills % 2 else 0):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.6))
        if kills < 20:
            process.send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=PATIENCE)
        ledger = (folder / "ledger").read_text().split("\n")[:-1] if (folder / "ledger").exists() else []
        again = {(policy, int(seed)) for policy, seed in map(str.split, ledger[began:])} & recorded
        assert not again, f"{again} began again after it was recorded"
        done = [(line["policy"], line["seed"]) for line in _lines(folder / "runs.jsonl") if line.get("kind") == "run"]
        assert len(done) == len(set(done)), "a run is recorded twice"
        assert recorded <= set(done), "a recorded run is lost"
        recorded, began = set(done), len(ledger)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, out.decode()
        kills += 1
    assert kills == 20
    assert recorded == {(policy, seed) for policy in ("bf16", "mxfp4", "tetrajet") for seed in range(20)}


def _size(file):
    return file.stat().st_size if file.exists() else 0


def _lines(file):
    """The whole lines of a file."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.long
@pytest.mark.process
def test_processes_find_the_same(tmp_path):
    result = compare(loop, POLICIES, folder=tmp_path, processes=2)
    assert {(run["policy"], run["seed"]): run["loss"] for run in result.runs} == {
        (policy, seed): losses[-1] for policy, own in by_hand().items() for seed, losses in enumerate(own)
    }
    with pytest.raises(Error, match="processes= needs a train"):
        compare(lambda policy, seed, log: 0.0, POLICIES, folder=tmp_path / "other", processes=2)


def test_a_training_that_goes_on_continues_its_log(tmp_path):
    killed = Log(tmp_path, lambda step, loss: None)
    for number in range(1, 6):
        killed(number, torch.tensor(float(number)))
    resumed = Log(tmp_path, lambda step, loss: None)
    resumed(4, 40.0)
    assert resumed.points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert Log(tmp_path, lambda step, loss: None).points == resumed.points


class Sleeper:
    """A training whose steps take a time that depends on the policy, and that notes who runs."""

    def __init__(self, milliseconds, steps=1000):
        self.milliseconds, self.steps = milliseconds, steps
        self.trace: list[str] = []
        self.running = threading.Lock()

    def __call__(self, policy, seed, log):
        for number in range(1, self.steps + 1):
            assert self.running.acquire(blocking=False), "both run at once"
            self.trace.append(policy.name)
            time.sleep(self.milliseconds[policy.name] / 1000)
            self.running.release()
            log(number, 1.0)


def test_times_alternate():
    train = Sleeper({"bf16": 2.0, "nvfp4": 10.0})
    measured = timing.timed(train, fp4graph.load_policy("bf16"), fp4graph.load_policy("nvfp4"), 0)
    assert 2 <= measured["baseline_ms_per_step"] < 6
    assert 2 < measured["ratio"] < 6
    turns = [name for place, name in enumerate(train.trace) if place == 0 or train.trace[place - 1] != name]
    assert turns == ["bf16", "nvfp4"] * (timing.TURNS + 1)


def test_times_of_short_and_of_failing_trainings():
    pair = fp4graph.load_policy("bf16"), fp4graph.load_policy("nvfp4")
    assert timing.timed(Sleeper({"bf16": 0.0, "nvfp4": 0.0}, steps=4), *pair, 0) == {}
    with pytest.raises(KeyError, match="nvfp4"):
        timing.timed(Sleeper({"bf16": 0.0}), *pair, 0)


@pytest.mark.slow
def test_a_listener_hears_its_context_and_its_thread():
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
    assert half is not None
    assert [mean - half, mean + half] == pytest.approx([low, high])
    assert paired(draws[:1]) == (draws[0], None)


def made(losses, folder=Path("out")):
    """A comparison with these final losses."""
    model = {"sites": 5, "quantized": 4, "fp4_flops": 0.8, "bits_per_weight": 5.8}
    runs = [
        {"policy": name, "seed": seed, "state": "finished", "loss": loss, "metrics": {}, "ms_per_step": 2.0,
         "model": model, "note": None, "error": None, "step": 9, "curve": [[1, 30.0], [9, loss]]}
        for name, own in losses.items() for seed, loss in enumerate(own)
    ]  # fmt: skip
    policies = tuple(fp4graph.load_policy(name) for name in losses)
    seeds = tuple(range(max(map(len, losses.values()))))
    return Comparison(folder, "a & b", "bf16", policies, seeds, tuple(runs), {})


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ([1.2, 1.31, 1.1], "nvfp4: its loss is higher by 0.103 (95 % interval +0.089 to +0.118, 3 seeds)."),
        ([0.9, 1.0, 0.8], "nvfp4: its loss is lower by 0.2 (95 % interval"),
        ([1.0, 1.4, 0.8], "nvfp4: 3 seeds are too few to tell it from bf16: the difference is -0.03 (95 % interval"),
        ([1.1, 1.2, 1.0], "nvfp4: its losses equal the baseline's, in all 3 seeds."),
        ([1.3], "nvfp4: the difference is +0.2, and one seed cannot show whether that is chance"),
    ],
    ids=["higher", "lower", "unclear", "equal", "one"],
)
def test_the_verdict(losses, says):
    assert says in made({"bf16": [1.1, 1.2, 1.0], "nvfp4": losses}).verdict


def test_the_verdict_ranks_what_it_can_tell_apart():
    usual = [1.0, 1.5, 1.25]
    near, far = [1.1, 1.61, 1.34], [1.4, 1.91, 1.64]
    text = made({"bf16": usual, "nvfp4": far, "tetrajet": near}).verdict.splitlines()[0]
    lowest = "Among the policies beside bf16, tetrajet has the lowest loss (+0.1)."
    assert text == f"{lowest} The loss of every other policy is measurably higher."
    text = made({"bf16": usual, "nvfp4": near, "tetrajet": [1.08, 1.62, 1.33]}).verdict.splitlines()[0]
    assert text.endswith("These seeds cannot tell it from nvfp4.")


@pytest.mark.slow
def test_the_page_is_whole_and_refers_to_nothing_outside(result):
    text = (result.folder / "report.html").read_text("utf-8")
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", text)
    assert "width=device-width" in text
    for row in result.rows:
        assert f'data-label="policy">{row["policy"]}</td>' in text
    for paragraph in result.verdict.splitlines():
        assert paragraph in text
    recorded = read(result.folder / "tetrajet-0")
    assert recorded.steps == [2, 4, 6, 8]
    last = [row for row in recorded.rows if row["step"] == 8 and row.get("snr_db") is not None]
    lowest = min(last, key=lambda row: row["snr_db"])
    assert f"<td>{lowest['site']}</td>" in text
    assert f"{lowest['snr_db']:.1f} dB" in text
    assert not (result.folder / "tetrajet-1" / "statistics").exists()


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
    svg = ElementTree.parse(tmp_path / "loss.svg")
    comments = (tmp_path / "loss.svg").read_text("utf-8")
    assert svg.getroot().tag.endswith("svg")
    texts = {"<!-- 0.1 -->", "<!-- 10 -->", "<!-- loss (log scale) -->", "<!-- minus bf16 -->"}
    assert texts <= set(re.findall("<!-- .* -->", comments))
    assert "10^" not in comments  # no powers of ten on the axis
    assert (tmp_path / "loss.pdf").read_bytes().startswith(b"%PDF")
    assert "a &amp; b" in (tmp_path / "report.html").read_text("utf-8")
    assert r"a\_b\&c" in files.as_tex([{"a_b&c": "1"}])


def test_curves_are_thinned_to_means():
    points = [(number, float(number)) for number in range(1, 1001)]
    thin = runs_of.thinned(points)
    assert len(thin) == 200
    assert thin[0] == (5, 3.0)
    assert thin[-1] == (1000, 998.0)
    assert runs_of.thinned(points[:7]) == points[:7]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs ``fp4graph compare`` in an empty folder: (exit code, stdout, stderr or the error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments):
        from fp4graph.cli import app

        result = CliRunner().invoke(app, ["compare", *arguments])
        if isinstance(result.exception, Error):
            return 1, result.stdout, str(result.exception)
        return result.exit_code, result.stdout, result.stderr

    return call


BRIEF = ["--batch-size=16", "--steps=2", "--validate-every=1", "--validation-batches=1", "--device=cpu", "--no-timing"]


@pytest.mark.long
@pytest.mark.slow
def test_the_command_compares_a_task(command, tmp_path):
    code, out, err = command("digits", *BRIEF, "--policies=bf16, mxfp4", "--seeds=1")
    assert code == 0, err
    ended = [f"{name}, seed 0: finished, loss" for name in ("bf16", "mxfp4")]
    assert [line.rpartition(" ")[0] for line in err.splitlines()] == ended
    folder = tmp_path / "runs" / "compare-digits"
    runs = {run["policy"]: run for run in _lines(folder / "runs.jsonl") if run.get("kind") == "run"}
    settings = {"batch_size": 16, "steps": 2, "validate_every": 1, "validation_batches": 1, "device": "cpu"}
    alone = train_task(Run("digits", "mxfp4", **settings))
    assert runs["mxfp4"]["loss"] == alone.validation_loss
    assert runs["mxfp4"]["metrics"] == {"accuracy": alone.metrics["accuracy"], "train_loss": alone.train_loss}
    # Two blocks' qkv, proj, fc1 and fc2 are quantized; the patch convolution, two attentions and the head are not.
    lines = {line.split()[0]: line.split() for line in out.splitlines() if "/12" in line}
    assert {name: words[-2:] for name, words in lines.items()} == {"bf16": ["0/12", "1"], "mxfp4": ["8/12", "1"]}
    assert f"{alone.validation_loss:.4g}" in lines["mxfp4"]
    assert f"page: {folder / 'report.html'}" in out
    code, out, err = command("digits", *BRIEF, "--policies=mxfp4", "--seeds=1", "--json")
    assert json.loads(out)["rows"][1]["loss"] == alone.validation_loss
    _, _, err = command("digits", *BRIEF, "--lr=1", "--policies=mxfp4", "--seeds=1")
    assert "its settings were changed" in err


@pytest.mark.long
@pytest.mark.slow
def test_the_command_compares_a_function_of_the_users(command, tmp_path):
    (tmp_path / "mine.py").write_text("from tests.lab.trainings import loop as fn\n")
    code, out, err = command("--train=mine:fn", "--policies=tetrajet", "--seeds=2", "--seed=1", "--no-timing")
    assert code == 0, err
    losses = [losses[-1] for losses in by_hand()["tetrajet"][1:]]
    assert f"{statistics.fmean(losses):.4g} ± {statistics.stdev(losses):.2g}" in out
    sys.modules.pop("mine")


@pytest.mark.long
@pytest.mark.slow
def test_the_command_fails_where_runs_fail_and_goes_on_with_a_mended_function(command, tmp_path):
    """Of runs that have all failed nothing is kept that an edit could contradict."""
    source = "from tests.lab.trainings import loop\n\ndef fn(policy, seed, log):\n    return loop(policy, seed, log)"
    arguments = "--train=mine:fn", "--policies=tetrajet", "--seeds=1", "--no-timing", "--output=runs/mended"
    for text, status in ((source + " / 0\n", 1), (source + "\n", 0)):
        (tmp_path / "mine.py").write_text(text)
        linecache.checkcache()
        code, _, err = command(*arguments)
        assert code == status, err
        assert ("2 of 2 runs failed; the same command repeats them" in err) == bool(status)
        sys.modules.pop("mine")
    assert "bf16-0" in {path.name for path in (tmp_path / "runs/mended").iterdir()}
    found = fp4graph.lab.diagnose(tmp_path / "runs/mended/tetrajet-0", tmp_path / "runs/mended/bf16-0")
    assert found.baseline is False  # the losses of both are in their logs


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["digits"], "give the policies to compare"),
        (["--policies=tetrajet"], "give either a task"),
        (["digits", "--train=a:b", "--policies=tetrajet"], "give either a task"),
        (["digitz", "--policies=tetrajet"], "unknown task 'digitz'; did you mean"),
        (["digits", "--policies=bf16"], "there is no policy to compare with the baseline 'bf16'"),
        (["digits", "--policies=tetrajett"], "did you mean the shipped policy 'tetrajet'"),
        (["digits", "--policies=tetrajet,tetrajet"], "two of the policies are called 'tetrajet'"),
        (["digits", "--policies=tetrajet", "--device=abacus"], "device 'abacus' cannot be used"),
        (["imagenet100", "--policies=tetrajet"], "task 'imagenet100' needs ImageNet-100"),
        (["--train=absent:fn", "--policies=tetrajet"], "module 'absent' is neither in"),
        (["--train=json:fn", "--policies=tetrajet"], "has no 'fn'"),
        (["--train=json:load", "--policies=tetrajet", "--lr=1"], "--lr is only for tasks"),
    ],
)
def test_a_mistake_is_one_sentence(command, tmp_path, arguments, says):
    code, _, error = command(*arguments)
    assert code != 0
    assert says in error
    assert not list(tmp_path.rglob("report.html"))


@pytest.mark.parametrize("seeds", [0, [], [1, 1], [-1], [1.5]], ids=str)
def test_seeds_are_different_whole_numbers(tmp_path, seeds):
    with pytest.raises(Error, match="seeds must be a number of at least 1"):
        compare(loop, "tetrajet", seeds=seeds, folder=tmp_path)


@pytest.mark.slow
def test_a_training_that_sets_one_seed_for_all_is_noted(tmp_path):
    def fixed(policy, seed, log):
        trainings.loop(policy, 7, log)

    options = {"seeds": 2, "timing": False, "statistics": 0}
    noted, silent = (
        compare(train, "mxfp4", folder=tmp_path / train.__name__, **options) for train in (fixed, trainings.loop)
    )
    assert ["bf16 has the same loss under every seed" in note for note in noted.notes] == [True]
    assert not silent.notes
