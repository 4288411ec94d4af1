"""Training a task under a policy: the loop behind ``fp4graph train`` and behind every trial of a sweep.

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
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from importlib.metadata import version
from fp4graph.model.api import apply
from fp4graph.training import grad_scaler, prepare_optimizer
from fp4graph.lab import Statistics
from fp4graph.errors import Error
from fp4graph.lab.runs.run import Outcome, Run, Validation
from fp4graph.lab.runs.folder import RunFolder
from fp4graph.lab.tasks import Batch, Problem, Settings, placed, task_named
from fp4graph.model.runtime import runtime_of
from fp4graph.optim import StableSPAM
from fp4graph.policy import Policy, load_policy
from fp4graph.technique.registry import default_registry
from fp4graph.training import checkpoint

__all__ = ["Outcome", "Run", "Validation", "train"]

#: Steps between looks at the loss where each look waits for an accelerator.
LOOK_EVERY = 10
#: First steps that are left out of the time per step: they compile, and fill caches.
WARM_UP_STEPS = 5
#: Lines of metrics between two validations are no more than this many in all.
LINES = 1000
#: What a checkpoint's progress holds beside the history.
COUNTS = "step", "seconds", "sites", "quantized"
#: Validation samples whose way through the model is compared from step to step.
PROBE = 8


def train(
    run: Run,
    *,
    report: Callable[[int, float], None] | None = None,
    directory: Path | None = None,
    resume: bool = False,
    checkpoints: bool = True,
    tick: Callable[[int, int, float], None] | None = None,
    watch: Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]] | None = None,
    statistics: int | None = None,
) -> Outcome:
    """Train a task and validate as it goes; two runs of equal ``run`` on one machine are equal.

    The caller's random numbers are left alone; what torch.compile has compiled in this process is forgotten.

    Args:
        run: what to train.
        report: called with (step, validation loss) after each validation; an exception that it raises ends the training
            and passes through.
        directory: folder for the files of the run (:mod:`fp4graph.lab.runs.folder`).
        resume: go on from the checkpoint in ``directory``, if there is one, to the last bit as if nothing had happened.
        checkpoints: write one into ``directory`` after each validation.
        tick: called with (step, steps of the whole training, last training loss) whenever the loss is looked at.
        watch: called with the prepared model and optimizer; returns a context, entered while the training lasts.
        statistics: steps from one record of what quantization does at every site to the next
            (:class:`fp4graph.lab.Statistics`), kept in ``directory / "statistics"`` and TensorBoard's events.

    Raises:
        Error: the task, its data, the policy or the device is not what the run needs, they do not fit, or
            ``directory`` cannot be written.
    """
    task = task_named(run.task)
    policy = load_policy(run.policy)
    settings = task.settings(run)
    folder = RunFolder(directory) if directory is not None else None
    if statistics is not None and directory is None:
        raise Error("statistics are kept in the folder of the run; give one")
    with torch.random.fork_rng():
        training = Training(settings, task.make(settings), policy)
        if statistics is not None and not 1 <= statistics <= training.steps:
            raise Error(
                f"statistics at every {statistics}th step of {training.steps} record nothing; "
                f"give a number from 1 to {training.steps}"
            )
        probe = training.probe() if statistics is not None else None  # before the state of random numbers is set
        with ExitStack() as watching:
            if folder is not None:
                watching.callback(folder.close)
                folder.begin(training.description(), resume=resume)
                if resume:
                    if folder.checkpoint.exists():
                        training.load(folder.checkpoint)
                    folder.keep_until(training.step)  # of a run that was killed before its first checkpoint, nothing
            trained = training.model, training.optimizer
            if watch is not None:
                watching.enter_context(watch(*trained))
            if statistics is not None and folder is not None:
                span = min(10 * statistics, training.steps)  # weights are followed at the end of a short training too
                watching.enter_context(
                    Statistics(
                        *trained, every=statistics, window=min(30, span), window_every=span, probe=probe,
                        directory=folder.path / "statistics", stream=folder.events, step=training.step,
                    )
                )  # fmt: skip
            return training.go_on(folder, report, tick, checkpoints)


class Training:
    """A training in progress, of a problem whose model is applied here."""

    def __init__(self, settings: Settings, problem: Problem, policy: Policy) -> None:
        if problem.blocks is not None:
            policy = placed(policy, problem.blocks)
        self.settings, self.problem, self.policy = settings, problem, policy
        self.steps = settings.total_steps(problem)
        self.every = settings.run.validate_every or math.ceil(self.steps / settings.validations)
        self.model = problem.model.to(settings.device)
        if settings.parameter_dtype != torch.float32:
            self.model.to(settings.parameter_dtype)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        forwards = self.steps * settings.accumulate
        compiled: dict[str, Any] = {"backend": settings.backend, "mode": settings.run.mode}
        apply(self.model, policy, **compiled, seed=settings.seed, total_forwards=forwards)
        self.optimizer = prepare_optimizer(self.model, _optimizer(self.model, settings))
        self.scaler = grad_scaler(self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, self.steps, settings)
        )
        #: Ω: the policy's, and what the optimizer adds as the technique that is the same would.
        self.complexity = policy.complexity
        if settings.optimizer == "stablespam":
            self.complexity += default_registry().techniques["stable_spam"]().complexity
        self.step = 0
        self.largest_norm = torch.zeros((), device=settings.device)  # of the gradient, since the last line of metrics
        self.seconds = 0.0
        self.step_seconds: list[float] = []
        self.history: list[Validation] = []
        self.sites = self.quantized = 0

    def description(self) -> dict[str, Any]:
        """Return the content of ``run.json``."""
        return {
            "policy": self.policy.to_yaml(),
            "policy_name": self.policy.name,
            "complexity": self.complexity,
            "parameters": self.parameters,
            "versions": {
                "fp4graph": version("fp4graph"),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
            "run": self.settings.run.to_json(),
            "settings": self.settings.to_json(),
            "steps": self.steps,
        }

    def load(self, file: Path) -> None:
        """Restore the state that :meth:`save` wrote."""
        progress = checkpoint.load(file, self.model, self.optimizer, scaler=self.scaler, scheduler=self.scheduler)
        try:
            for name in COUNTS:
                setattr(self, name, progress[name])
            self.history = [Validation(**entry) for entry in progress["history"]]
        except (KeyError, TypeError) as error:
            raise Error(f"{file} was not written by fp4graph train: its progress lacks {error}") from None

    def save(self, file: Path) -> None:
        progress = {name: getattr(self, name) for name in COUNTS}
        progress["history"] = [dataclasses.asdict(entry) for entry in self.history]
        states: dict[str, Any] = {"scaler": self.scaler, "scheduler": self.scheduler, "progress": progress}
        checkpoint.save(file, self.model, self.optimizer, **states)

    def probe(self) -> Callable[[], object]:
        """Return a function that runs the model on a few validation samples, the same each time."""
        batch = next(iter(self.problem.validation()), None)
        if batch is None:
            raise Error(f"task {self.settings.run.task!r} has no validation data")
        few = tuple(tensor[:PROBE] for tensor in batch)
        return lambda: self._measure(few)

    def go_on(
        self,
        folder: RunFolder | None,
        report: Callable[[int, float], None] | None,
        tick: Callable[[int, int, float], None] | None,
        checkpoints: bool,
    ) -> Outcome:
        """Train to the last step, or until a loss is not finite."""
        settings = self.settings
        if not self.step:
            torch.manual_seed(settings.seed)
        batches = self.problem.batches(self.step * settings.accumulate)
        look_every = 1 if settings.device.type == "cpu" else LOOK_EVERY
        line_every = max(1, self.steps // LINES)
        since_validation: list[Tensor] = []
        since_line: list[Tensor] = []
        started = time.perf_counter() - self.seconds
        diverged = False
        self.model.train()
        while self.step < self.steps and not diverged:
            timed = not self.step_seconds or (self.step + 1) % look_every == 0
            group = list(islice(batches, settings.accumulate))
            if timed:
                _wait(settings.device)  # before and after, so that the clock means something
            begin = time.perf_counter()
            loss = self._step(group)
            if timed:
                _wait(settings.device)
                self.step_seconds.append(time.perf_counter() - begin)
            self.step += 1
            since_validation.append(loss)
            since_line.append(loss)
            if self.step == 1:
                runtime = runtime_of(self.model)
                assert runtime is not None
                # Generations, recompilations and other modes capture a product again.
                places = {(site.module, site.op, site.occurrence): site.quantized for site in runtime.sites}
                self.sites, self.quantized = len(places), sum(places.values())
            validates = self.step % self.every == 0 or self.step == self.steps
            if self.step % look_every == 0 or validates:
                diverged = not math.isfinite(loss.item())
                if tick is not None:
                    tick(self.step, self.steps, loss.item())
            if folder is not None and (self.step % line_every == 0 or diverged):
                self.seconds = time.perf_counter() - started
                rate = self.optimizer.param_groups[0]["lr"]
                values = {"gradient_norm": self.largest_norm.item(), "lr": float(rate), "seconds": self.seconds}
                folder.line(self.step, train_loss=_mean(since_line), **values)
                since_line.clear()
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
                    if checkpoints and not diverged:
                        self.save(folder.checkpoint)
                if report is not None and not diverged:
                    report(self.step, entry.validation_loss)
        self.seconds = time.perf_counter() - started
        outcome = self._outcome(diverged)
        if folder is not None:
            folder.end(outcome)
        return outcome

    def _step(self, batches: list[Batch]) -> Tensor:
        """Make one step of the optimizer, and return the mean loss of its batches, 0-d."""
        total = torch.zeros((), device=self.settings.device)
        for batch in batches:
            loss = self._measure(batch)["loss"].mean() / len(batches)
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

    def _measure(self, batch: Batch) -> Mapping[str, Tensor]:
        device = self.settings.device
        moved = tuple(tensor.to(device, non_blocking=True) for tensor in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.autocast):
            return self.problem.measure(self.model, moved)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Return means over the validation samples, quantized as in training."""
        self.model.eval()
        parts: dict[str, list[Tensor]] = {}
        for batch in islice(self.problem.validation(), self.settings.validation_batches):
            for name, values in self._measure(_filled(batch, self.settings.batch_size)).items():
                parts.setdefault(name, []).append(values[: len(batch[0])].double())
        self.model.train()
        if not parts:
            raise Error(f"task {self.settings.run.task!r} has no validation data")
        return {name: torch.cat(values).mean().item() for name, values in parts.items()}

    def _outcome(self, diverged: bool) -> Outcome:
        last = Validation(self.step, math.nan, math.nan) if diverged else self.history[-1]
        timed = self.step_seconds[WARM_UP_STEPS:]
        return Outcome(
            validation_loss=last.validation_loss,
            train_loss=last.train_loss,
            metrics=last.metrics,
            steps=self.step,
            diverged=diverged,
            **{name: getattr(self, name) for name in ("seconds", "complexity", "quantized", "sites", "parameters")},
            history=tuple(self.history),
            first_step_seconds=self.step_seconds[0] if self.step_seconds else None,
            step_seconds=median(timed) if timed else None,
        )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mean(losses: list[Tensor]) -> float:
    return torch.stack(losses).mean().item()


