"""The training loop: against a loop written by hand, killed and resumed, diverging; its record; bad input."""

import dataclasses
import gc
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import fp4graph
from fp4graph.errors import Error
from fp4graph.lab.runs.folder import RunFolder, read_metrics, read_outcome, read_run
from fp4graph.lab.runs.run import finite
from fp4graph.lab.runs.train import Run, train
from fp4graph.lab.tasks import TASKS
from tests.helpers.disks import files_no_larger_than
from tests.helpers.policies import one_rule
from tests.helpers.processes import PATIENCE, python
from tests.lab.trainings import stop_at, tensorboard

pytestmark = pytest.mark.usefixtures("operation_by_operation")

#: Settings of a short training of a ViT on digits.
SHORT = {"task": "digits", "batch_size": 16, "validation_batches": 2, "device": "cpu", "steps": 6, "validate_every": 2}
CONTENT = {"settings": {}, "policy": ""}


def run(**options):
    return Run(**{**SHORT, **options})


def losses(outcome):
    return [(entry.step, entry.train_loss, entry.validation_loss) for entry in outcome.history]


def curves(folder):
    """Return the metrics of a run without their times."""
    return [{**line, "seconds": None} for line in read_metrics(folder)]


def random_states():
    return random.getstate(), str(np.random.get_state()[1].tolist()), torch.get_rng_state().tolist()


def stopped(chosen, folder, step):
    with pytest.raises(KeyboardInterrupt):
        train(chosen, directory=folder, report=stop_at(step))


