"""Compares searched policies with uniform and random ones of equal bits, by the held-out loss of two trained models.

Trains a ViT of two blocks (task ``digits``) and a LLaMA of two blocks (task ``text``) in fp32. A search on four batches
of training data chooses the formats of each linear under three budgets. Every policy is then measured by the loss on
held-out data, which only fprop affects. docs/findings.md has the results.

    python examples/findings/search.py --seeds 5
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import yaml

import fp4graph
from fp4graph.lab.candidates import Candidates
from fp4graph.lab.runs.run import Run
from fp4graph.lab.search import search
from fp4graph.lab.tasks import task_named

FORMATS = ("nvfp4", "mxfp4", "mxfp8", "bf16")
BUDGETS = (4.5, 6.0, 8.25)
STEPS, BATCHES, RANDOM, HELD_OUT = 300, 4, 10, 6


def trained(task: str, seed: int) -> tuple[Any, list[Any], list[Any]]:
    """Return a trained problem, unused batches of training data, and held-out batches."""
    problem = task_named(task).make(task_named(task).settings(Run(task, seed=seed)))
    stream = problem.batches(0)
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, STEPS)
    problem.model.train()
    for batch in itertools.islice(stream, STEPS):
        problem.measure(problem.model, batch)["loss"].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    problem.model.eval()
    return problem, list(itertools.islice(stream, BATCHES)), list(itertools.islice(problem.validation(), HELD_OUT))


def random_policies(candidates: Candidates, bits: float, seed: int) -> Iterator[fp4graph.Policy]:
    """Yield policies whose linears have random formats, and 0.97 to 1 times ``bits`` bits."""
    generator = np.random.default_rng(seed)
    use = candidates.uses["bits"]
    items, columns = np.arange(len(use)), np.argsort(use[0])  # the options, one for each format, sorted by bits
    while True:
        share = generator.dirichlet(np.ones(len(columns)), size=4096).cumsum(1)  # random shares of the formats
        choices = columns[(generator.random((4096, len(use), 1)) > share[:, None, :-1]).sum(-1)]
        total = use[items, choices].sum(1)
        for choice in choices[(0.97 * bits <= total) & (total <= bits)]:
            text = candidates.text(choice, np.zeros(use.shape), "random", "", ())
            yield fp4graph.load_policy(yaml.safe_load(text))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tasks", default="digits,text")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", fp4graph.PolicyWarning)
    for task in arguments.tasks.split(","):
        rows: dict[float, list[tuple[float, ...]]] = {}
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            problem, batches, held_out = trained(task, seed)

            def loss(model: Any, batch: Any, problem: Any = problem) -> torch.Tensor:
                return problem.measure(model, batch)["loss"].mean()  # type: ignore[no-any-return]

            def held(policy: Any, problem: Any = problem, held_out: Any = held_out, loss: Any = loss) -> float:
                model = fp4graph.apply(copy.deepcopy(problem.model), policy, backend="eager")
                with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                    return statistics.fmean(loss(model, batch).item() for batch in held_out)

            exact = held("bf16")
            uniform = {name: held(name) - exact for name in FORMATS[:-1]}
            candidates = Candidates.of(problem.model, loss, batches[0], FORMATS, apart=False)
            scores = None
            for bits in BUDGETS:
                result = search(problem.model, loss, batches, formats=FORMATS, bits=bits, scores=scores)
                scores = result.scores
                increase = held(result.policy) - exact
                policies = itertools.islice(random_policies(candidates, bits, seed), RANDOM)
                random = [held(policy) - exact for policy in policies]
                within = {"nvfp4", "mxfp4"} | ({"mxfp8"} if bits >= 8.25 else set())
                best = min(uniform[name] for name in within)
                rows.setdefault(bits, []).append((increase, best, statistics.median(random), result.budgets[0].reached))
                print(f"{task} seed {seed} loss {exact:.4f} bits {bits:g}: searched {increase:+.5f}, "
                      f"{len(result.policy.rules)} rules; {uniform}; random {sorted(random)}", flush=True)  # fmt: skip
        for bits, values in rows.items():
            searched, best, median, reached = (np.array(column) for column in zip(*values, strict=True))
            print(f"| {task} | {bits:g} | {reached.mean():.2f} | {searched.mean():+.5f} | {best.mean():+.5f} | "
                  f"{median.mean():+.5f} | {(searched < best).sum()} | {(searched < median).sum()} |")  # fmt: skip


if __name__ == "__main__":
    main()
