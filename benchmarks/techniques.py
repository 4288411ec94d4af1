"""Techniques at the optimizer's step, beside torch.optim.AdamW alone on the same parameters.

``StableSPAM`` is the optimizer, ``stable_spam`` the technique around AdamW. ``q_ema`` updates the moving average of
each weight. ``q_ramping`` is measured in both its phases: detection quantizes every weight once a step; ramping, the
longer phase, copies each weight and its moments around the step, here with some N > 1 in every weight. Gradients are
fixed and reverse their sign from step to step, so that weights oscillate as late in a training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import nn

import fp4graph
from benchmarks import command, models, tables
from benchmarks.command import Cases, Settings
from benchmarks.models import MODELS, TOTAL_STEPS
from benchmarks.timing import alternate, synchronize
from fp4graph.model.runtime import require_runtime

ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
#: Steps of Q-Ramping's detection before it ramps, and options of both its phases, of which one lasts.
DETECTION = 30
Q_RAMPING: dict[str, Any] = {"t_update": TOTAL_STEPS, "n_max": 100}
COLUMNS = (
    *tables.cases("model", "what"),
    *tables.RATIO,
    tables.milliseconds("seconds", "ms"),
    tables.milliseconds("baseline_seconds", "AdamW, ms"),
)


class Stepping:
    """An optimizer of a model's parameters, stepped with fixed gradients."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        self._given = [(p, p.grad.clone()) for p in model.parameters() if p.grad is not None]
        self._sign = 1.0

    def step(self) -> float:
        """Return the seconds of one step; gradients, which techniques may change, are restored before it."""
        self._sign = -self._sign
        for parameter, gradient in self._given:
            torch.mul(gradient, self._sign, out=parameter.grad)
        device = self._given[0][0].device
        synchronize(device)
        begin = time.perf_counter()
        self.optimizer.step()
        synchronize(device)
        return time.perf_counter() - begin


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def under(model: nn.Module, technique: str, **settings: int) -> Stepping:
    """Return AdamW with ``technique`` acting around it, on TetraJet's quantizers."""
    policy = {"version": 1, "name": technique, "extends": "tetrajet", "techniques": [{technique: settings}]}
    optimizer = adamw(model)
    return Stepping(models.under(model, policy, "eager", optimizer), optimizer)


def ramping(model: nn.Module) -> Stepping:
    """Return Q-Ramping after its first detection."""
    stepping = under(model, "q_ramping", **Q_RAMPING, t0=DETECTION)
    for _ in range(DETECTION):
        stepping.step()
    for weight in require_runtime(model, "techniques").weights:
        if "fp4graph.q_ramping.factor" not in stepping.optimizer.state[weight.parameter]:
            raise RuntimeError(f"no element of {weight.name} oscillates, so the benchmark would not measure ramping")
    return stepping


#: Builders of the measured optimizers, by name.
WHAT: dict[str, Callable[[nn.Module], Stepping]] = {
    "StableSPAM": lambda model: Stepping(model, fp4graph.optim.StableSPAM(model.parameters(), **ADAMW)),
    "stable_spam": partial(under, technique="stable_spam"),
    "q_ema": partial(under, technique="q_ema"),
    "q_ramping, detection": partial(under, technique="q_ramping", **Q_RAMPING, t0=TOTAL_STEPS - 100),
    "q_ramping, ramping": ramping,
}


def measure(model: str, what: str, settings: Settings) -> dict[str, Any]:
    torch.manual_seed(0)
    plain, trained = (MODELS[model].make().to(settings.device) for _ in range(2))
    baseline, stepping = Stepping(plain, adamw(plain)), WHAT[what](trained)
    for _ in range(3):  # the first steps create the state
        baseline.step(), stepping.step()
    return alternate(baseline.step, stepping.step, settings.patience).figures


def cases(
    settings: Settings,
    models: command.Models = "deit-tiny,llama-60m",
    what: Annotated[str, typer.Option(help=f"Any of {'; '.join(WHAT)}, separated by semicolons; all.")] = "all",
) -> Cases:
    for model in command.choices(models, MODELS):
        for optimizer in command.choices(what, WHAT, ";"):
            yield {"model": model, "what": optimizer}, partial(measure, model, optimizer, settings)


benchmark = command.Benchmark(
    "techniques", "One optimizer step, time to that of AdamW", COLUMNS, cases, without=("backend",), repeats=21
)
app = benchmark.app

if __name__ == "__main__":
    app()
