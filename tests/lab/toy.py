"""An objective that takes milliseconds: how well the quantizers of a policy reproduce Gaussian matrices."""

import contextlib
import sys
import time
from pathlib import Path

import torch

import fp4graph
from fp4graph.errors import Error
from fp4graph.lab.runs.run import Outcome, Run, Validation


def objective(run, report):
    """Quantize a new matrix at each step with every spec; the loss is 1 plus the mean relative squared error.

    The outcome has the loss of the last step. A run takes ``validate_every`` milliseconds; a learning rate above 1
    diverges, a batch size of 13 raises.
    """
    policy = fp4graph.load_policy(run.policy)
    specs = [spec for rule in policy.rules for spec in rule.specs.values() if spec is not None]
    loss, history = 1.0, []
    time.sleep((run.validate_every or 0) / 1000)
    if run.batch_size == 13:
        raise ZeroDivisionError("thirteen")
    for step in range(1, (run.steps or 1) + 1):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(run.seed + step))
        errors = [(fp4graph.fake_quantize(x, spec, key=step) - x).square().sum() / x.square().sum() for spec in specs]
        loss = 1.0 + (sum(errors) / len(errors)).item() if errors else 1.0
        history.append(Validation(step, loss, loss))
        report(step, loss)
    diverged = run.lr is not None and run.lr > 1
    return Outcome(
        validation_loss=float("nan") if diverged else loss,
        train_loss=loss,
        metrics={},
        steps=len(history),
        seconds=0.0,
        diverged=diverged,
        complexity=policy.complexity,
        quantized=len(specs),
        sites=1,
        parameters=0,
        history=tuple(history),
    )


def broken_baseline(run, report):
    raise Error("no data; put it there")


def slow(run, report):
    time.sleep(600)
    return objective(run, report)


def logged(run, report):
    """Append a line per training to the file ``run.data``.

    A training that finds a file ``hold`` beside ``run.data`` deletes ``hold`` and sleeps, so that a test can kill it.
    """
    assert run.data is not None
    with contextlib.suppress(FileNotFoundError):
        Path(run.data).with_name("hold").unlink()
        time.sleep(600)
    outcome = objective(run, report)
    with Path(run.data).open("a", encoding="utf-8") as file:
        file.write(f"{fp4graph.load_policy(run.policy).fingerprint}\n")
    return outcome


def sweep(url, log, trials, milliseconds):
    """Run two worker processes until the study has ``trials`` results."""
    import optuna

    from fp4graph.lab.sweeps.space import load_space
    from fp4graph.lab.sweeps.study import Manifest, Study
    from fp4graph.lab.sweeps.workers import Job, Workers

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    run = Run("digits", steps=1, validate_every=milliseconds, data=log)
    study = Study.create(url, "toy", Manifest.of(load_space("design-space"), run.to_json(), patience=6.0))
    job = Job(url, "toy", trials, "random", "none", "cpu", str(Path(log).parent), workers=2, objective=logged)
    with Workers(job, study) as workers:
        for _ in workers.watch():
            pass


if __name__ == "__main__":
    from tests.lab import toy  # worker processes find the objective under this name

    toy.sweep(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
