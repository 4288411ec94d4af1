"""Trains a task under a policy: the loop of ``fp4graph train`` and of every trial of a sweep.

>>> outcome = train(Run("gaussian", policy="nvfp4", optimizer="stablespam"))
>>> outcome.validation_loss, outcome.complexity
"""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.lab import Statistics
from fp4graph.lab.data.images import seeded
from fp4graph.lab.data.loading import Batch
from fp4graph.lab.runs.folder import CHECKPOINT, RunFolder, read_run
from fp4graph.lab.runs.run import Outcome, Run, Validation
from fp4graph.lab.tasks import Settings, placed, task_named
from fp4graph.model.api import apply
from fp4graph.model.runtime import require_runtime
from fp4graph.policy import load_policy
from fp4graph.technique.registry import default_registry
from fp4graph.training import checkpoint, grad_scaler, prepare_optimizer
from fp4graph.training.stable_spam import StableSPAM

__all__ = ["Outcome", "Run", "Validation", "restored", "train"]

#: Steps between looks at the loss on an accelerator, where each look waits for the device.
LOOK_EVERY = 10
#: About how many lines of training metrics a whole run writes; validations add lines of their own.
LINES = 1000
#: The counts in a checkpoint's progress, which also holds the history and what the next line of metrics needs.
COUNTS = "step", "seconds", "sites", "quantized"
#: The number of validation samples on which statistics are measured (Training.probe).
PROBE = 8
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "stablespam": StableSPAM,
}  # fmt: skip
#: A Tick gets (step, steps of the whole training, last training loss), a Report (step, validation loss).
Tick = Callable[[int, int, float], None]
Report = Callable[[int, float], None]
Watch = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]


def train(
    run: Run, *, report: Report | None = None, directory: Path | None = None, resume: bool = False,
    tick: Tick | None = None, watch: Watch | None = None, statistics: int | None = None, stream: Any = None,
) -> Outcome:  # fmt: skip
    """Train and validate a task; equal runs give equal results on one machine.

    The caller's random generators, torch's, NumPy's and Python's, keep their states.

    Args:
        report: called after each validation; an exception that it raises ends the training and passes through.
        directory: folder for the files of the run, with a checkpoint after each validation.
        resume: continue from the checkpoint in ``directory``, if there is one, bit for bit as if uninterrupted.
        tick: called whenever the loss is read.
        watch: called with the prepared model and optimizer; returns a context that surrounds the training.
        statistics: the number of steps between records of :class:`fp4graph.lab.Statistics`, which go to
            ``directory / "statistics"`` and to the streams.
        stream: further destinations of the metrics in ``directory``, as for :class:`fp4graph.lab.Statistics`; by
            default TensorBoard's events in ``directory``, if TensorBoard is installed.

    Raises:
        Error: a task, data, policy or device is missing or does not fit, or ``directory`` cannot be written.
    """
    if statistics is not None and directory is None:
        raise Error("statistics are kept in the folder of the run; give directory=")
    folder = RunFolder(directory, stream) if directory is not None else None
    with torch.random.fork_rng(), seeded(run.seed), ExitStack() as watching:
        training = Training(run)
        if statistics is not None and not 1 <= statistics <= training.steps:
            raise Error(
                f"statistics every {statistics} steps record nothing in a training of {training.steps} steps; "
                f"give a number from 1 to {training.steps}"
            )
        probe = training.probe() if statistics is not None else None  # before the state of random numbers is set
        if folder is not None:
            watching.callback(folder.close)
            folder.begin(training.description(), resume=resume)
            if resume and folder.checkpoint.exists():
                training.load(folder.checkpoint)
            if resume:
                folder.keep_until(training.step)  # step 0 if a kill came before the first checkpoint
        if watch is not None:
            watching.enter_context(watch(training.model, training.optimizer))
        if statistics is not None and folder is not None:
            span = min(10 * statistics, training.steps)  # a short training gets a window at its end
            watching.enter_context(
                Statistics(
                    training.model, training.optimizer, every=statistics, window=min(30, span), window_every=span,
                    probe=probe, directory=folder.path / "statistics", stream=folder.stream, step=training.step,
                )
            )  # fmt: skip
        return training.proceed(folder, report, tick)


def restored(folder: Path) -> Training:
    """Return the training in ``folder`` with the model of its last checkpoint, on the CPU and in evaluation mode.

    Raises:
        Error: the folder holds no run, or no checkpoint.
    """
    run = Run.from_json(read_run(folder)["run"] | {"device": "cpu", "backend": "eager"})
    with torch.random.fork_rng():
        training = Training(run)
    if not (folder / CHECKPOINT).exists():
        raise Error(f"{folder} holds no {CHECKPOINT}: the run ended before its first validation; train it again")
    checkpoint.load(folder / CHECKPOINT, training.model)
    training.model.eval()
    return training


