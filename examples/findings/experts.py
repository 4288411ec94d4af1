"""Trains a Qwen3-MoE on the bytes of Python's standard library under policies for experts and for serving.

    OMP_NUM_THREADS=1 python examples/findings/experts.py

The table has validation losses under the policy, beside those of bf16.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from sensitivity import loss_of, qwen

import fp4graph
from fp4graph.lab.runs.run import Run
from fp4graph.lab.tasks import task_named

POLICIES = "mxfp4-w4a16-experts,nvfp4-mxfp8-experts,nvfp4-rl,mxfp8-bf16,mxfp8-nvfp4,ufp4"


def main(
    policies: Annotated[str, typer.Option(help="Names, separated by commas.")] = POLICIES,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 200,
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/findings/experts"),
) -> None:
    def train(policy: Any, seed: int, log: Any) -> dict[str, torch.Tensor]:
        problem = task_named("text").make(task_named("text").settings(Run("text", seed=seed, batch_size=32)))
        torch.manual_seed(seed)
        model = fp4graph.apply(qwen(), policy, backend="eager", seed=seed, total_forwards=steps)
        optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        loss = loss_of(problem)
        for step, batch in enumerate(islice(problem.batches(0), steps), 1):
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(step, value.detach())
        model.eval()
        with torch.no_grad():
            return {"loss": torch.stack([loss(model, batch) for batch in problem.validation()]).mean()}

    print(fp4graph.compare(train, policies.split(","), seeds=seeds, folder=output, statistics=0))


if __name__ == "__main__":
    typer.run(main)