@pytest.mark.slow
def test_a_training_equals_a_loop_written_by_hand(tmp_path):
    """AdamW with warm-up, a cosine, clipping and accumulation; nothing is quantized."""
    chosen = run(optimizer="adamw", lr=1e-2, weight_decay=0.1, schedule="cosine", warmup=0.34, clip=0.5, accumulate=2)
    outcome = train(chosen, directory=tmp_path)

    problem = TASKS["digits"].make(TASKS["digits"].settings(chosen))
    model = problem.model
    exempt = {"pos_embed", "cls_token"}
    groups = [
        {"params": [p for n, p in model.named_parameters() if p.dim() > 1 and n not in exempt], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if p.dim() == 1 or n in exempt], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    batches = problem.batches(0)
    expected, since, norms = [], [], []
    for step, factor in enumerate([0.5, 1, 1, *(0.505 + 0.495 * math.cos(math.pi * k / 4) for k in (1, 2, 3))]):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.zero_grad()
        total = 0.0
        for images, labels in islice(batches, 2):
            loss = torch.nn.functional.cross_entropy(model(images), labels) / 2
            loss.backward()
            total += loss.item()
        since.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        if step % 2:
            with torch.no_grad():
                held_out = [(model(images), labels) for images, labels in islice(problem.validation(), 2)]
            logits, labels = (torch.cat(parts) for parts in zip(*held_out, strict=True))
            expected.append((step + 1, sum(since) / 2, torch.nn.functional.cross_entropy(logits, labels).item()))
            since = []
            accuracy = (logits.argmax(1) == labels).float().mean().item()
    assert losses(outcome) == [pytest.approx(entry, rel=1e-5) for entry in expected]
    assert outcome.metrics["accuracy"] == pytest.approx(accuracy)
    assert outcome.quantized == 0
    recorded = [line["gradient_norm"] for line in read_metrics(tmp_path) if "gradient_norm" in line]
    assert recorded == pytest.approx(norms, rel=1e-4)


@pytest.mark.long
def test_a_training_is_a_function_of_its_seed_and_leaves_the_callers_random_state():
    torch.manual_seed(1)
    first = train(run(policy="tetrajet"))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert losses(train(run(policy="tetrajet"))) == losses(first)
    assert losses(train(run(policy="tetrajet", seed=1))) != losses(first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.long
def test_options_change_what_is_computed():
    variants = [{}, {"policy": "mxfp4"}, {"dtype": "bf16"}, {"autocast": True}, {"optimizer": "sgd", "lr": 0.1}]
    variants.append({**variants[-1], "optimizer_options": {"momentum": 0.9}})
    values = [train(run(**options)).validation_loss for options in variants]
    assert len(set(values)) == 6
    assert max(values[:4]) - min(values[:4]) < 0.2


@pytest.mark.slow
def test_the_last_short_validation_batch_counts_each_sample_once():
    """Of 360 images the last batch of 100 has 60, and is padded to the one shape that is compiled."""
    chosen = run(steps=1, batch_size=100, validate_every=1)
    whole, some = (train(dataclasses.replace(chosen, validation_batches=count)) for count in (None, 3))
    problem = TASKS["digits"].make(TASKS["digits"].settings(chosen))
    assert [len(labels) for _, labels in problem.validation()] == [100, 100, 100, 60]
    assert whole.validation_loss != some.validation_loss
    assert (whole.metrics["accuracy"] * 360) == pytest.approx(round(whole.metrics["accuracy"] * 360))


PHASED = {"extends": "mxfp4", "techniques": ["loss_scaling"], "phases": [{"at": 0.5, "operands": {"backward": "keep"}}]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "complexity"),
    [
        ({"policy": "tetrajet", "optimizer": "adam", "steps": 1}, 0.5),
        ({"policy": "tetrajet", "optimizer": "stablespam", "steps": 1}, 1.0),
        ({"policy": {"version": 1, **PHASED}}, 0.5),
    ],
    ids=["adam", "stablespam", "phases and loss scaling"],
)
def test_complexity_counts_the_optimizer(options, complexity):
    outcome = train(run(**options))
    assert (outcome.diverged, outcome.complexity) == (False, complexity)


@pytest.mark.long
def test_report_hears_each_validation_and_watch_has_model_and_optimizer_and_keeps_no_model_alive(tmp_path):
    """A sweep trains hundreds of models in one process."""
    events, kept, heard = [], [], []

    @contextmanager
    def watching(model, optimizer):
        kept.append(weakref.ref(model))
        name = type(model).__name__
        optimizer.register_step_post_hook(lambda *_: events.append(name))
        yield
        events.append("left")

    outcome = train(run(policy="tetrajet-qema"), watch=watching, report=lambda *validation: heard.append(validation))
    assert events == ["VisionTransformer"] * 6 + ["left"]
    gc.collect()
    assert kept[0]() is None
    assert heard == [(step, validation) for step, _, validation in losses(outcome)]
    assert [step for step, _ in heard] == [2, 4, 6]
    stopped(run(), tmp_path, 4)
    assert read_outcome(tmp_path) is None
    assert read_metrics(tmp_path)[-1]["step"] == 4


@pytest.mark.slow
def test_a_run_that_diverges_ends_there_and_is_still_json(tmp_path):
    outcome = train(run(optimizer="sgd", lr=1e30, steps=50, validate_every=50), directory=tmp_path)
    assert outcome.diverged
    assert outcome.steps < 10
    assert math.isnan(outcome.validation_loss)
    written, lines = read_outcome(tmp_path), read_metrics(tmp_path)
    assert (written["validation_loss"], written["diverged"], lines[-1]["train_loss"]) == (None, True, None)
    assert lines[0]["train_loss"] > 0
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text() + (tmp_path / "outcome.json").read_text()


@pytest.mark.slow
def test_the_record_holds_the_options_and_the_result(tmp_path):
    chosen, folder = run(policy="tetrajet", optimizer="adamw", lr=1e-3), tmp_path / "new" / "folder"
    outcome = train(chosen, directory=folder)
    record = read_run(folder)
    assert Run.from_json(record["run"]) == chosen
    assert (record["settings"]["dtype"], record["settings"]["backend"], record["steps"]) == ("fp32", "eager", 6)
    (tmp_path / "policy.yaml").write_text(record["policy"])
    assert fp4graph.load_policy(tmp_path / "policy.yaml").fingerprint == fp4graph.load_policy("tetrajet").fingerprint
    assert read_outcome(folder) == finite(outcome.to_json())
    lines = read_metrics(folder)
    validations = [line for line in lines if "validation_loss" in line]
    steps = [line for line in lines if "lr" in line]
    assert [(v["step"], v["train_loss"], v["validation_loss"]) for v in validations] == losses(outcome)
    assert all("accuracy" in line for line in validations)
    assert [(line["step"], line["lr"]) for line in steps] == [(step, 1e-3) for step in range(1, 7)]
    assert [line["seconds"] for line in steps] == sorted(line["seconds"] for line in steps)
    assert sum(line["train_loss"] for line in steps[:2]) / 2 == pytest.approx(outcome.history[0].train_loss)
    shown = [(event.step, event.value) for event in tensorboard(folder / "tensorboard").Scalars("validation_loss")]
    assert shown == [(step, pytest.approx(validation)) for step, _, validation in losses(outcome)]


@pytest.mark.slow
def test_resumes_bit_for_bit(tmp_path, monkeypatch):
    """Techniques, optimizer, loss scaler and schedule have state, and the policy draws random bits. The checkpoint is
    between two lines of metrics, each of which is a mean over three steps."""
    monkeypatch.setattr("fp4graph.lab.runs.train.LINES", 2)
    policy = {"version": 1, "extends": "tetrajet-qema", "techniques": ["loss_scaling"]}
    chosen = run(policy=policy, schedule="cosine", optimizer="stablespam", accumulate=2)
    uninterrupted = train(chosen, directory=tmp_path / "whole")
    folder = tmp_path / "stopped"
    stopped(chosen, folder, 4)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    states = random_states()
    for changed, resume, says in (
        ({}, False, "already holds a run"),
        ({"lr": 0.1, "seed": 3}, True, r"another run: seed was 0, is 3; lr was 0.002, is 0.1"),
        ({"steps": 8}, True, r"another run: steps was 6, is 8"),
    ):
        with pytest.raises(Error, match=says):
            train(dataclasses.replace(chosen, **changed), directory=folder, resume=resume)
    resumed = train(chosen, directory=folder, resume=True)
    assert (losses(resumed), resumed.steps) == (losses(uninterrupted), uninterrupted.steps)
    assert curves(folder) == curves(tmp_path / "whole")
    assert random_states() == states  # the checkpoint holds the training's
    with pytest.raises(Error, match="has already ended"):
        train(chosen, directory=folder, resume=True)


@pytest.mark.long
def test_resume_of_a_run_killed_before_its_first_checkpoint_repeats_no_line(tmp_path):
    chosen = run(steps=4, validate_every=4)
    uninterrupted = train(chosen, directory=tmp_path / "whole", resume=True)  # without a run to resume, it begins one
    assert losses(uninterrupted) == losses(train(chosen))

    with pytest.raises(KeyboardInterrupt):
        train(chosen, directory=tmp_path / "stopped", tick=stop_at(3))
    assert [line["step"] for line in read_metrics(tmp_path / "stopped")] == [1, 2]
    train(chosen, directory=tmp_path / "stopped", resume=True)
    assert curves(tmp_path / "stopped") == curves(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.process
def test_a_folder_has_one_writer_until_its_process_dies(tmp_path):
    """Even if a process that the writer forked lives on, as workers of a DataLoader may."""
    code = (
        "import os, pathlib, sys, time; from fp4graph.lab.runs.folder import RunFolder; "
        f"folder = RunFolder(pathlib.Path(sys.argv[1])); folder.begin({CONTENT!r}, resume=True); "
        "folder.line(1, train_loss=0.5); worker = os.fork() or time.sleep(600); print(worker, flush=True); "
        "time.sleep(600)"
    )

    def content():
        return sorted((file.name, file.read_bytes()) for file in tmp_path.iterdir() if file.is_file())

    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        try:
            worker = int(holder.stdout.readline())
            before = content()
            process = re.escape(f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()}")
            for resume in (True, False):
                with pytest.raises(Error, match=process):
                    RunFolder(tmp_path).begin(CONTENT, resume=resume)
            assert content() == before
        finally:
            holder.kill()
    first = RunFolder(tmp_path)
    try:
        first.begin(CONTENT, resume=True)
    finally:
        os.kill(worker, signal.SIGKILL)
    with pytest.raises(Error, match=f"in use by process {os.getpid()} "):
        RunFolder(tmp_path).begin(CONTENT, resume=True)
    first.close()
    with pytest.raises(Error, match="already holds a run"):
        RunFolder(tmp_path).begin(CONTENT, resume=False)


@pytest.mark.long
@pytest.mark.process
def test_a_killed_run_is_readable_and_goes_on(tmp_path):
    """SIGKILL between validations, from outside."""
    folder, options = tmp_path / "run", {**SHORT, "steps": 400, "validate_every": 20}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "task"]
    command = python("-c", "from fp4graph.__main__ import main; main()", "train", "digits", *words)
    process = subprocess.Popen([*command, f"--output={folder}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE
    while not any(line["step"] > 25 for line in read_metrics(folder)) and time.monotonic() < deadline:
        assert process.poll() is None, "it ended by itself"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()

    lines = read_metrics(folder)
    assert lines[-1]["step"] > 25
    assert read_outcome(folder) is None
    chosen = Run.from_json(read_run(folder)["run"])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "train_l')  # the partial line that a kill during a write leaves
    assert read_metrics(folder) == lines
    assert train(chosen, directory=folder, resume=True, report=lambda *_: None).steps == 400
    assert [line["step"] for line in read_metrics(folder) if "lr" in line] == list(range(1, 401))


def test_a_full_disk_is_an_error_and_written_lines_stay(tmp_path):
    folder = RunFolder(tmp_path)
    folder.begin(CONTENT, resume=False)
    for step in range(2):
        folder.line(step, train_loss=1 / 3)
    folder.close()  # TensorBoard's thread writes when it likes, and would otherwise meet the limit too
    with files_no_larger_than(100), pytest.raises(Error, match=r"cannot write .*metrics.jsonl: .*Earlier lines"):
        folder.line(2, train_loss=1 / 3)
    content = (tmp_path / "metrics.jsonl").read_bytes()
    assert 0 < len(content) <= 100
    assert content.endswith(b"}\n")
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]
    folder.line(2, train_loss=0.5)
    assert len(read_metrics(tmp_path)) == 3


@pytest.mark.parametrize(
    ("read", "content", "says"),
    [
        (read_run, None, "holds no run"),
        (read_run, "{", "is not JSON"),
        (read_run, '{"format": "fp4graph.run", "version": 99}', "version 99; this fp4graph reads version 1"),
        (read_metrics, '{"step": 1}\nrubbish\n{"step": 2}\n', r"metrics.jsonl:2 is not JSON"),
        (read_metrics, '{"step": 1}\n[2]\n', r"metrics.jsonl:2 is not an object; it was damaged"),
        (read_metrics, '{"train_loss": 1.0}\n', r"metrics.jsonl:1 has no 'step'; .* delete this line"),
        (lambda _: Run.from_json({"task": "digits", "colour": "red"}), None, "known keys: accumulate"),
    ],
)
def test_an_invalid_record_is_an_error(read, content, says, tmp_path):
    if content:
        (tmp_path / ("run.json" if read is read_run else "metrics.jsonl")).write_text(content)
    with pytest.raises(Error, match=says):
        read(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"directory": Path(__file__)}, r"cannot write .*test_train\.py: .*; give another folder"),
        ({"task": "gausian"}, "unknown task 'gausian'; did you mean 'gaussian'"),
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm'; did you mean 'adam"),
        ({"dtype": "fp16"}, "unknown dtype 'fp16'; known: bf16, fp32|did you mean 'bf16'"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"epochs": 3}, "epochs and steps both"),
        ({"lr": 0.0}, "lr must be a positive number; got 0.0"),
        ({"lr": math.nan}, "lr must be a positive number; got nan"),
        ({"steps": 0}, "steps must be a whole number of at least 1; got 0"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"seed": 2**63}, "seed must be .* at most 9223372036854775807; got 9223372036854775808"),
        ({"warmup": 1.5}, r"warmup must be a number of \[0, 1\)"),
        ({"weight_decay": -1}, "weight_decay must be"),
        ({"batch_size": 5000}, "batch size 5000 exceeds the 1437 training samples"),
        ({"policy": "mxfp44"}, "did you mean the shipped policy 'mxfp4'"),
        ({"data": "/somewhere"}, "task 'digits' makes its data itself; leave --data out"),
        ({"device": "toaster"}, "device 'toaster' cannot be used"),
        ({"optimizer_options": {"betta": 1}}, "optimizer adam does not take {'betta': 1}"),
        ({"optimizer_options": {"betas": [2, 2]}}, "optimizer adam does not take"),
        ({"optimizer_options": {"betas": [0.9]}}, r"optimizer adam does not take {'betas': \[0.9\]}"),
        ({"optimizer_options": {"fused": True, "foreach": True}}, "optimizer adam does not take"),
        (
            {"optimizer": "stablespam", "policy": {"version": 1, "extends": "mxfp4", "techniques": ["stable_spam"]}},
            "would condition its gradients a second time",
        ),
    ],
)
def test_an_invalid_setting_is_an_error(options, says):
    options = dict(options)
    directory = options.pop("directory", None)
    with pytest.raises(Error, match=says):
        train(run(**options), directory=directory)


