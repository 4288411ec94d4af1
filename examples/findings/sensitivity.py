"""Correlates the cheap estimates of sensitivity with measurements, for three small models and three seeds.

    OMP_NUM_THREADS=1 python examples/findings/sensitivity.py

The models are a ViT on handwritten digits, and a GPT-2 and a Qwen3-MoE on the bytes of Python's standard library. Each
model is trained in high precision, then measured on validation batches, one site and GEMM at a time.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import fp4graph
from fp4graph.lab.runs.run import Run
from fp4graph.lab.sensitivity import Sensitivity
from fp4graph.lab.tasks import Problem, task_named

_TEXT: dict[str, Any] = {"vocab_size": 256, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


def gpt() -> nn.Module:
    """Return a GPT-2 of 2 blocks, whose linear layers are Conv1D."""
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=64, **_TEXT))


def qwen() -> nn.Module:
    """Return a Qwen3-MoE of 2 blocks, each with 4 experts, 2 of them for each token."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 32}
    parts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts_per_tok=2, **sizes, **parts, **_TEXT))


#: The task of each model, the factory of the model (None for the task's), and the steps of its training.
MODELS: dict[str, tuple[str, Any, int]] = {
    "ViT": ("digits", None, 200),
    "GPT": ("text", gpt, 150),
    "Qwen-MoE": ("text", qwen, 150),
}


def trained(name: str, seed: int) -> tuple[nn.Module, Problem]:
    """Return a model trained in high precision, and its problem."""
    task, factory, steps = MODELS[name]
    problem = task_named(task).make(task_named(task).settings(Run(task, seed=seed, device="cpu", batch_size=32)))
    torch.manual_seed(seed)
    model: nn.Module = factory() if factory else problem.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for batch in islice(problem.batches(0), steps):
        loss_of(problem)(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), problem


def loss_of(problem: Problem) -> Any:
    """Return a function that computes the mean loss of a model on a batch."""

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return problem.measure(model, batch)["loss"].mean()

    return loss


def measured(name: str, seed: int, policies: list[str], file: Path) -> Sensitivity:
    """Return the sensitivity of a model by site and GEMM; ``file`` keeps it."""
    if not file.exists():
        model, problem = trained(name, seed)
        held_out = [tuple(x[:16] for x in batch) for batch in islice(problem.validation(), 4)]
        terms = 16 * (problem.tokens_per_sample - 1 or 1)  # every token except the first is predicted
        by = ("site", "gemm")
        fp4graph.sensitivity(model, loss_of(problem), held_out, policies, by=by, terms=terms).to_json(file)
    return Sensitivity.from_json(file)


def main(
    policies: Annotated[str, typer.Option(help="Names, separated by commas.")] = "mxfp4,nvfp4",
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    output: Annotated[Path, typer.Option(help="Folder of the scores.")] = Path("runs/findings/sensitivity"),
) -> None:
    table = Table(title="Spearman's rank correlation of estimate and measurement", title_justify="left")
    for column in ("model", "policy", "measure", "units", *(f"seed {seed}" for seed in range(seeds))):
        table.add_column(column)
    for name in MODELS:
        names = policies.split(",")
        results = [measured(name, seed, names, output / f"{name}-{'-'.join(names)}-{seed}.json")
                   for seed in range(seeds)]  # fmt: skip
        for policy, measure in results[0].correlation:
            units = len(results[0].ranking(policy, measure))
            values = (f"{result.correlation[policy, measure]:.2f}" for result in results)
            table.add_row(name, policy, measure, str(units), *values)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
