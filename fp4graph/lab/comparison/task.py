"""A built-in task as a training that :func:`fp4graph.compare` runs."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import yaml

from fp4graph.lab.comparison.training import Log
from fp4graph.lab.runs.folder import Ended, read_metrics, read_outcome
from fp4graph.lab.runs.run import Run
from fp4graph.lab.runs.train import train
from fp4graph.policy import Policy

#: Settings that say where a run takes place, not what it computes, and those that a comparison chooses.
NOT_COMPARED = ("device", "backend", "mode", "workers", "policy", "seed")


@dataclass(frozen=True, repr=False)
class TaskTraining:
    """Trains ``run`` under a policy and a seed; its record, with checkpoints, is in the folder of the log."""

    run: Run

    def __str__(self) -> str:
        return self.run.task

    def __repr__(self) -> str:
        return str({name: value for name, value in self.run.to_json().items() if name not in NOT_COMPARED})

    def __call__(self, policy: Policy, seed: int, log: Log) -> dict[str, Any]:
        """Train, going on from a checkpoint if there is one; return the last validation's loss and metrics."""

        def tick(step: int, steps: int, loss: float) -> None:
            if math.isfinite(loss):  # else the training ends by itself, and records that
                log(step, loss)

        run = replace(self.run, policy=yaml.safe_load(policy.to_yaml()), seed=seed)
        with suppress(Ended):  # before its line was written
            train(run, directory=log.folder, resume=True, tick=tick)
        outcome = read_outcome(log.folder)
        assert outcome is not None
        if outcome["diverged"]:
            log(outcome["steps"], math.nan)
        training = [line["train_loss"] for line in read_metrics(log.folder) if "validation_loss" in line]
        metrics = {"train_loss": training[-1]} if training else {}
        return {"loss": outcome["validation_loss"], **metrics, **outcome["metrics"]}
