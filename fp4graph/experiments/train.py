"""Training a task under a policy: the loop behind ``fp4graph train`` and behind every trial of a sweep."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp4graph
from fp4graph.errors import Error
from fp4graph.experiments.run import Outcome, Run, Validation
from fp4graph.experiments.tasks import Batch, Problem, Settings, task_named
from fp4graph.optim import StableSPAM
from fp4graph.policy import load_policy
from fp4graph.registry import default_registry
from fp4graph.runtime import runtime_of

__all__ = ["Outcome", "Run", "Validation", "train"]

#: Steps between looks at the loss: on an accelerator each look waits for it.
LOOK_EVERY = 10


def train(
    run: Run,
    *,
    report: Callable[[int, float], None] | None = None,
    directory: Path | None = None,
) -> Outcome:
    """Train a task and validate as it goes; two runs of equal ``run`` on one machine are equal.

    Args:
        run: what to train.
        report: called with (step, validation loss) after each validation; an exception it raises ends the training
            and passes through.
        directory: where the record of the run is kept.

    Raises:
        Error: the task, its data, the policy or the device is not what the run needs, or they do not fit.
    """
    task = task_named(run.task)
    policy = load_policy(run.policy)
    settings = task.settings(run)
    problem = task.make(settings)
    steps = settings.steps(problem)
    with torch.random.fork_rng():
        return _trained(settings, problem, policy, steps, report)


def _trained(
    settings: Settings,
    problem: Problem,
    policy: Any,
    steps: int,
    report: Callable[[int, float], None] | None,
) -> Outcome:
    model = problem.model.to(settings.device, torch.bfloat16 if settings.dtype == "bf16" else torch.float32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    fp4graph.apply(model, policy, backend=settings.backend, seed=settings.seed, total_steps=steps * settings.accumulate)
    optimizer = fp4graph.prepare_optimizer(model, _optimizer(model, settings))
    scaler = fp4graph.grad_scaler(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step, steps, settings))
    complexity = policy.complexity + (stable_spam_complexity() if settings.optimizer == "stablespam" else 0.0)

    torch.manual_seed(settings.seed)
    every = settings.run.validate_every or max(1, steps // settings.recipe.validations)
    history: list[Validation] = []
    losses: list[Tensor] = []
    batches = problem.batches(0)
    quantized = sites = 0
    diverged = False
    started = time.perf_counter()
    step = 0
    model.train()
    while step < steps and not diverged:
        losses.append(_step(model, problem, list(islice(batches, settings.accumulate)), optimizer, scaler, settings))
        scheduler.step()
        step += 1
        if step == 1:
            runtime = runtime_of(model)
            assert runtime is not None
            quantized, sites = sum(site.quantized for site in runtime.sites), len(runtime.sites)
        if step % LOOK_EVERY == 0 or step % every == 0 or step == steps:
            diverged = not math.isfinite(losses[-1].item())
        if not diverged and (step % every == 0 or step == steps):
            means = _evaluate(model, problem, settings)
            entry = Validation(step, torch.stack(losses).mean().item(), means["loss"], problem.summary(means))
            losses.clear()
            diverged = not math.isfinite(entry.validation_loss)
            history.append(entry)
            if report is not None and not diverged:
                report(step, entry.validation_loss)
    last = history[-1] if history and not diverged else Validation(step, math.nan, math.nan)
    return Outcome(
        validation_loss=last.validation_loss,
        train_loss=last.train_loss,
        metrics=last.metrics,
        steps=step,
        seconds=time.perf_counter() - started,
        diverged=diverged,
        complexity=complexity,
        quantized=quantized,
        sites=sites,
        parameters=parameters,
        history=tuple(history),
    )


def _step(
    model: nn.Module,
    problem: Problem,
    batches: list[Batch],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    settings: Settings,
) -> Tensor:
    """One step of the optimizer; the mean loss of its batches, 0-d."""
    total = torch.zeros((), device=settings.device)
    for batch in batches:
        loss = _measure(model, problem, batch, settings)["loss"].mean() / len(batches)
        torch.autograd.backward(scaler.scale(loss))
        total += loss.detach()
    if settings.clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return total


def _measure(model: nn.Module, problem: Problem, batch: Batch, settings: Settings) -> Mapping[str, Tensor]:
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    moved = tuple(x.to(settings.device, dtype if x.is_floating_point() else None, non_blocking=True) for x in batch)
    with torch.autocast(settings.device.type, torch.bfloat16, enabled=settings.autocast):
        return problem.measure(model, moved)


@torch.no_grad()
def _evaluate(model: nn.Module, problem: Problem, settings: Settings) -> dict[str, float]:
    """Means over the validation samples."""
    model.eval()
    parts: dict[str, list[Tensor]] = {}
    for batch in islice(problem.validation(), settings.validation_batches):
        size = len(batch[0])
        for name, values in _measure(model, problem, _filled(batch, settings.batch_size), settings).items():
            parts.setdefault(name, []).append(values[:size].double())
    model.train()
    if not parts:
        raise Error("there is nothing to validate on")
    return {name: torch.cat(values).mean().item() for name, values in parts.items()}


def _filled(batch: Batch, size: int) -> Batch:
    """A short batch repeated up to ``size`` samples, so that it meets the compiled shape."""
    if len(batch[0]) == size:
        return batch
    rows = torch.arange(size) % len(batch[0])
    return tuple(tensor[rows] for tensor in batch)


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Matrices decay; vectors do not."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "stablespam": StableSPAM,
    }
    options = dict(settings.run.optimizer_options)
    try:
        return kinds[settings.optimizer](groups, lr=settings.lr, **options)
    except (TypeError, ValueError) as error:
        raise Error(f"optimizer {settings.optimizer} does not take {options}: {error}") from error


def _factor(step: int, steps: int, settings: Settings) -> float:
    """Factor of the learning rate at a step: linear to 1, then constant or half a cosine down to a hundredth."""
    warmup = round(settings.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    return 0.01 + 0.99 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))) / 2


def stable_spam_complexity() -> float:
    """What the optimizer adds to Ω: as much as the technique that is the same."""
    return default_registry().techniques["stable_spam"]().complexity