def _filled(batch: Batch, size: int) -> Batch:
    """Repeat a short batch up to ``size`` samples, so that it has the compiled shape."""
    if len(batch[0]) == size:
        return batch
    rows = torch.arange(size) % len(batch[0])
    return tuple(tensor[rows] for tensor in batch)


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Make the optimizer. Vectors, and parameters that the model exempts (position embeddings), do not decay."""
    named: Callable[[], set[str]] = getattr(model, "no_weight_decay", set)  # timm's
    exempt = named()
    decays = [p for name, p in model.named_parameters() if p.dim() >= 2 and name not in exempt]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or name in exempt]
    groups = [{"params": decays, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "stablespam": StableSPAM,
    }  # fmt: skip
    options = dict(settings.run.optimizer_options)
    try:
        return kinds[settings.optimizer]([group for group in groups if group["params"]], lr=settings.lr, **options)
    except (TypeError, ValueError) as error:
        raise Error(f"optimizer {settings.optimizer} does not take {options}: {error}") from error


def learning_rate_factor(step: int, steps: int, settings: Settings) -> float:
    """Return the factor of the learning rate at a step: linear to 1, then constant or a cosine to a hundredth."""
    warmup = round(settings.warmup * steps)
    if settings.schedule == "timm":
        first = 1e-6 / settings.lr
        return first + (1 - first) * step / warmup if step < warmup else _cosine(step, steps)
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    return _cosine(step - warmup, max(steps - warmup, 1))


def _cosine(step: int, steps: int) -> float:
    """Half a cosine from 1 down to a hundredth."""
    return 0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2