@pytest.mark.slow
def test_a_policy_that_quantizes_no_site_is_an_error(tmp_path):
    nothing = one_rule(match={"op": "linear", "in_features": {"min": 9999}}, default="keep")
    nothing["rules"][0]["required"] = False
    with pytest.raises(Error, match="policy 'p' quantizes no site of this model"):
        train(run(policy=nothing), directory=tmp_path)
    train(run(steps=1), directory=tmp_path)  # the failed call has recorded nothing, so the folder is free


BRIEF = ["train", "digits", "--batch-size=16", "--steps=2", "--validate-every=1", "--validation-batches=1"]


@pytest.mark.slow
def test_the_command_prints_a_table_or_json_and_keeps_a_record(command, tmp_path):
    code, out, err = command(*BRIEF, "--policy=mxfp4", "--optimizer=stablespam")
    assert code == 0, err
    outcome = read_outcome(tmp_path / "runs" / "digits-mxfp4-stablespam-0")
    shown = "digits under mxfp4", "8 of 12 quantized", "runs/digits-mxfp4-stablespam-0"
    assert all(words in out for words in (*shown, f"{outcome['validation_loss']:.4g}"))
    assert "step 2: validation loss" in err
    assert command(*BRIEF, "--policy=mxfp4", "--optimizer=stablespam").code == 0
    assert (tmp_path / "runs" / "digits-mxfp4-stablespam-0.2" / "outcome.json").exists()
    # With --json it prints JSON alone, and with --stream=none it writes no streams.
    options = ["--optimizer-option=betas=[0.5, 0.9]", "--output=here", "--stream=none"]
    code, out, err = command(*BRIEF, "--json", *options)
    assert (code, err) == (0, "")
    assert not Path("here/tensorboard").exists()
    printed = json.loads(out)
    assert (printed["record"], printed["outcome"]["steps"]) == ("here", 2)
    assert Run.from_json(printed["run"]).optimizer_options == {"betas": [0.5, 0.9]}


