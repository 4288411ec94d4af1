"""The trained model of a run, from the run's folder."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4graph.errors import Error
from fp4graph.lab.data.loading import Batch
from fp4graph.lab.runs.folder import CHECKPOINT, read_run
from fp4graph.lab.runs.run import Run
from fp4graph.lab.runs.train import Training
from fp4graph.lab.tasks import task_named
from fp4graph.policy import load_policy
from fp4graph.training import checkpoint

#: Validation batches that are looked at.
BATCHES = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Restored:
    """A model as a run left it, on the CPU and applied, called once in evaluation; a few validation batches."""

    training: Training
    batches: list[Batch]

    @property
    def model(self) -> nn.Module:
        return self.training.model

    @torch.no_grad()
    def measure(self, batch: Batch) -> Any:
        """Return the metrics of a batch, in the run's autocast."""
        return self.training.measure(batch)

    def autocast(self) -> torch.autocast:
        """Return the context in which the run calls its model."""
        return self.training.autocast()


def restore(folder: Path) -> Restored:
    """Return the model of the run in ``folder`` as its last checkpoint has it; raise an Error where there is none."""
    run = Run.from_json(read_run(folder)["run"] | {"device": "cpu", "backend": "eager"})
    task = task_named(run.task)
    settings = task.settings(run)
    with torch.random.fork_rng():
        training = Training(settings, task.make(settings), load_policy(run.policy))
    if not (folder / CHECKPOINT).exists():
        raise Error(f"{folder} holds no {CHECKPOINT}: the run ended before its first validation, or kept none")
    checkpoint.load(folder / CHECKPOINT, training.model)
    training.model.eval()
    restored = Restored(training, list(islice(training.problem.validation(), BATCHES)))
    restored.measure(restored.batches[0])
    return restored