class Training:
    """A training in progress: a problem's model under the policy, its optimizer, and the counts so far."""

    def __init__(self, run: Run) -> None:
        self.policy, task = load_policy(run.policy), task_named(run.task)
        self.run, self.settings = run, (settings := task.settings(run))
        self.problem = problem = task.make(settings)
        if problem.blocks is not None:
            self.policy = placed(self.policy, problem.blocks)
        self.steps = settings.total_steps(problem)
        self.every = settings.validate_every or math.ceil(self.steps / settings.validations)
        self.device = torch.device(settings.device)
        self.model = problem.model.to(self.device, settings.parameter_dtype)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        compiled: dict[str, Any] = {"backend": settings.backend, "mode": settings.mode}
        forwards = self.steps * settings.accumulate
        apply(self.model, self.policy, **compiled, seed=settings.seed, total_forwards=forwards)
        self.optimizer = prepare_optimizer(self.model, _optimizer(self.model, settings))
        self.scaler = grad_scaler(self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, self.steps, settings)
        )
        #: Ω of the policy; StableSPAM counts like the technique stable_spam.
        self.complexity = self.policy.complexity
        if settings.optimizer == "stablespam":
            self.complexity += default_registry().techniques["stable_spam"]().complexity
        self.step = self.sites = self.quantized = 0
        self.since_line: list[Tensor] = []  # the losses since the last line of metrics
        self.largest_norm = torch.zeros((), device=self.device)  # of gradients since then
        self.seconds = 0.0
        self.history: list[Validation] = []

    def description(self) -> dict[str, Any]:
        """Return the content of ``run.json``."""
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        return {
            "policy": self.policy.to_yaml(), "policy_name": self.policy.name, "complexity": self.complexity,
            "parameters": self.parameters, "versions": {"fp4graph": version("fp4graph"), **versions},
            "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
            "run": self.run.to_json(), "settings": self.settings.to_json(), "steps": self.steps,
        }  # fmt: skip

    def load(self, file: Path) -> None:
        """Restore the state that :meth:`save` wrote."""
        progress = checkpoint.load(file, self.model, self.optimizer, scaler=self.scaler, scheduler=self.scheduler)
        try:
            for name in COUNTS:
                setattr(self, name, progress[name])
            self.history = [Validation(**entry) for entry in progress["history"]]
            self.since_line = [torch.tensor(loss, device=self.device) for loss in progress["since_line"]]
            self.largest_norm = torch.tensor(progress["largest_norm"], device=self.device)
        except (KeyError, TypeError) as error:
            raise Error(
                f"{file} was not written by fp4graph train of this version: its progress lacks {error}"
            ) from None

    def save(self, file: Path) -> None:
        progress = {name: getattr(self, name) for name in COUNTS}
        progress["history"] = [dataclasses.asdict(entry) for entry in self.history]
        progress["since_line"] = [loss.item() for loss in self.since_line]
        progress["largest_norm"] = self.largest_norm.item()
        states: dict[str, Any] = {"scaler": self.scaler, "scheduler": self.scheduler, "progress": progress}
        checkpoint.save(file, self.model, self.optimizer, **states)

    def probe(self) -> Callable[[], object]:
        """Return a function that runs the model on a few validation samples, the same each time."""
        batch = next(iter(self.problem.validation()), None)
        if batch is None:
            raise Error(f"task {self.run.task!r} has no validation data")
        samples = tuple(tensor[:PROBE] for tensor in batch)
        return lambda: self.measure(samples)

    def proceed(self, folder: RunFolder | None, report: Report | None, tick: Tick | None) -> Outcome:
        """Train to the last step, or until a loss is not finite."""
        settings = self.settings
        if not self.step:
            torch.manual_seed(settings.seed)
        batches = self.problem.batches(self.step * settings.accumulate)
        look_every = 1 if self.device.type == "cpu" else LOOK_EVERY
        line_every = max(1, self.steps // LINES)
        since_validation: list[Tensor] = []
        started = time.perf_counter() - self.seconds
        diverged = False
        self.model.train()
        while self.step < self.steps and not diverged:
            loss = self._step(list(islice(batches, settings.accumulate)))
            self.step += 1
            since_validation.append(loss)
            self.since_line.append(loss)
            if self.step == 1:
                # Generations, recompilations and other modes capture a GEMM again; count it once.
                sites = require_runtime(self.model, "train").sites
                places = {(site.module, site.op, site.occurrence): site.quantized for site in sites}
                self.sites, self.quantized = len(places), sum(places.values())
            validates = self.step % self.every == 0 or self.step == self.steps
            if self.step % look_every == 0 or validates:
                diverged = not math.isfinite(loss.item())
                if tick is not None:
                    tick(self.step, self.steps, loss.item())
            self.seconds = time.perf_counter() - started
            if folder is not None and (self.step % line_every == 0 or diverged):
                rate = self.optimizer.param_groups[0]["lr"]
                values = {"gradient_norm": self.largest_norm.item(), "lr": float(rate), "seconds": self.seconds}
                folder.line(self.step, train_loss=_mean(self.since_line), **values)
                self.since_line.clear()
                self.largest_norm.zero_()
            self.scheduler.step()
            if validates and not diverged:
                means = self._evaluate()
                entry = Validation(self.step, _mean(since_validation), means["loss"], self.problem.summary(means))
                since_validation.clear()
                self.history.append(entry)
                diverged = not math.isfinite(entry.validation_loss)
                self.seconds = time.perf_counter() - started
                if folder is not None:
                    losses = {"train_loss": entry.train_loss, "validation_loss": entry.validation_loss}
                    folder.line(self.step, **losses, **entry.metrics)
                if folder is not None and not diverged:
                    self.save(folder.checkpoint)
                if report is not None and not diverged:
                    report(self.step, entry.validation_loss)
        last = Validation(self.step, math.nan, math.nan) if diverged else self.history[-1]
        outcome = Outcome(
            last.validation_loss, last.train_loss, last.metrics, self.step, self.seconds, diverged, self.complexity,
            self.quantized, self.sites, self.parameters, tuple(self.history),
        )  # fmt: skip
        if folder is not None:
            folder.end(outcome)
        return outcome

    def _step(self, batches: list[Batch]) -> Tensor:
        """Do one optimizer step, and return the mean loss of its batches, 0-d."""
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss = self.measure(batch)["loss"].mean() / len(batches)
            torch.autograd.backward(self.scaler.scale(loss))
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self.largest_norm = torch.maximum(self.largest_norm, norm)
        if self.settings.clip:
            nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return total

    def autocast(self) -> torch.autocast:
        """Return the context in which the model is called."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.autocast)

    def measure(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the loss and the metrics of each sample of a batch."""
        moved = tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)
        with self.autocast():
            return self.problem.measure(self.model, moved)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Return means over the validation samples, under the policy."""
        self.model.eval()
        parts: dict[str, list[Tensor]] = {}
        for batch in islice(self.problem.validation(), self.settings.validation_batches):
            # A short batch is repeated, so that it has the compiled shape.
            rows = torch.arange(self.settings.batch_size) % len(batch[0])
            full = batch if len(batch[0]) == len(rows) else tuple(tensor[rows] for tensor in batch)
            for name, values in self.measure(full).items():
                parts.setdefault(name, []).append(values[: len(batch[0])].double())
        self.model.train()
        if not parts:
            raise Error(f"task {self.run.task!r} has no validation data")
        return {name: torch.cat(values).mean().item() for name, values in parts.items()}


def _mean(losses: list[Tensor]) -> float:
    return torch.stack(losses).mean().item()


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Make the optimizer. Vectors, and parameters that the model exempts (position embeddings), do not decay."""
    exempt: set[str] = getattr(model, "no_weight_decay", set)()  # a method of timm's models
    decays: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        decays[parameter.dim() >= 2 and name not in exempt].append(parameter)
    rates = {True: settings.weight_decay, False: 0.0}
    groups = [{"params": params, "weight_decay": rates[kind]} for kind, params in decays.items() if params]
    options = dict(settings.optimizer_options)
    try:
        return OPTIMIZERS[settings.optimizer](groups, lr=settings.lr, **options)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Error(f"optimizer {settings.optimizer} does not take {options}: {error}") from error


def learning_rate_factor(step: int, steps: int, settings: Settings) -> float:
    """Return the learning rate's factor at a step: a linear warm-up to 1, then constant or a cosine to a hundredth.

    The cosine of ``timm`` begins at step 0 and not after the warm-up.
    """
    warmup = round(settings.warmup * steps)
    if settings.schedule == "timm":
        first = 1e-6 / settings.lr
        return first + (1 - first) * step / warmup if step < warmup else _cosine(step, steps)
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 if settings.schedule == "constant" else _cosine(step - warmup, max(steps - warmup, 1))


def _cosine(step: int, steps: int) -> float:
    """Return half a cosine, from 1 down to a hundredth."""
    return 0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2