def test_the_command_lists_the_tasks(command):
    code, out, _ = command("train", "--list")
    assert code == 0
    assert all(name in out for name in TASKS)
    listed = json.loads(command("train", "--list", "--json").out)
    assert {row["name"]: row["recipe"]["lr"] for row in listed} == {t.name: t.recipe.lr for t in TASKS.values()}


@pytest.mark.long
def test_the_command_streams_to_every_tracker(command, monkeypatch):
    trackers = []
    for name, begin, *others in (
        ("wandb", "init", "define_metric", "log"),
        ("mlflow", "start_run", "log_params", "log_metrics"),
    ):
        tracker = MagicMock(spec=[begin, *others, "__enter__", "__exit__"])
        tracker.__name__, tracker.__spec__ = name, ModuleSpec(name, None)
        tracker.__enter__.return_value = getattr(tracker, begin).return_value = tracker
        monkeypatch.setitem(sys.modules, name, tracker)
        trackers.append(tracker)
    streams = [f"--stream={name}" for name in ("tensorboard", "wandb", "mlflow")]
    code, _, err = command(*BRIEF, "--policy=mxfp4", "--statistics=1", "--output=here", *streams)
    assert code == 0, err
    events = tensorboard("here/tensorboard")
    expected = [event.value for event in events.Scalars("validation_loss")]
    assert len(expected) == 2
    assert any(tag.startswith("snr_db/blocks.0.") for tag in events.Tags()["scalars"])
    wandb = [call.args[0] for call in trackers[0].log.mock_calls]
    mlflow = [(call.args[0], call.kwargs["step"]) for call in trackers[1].log_metrics.mock_calls]
    assert [v["fp4graph/validation_loss"] for v in wandb if "fp4graph/validation_loss" in v] == pytest.approx(expected)
    validations = [(step, v["validation_loss"]) for v, step in mlflow if "validation_loss" in v]
    assert validations == [(step, pytest.approx(loss)) for step, loss in enumerate(expected, 1)]
    assert any(name.startswith("fp4graph/snr_db/blocks.0.") for v in wandb for name in v)
    assert any(name.startswith("snr_db/blocks.0.") for v, _ in mlflow for name in v)
    assert {tracker.mock_calls[-1][0] for tracker in trackers} == {"__exit__"}
    assert trackers[0].init.call_args.kwargs["config"]["policy"] == "mxfp4"
