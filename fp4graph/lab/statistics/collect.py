"""Statistics of every quantized site, collected while the model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from fp4graph.errors import Error, suggest
from fp4graph.lab.statistics import storage
from fp4graph.lab.statistics.metrics import METRICS
from fp4graph.lab.statistics.recordings import Moving, OperandRecording, OutputRecording, matches
from fp4graph.model import state
from fp4graph.model.distributed import is_distributed, rank, unwrapped
from fp4graph.model.evaluation import evaluating
from fp4graph.model.runtime import Runtime, require_runtime, runtime_of
from fp4graph.model.weight import Weight
from fp4graph.numerics.sharding import fsdp_modules
from fp4graph.numerics.words import describe
from fp4graph.policy.match import misread_range


class Statistics:
    """Records statistics of every quantized site of ``model``, at every ``every``-th step of ``optimizer``.

    >>> with fp4graph.lab.Statistics(model, optimizer, every=50, directory="runs/a/statistics"):
    ...     train(model, optimizer)

    An observed step draws the same noise and computes the same values as without statistics, but runs uncompiled. The
    very first step, the first step of a phase, and evaluations are not observed. Only rank 0 records.

    Args:
        model, optimizer: an applied model, and its prepared optimizer, whose steps are counted.
        every: the number of steps between records of the operands.
        directory: holds ``statistics.jsonl`` (:mod:`fp4graph.lab.statistics.storage`), to which lines are appended.
        metrics: names among METRICS; by default all, but the rate of change of Y needs a ``probe``.
        sites: names of modules to observe, or patterns such as "blocks.0.attn.*"; "*" is all.
        window: the number of steps over which weights are followed. A window ends at each ``window_every``-th step (by
            default ten times ``every``, but at least ``window``).
        sample: the approximate number of elements measured of an operand, as whole lines; None for all.
        probe: inputs on which the rate of change of Y is measured, over the last :attr:`PROBED` steps of each window: a
            tensor, a tuple of positional inputs, a dict of named inputs, or a function that calls the model.
        step: the number of steps that a resumed training has done before; by default the optimizer's count.
        stream: a further destination of each record's numbers, or a list: a ``SummaryWriter`` of TensorBoard or a
            folder for one, a run of wandb, the module ``mlflow``, or a function of a step and a dict of values.

    Raises:
        Error: the model is not applied or is under ``fully_shard``, the optimizer runs no hooks, a metric or a site is
            unknown, or a pattern has a range of numbers such as ``[0-11]``, which is a set of characters. Later,
            ``optimizer.step()`` raises an Error if the disk is full.
    """

    #: Steps at the end of a window over which outputs are compared; each costs a forward of the probe.
    PROBED = 5

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 50,
        directory: str | PathLike[str],
        metrics: Iterable[str] | None = None,
        sites: str | Iterable[str] = "*",
        window: int = 30,
        window_every: int | None = None,
        sample: int | None = 1 << 12,
        probe: torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[], object] | None = None,
        step: int | None = None,
        stream: Any = (),
    ) -> None:
        for name, value in (("every", every), ("window", window), ("window_every", window_every), ("sample", sample)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")
        self._runtime = require_runtime(model, "Statistics")
        if not getattr(type(optimizer).step, "hooked", False):
            raise Error(
                f"{type(optimizer).__name__} runs no hooks around its step(), which statistics need to count steps; if "
                "it wraps an optimizer, give the wrapped optimizer"
            )
        self._model, self._optimizer = unwrapped(model), optimizer
        if fsdp_modules(self._model):  # the first process alone would gather weights, and wait for the others
            raise Error("sites of a model under fully_shard cannot be observed; use DistributedDataParallel")
        self._probe = (probe,) if isinstance(probe, torch.Tensor) else probe
        self._metrics = _checked(metrics)
        self._patterns = (sites,) if isinstance(sites, str) else tuple(sites)
        if misread := misread_range(self._patterns):
            raise Error(f"sites: {misread}")
        planned = [entry.fqn or "(root)" for entry in state.states(self._model) if entry.has_sites]
        if planned:  # without the number after #, which is known only after a forward
            _check_sites([pattern.partition("#")[0] for pattern in self._patterns], planned)
        self._every, self._step = every, _steps_done(optimizer) if step is None else step
        self._window, self._window_every = window, max(window, 10 * every if window_every is None else window_every)
        self._sample = sample
        self._operands = OperandRecording(self._patterns, self._metrics, sample)
        self._outputs = OutputRecording(self._patterns)
        self._moving: list[Moving] = []
        self._left = 0  # calls of _follow() until the open window ends; 0 without an open window
        is_first = not is_distributed() or rank() == 0
        streams = stream if isinstance(stream, list | tuple) else [] if stream is None else [stream]
        self._log = storage.Log(directory, self._header(), *streams) if is_first else None
        self._gradients: list[dict[str, Any]] = []
        self._arm()
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._after = optimizer.register_step_post_hook(self._after_step)

    def __enter__(self) -> Statistics:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording, and keep the recorded statistics."""
        self._before.remove()
        self._after.remove()
        current = runtime_of(self._model)
        if current is not None:
            current.observe(None)
        if self._log is not None:
            self._log.close()

    def _arm(self) -> None:
        """Observe the forwards until the next step if that step is recorded."""
        self._armed = self._log is not None and (self._step + 1) % self._every == 0
        self._current().observe(self._operands if self._armed else None)

    def _current(self) -> Runtime:
        runtime = runtime_of(self._model)
        if runtime is None:
            raise Error("the model is no longer applied; close the Statistics before fp4graph.remove")
        return runtime

    def _before_step(self, optimizer: object, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Begin a step; return its arguments, with a closure whose gradients are measured, or None to keep them."""
        runtime = self._current()
        if runtime is not self._runtime:  # a phase has begun
            self._runtime, self._left = runtime, 0
            self._outputs.clear()
        # A new phase registers hooks for its techniques. Register _after_step() again, so that it stays last. Pre-hooks
        # may not change while they run, so _after_step() registers _before_step() again.
        self._after.remove()
        self._after = self._optimizer.register_step_post_hook(self._after_step)
        if self._log is not None:
            self._open_window()
        if not self._armed or "gradient_norm" not in self._metrics:
            return None
        self._gradients = self._gradient_norms()
        # A closure computes other gradients inside the step. Argument 0 is the optimizer itself.
        changed = tuple(self._measured(value) if place else value for place, value in enumerate(args))
        return changed, {name: self._measured(value) for name, value in kwargs.items()}

    def _measured(self, argument: Any) -> Any:
        """Return ``argument``; wrap a closure, so that the gradients that it computes are measured."""
        if not callable(argument):
            return argument

        def measured() -> Any:
            loss = argument()
            self._gradients = self._gradient_norms()
            return loss

        return measured

    def _after_step(self, *args: Any) -> None:
        self._before.remove()
        self._before = self._optimizer.register_step_pre_hook(self._before_step)
        self._step += 1
        if self._log is None:
            return
        measured: list[dict[str, Any]] = []
        if self._armed:
            if self._operands.seen:
                _check_sites(self._patterns, self._operands.sites)
                measured += self._operands.finish() + self._gradients
            self._operands.clear()
        if self._left:
            self._follow()
            if not self._left:
                measured += [moving.measurement(self._window, self._metrics) for moving in self._moving]
                measured += self._outputs.measurements()
                self._outputs.clear()
        self._open_window()
        if measured:
            self._log.append([{"step": self._step, **fields} for fields in measured])
        self._arm()

    def _weights(self) -> list[Weight]:
        return [weight for weight in self._runtime.weights if matches(self._patterns, weight.fqn or "(root)")]

    def _gradient_norms(self) -> list[dict[str, Any]]:
        """Return one measurement for each weight that has a gradient: the norm that the optimizer gets."""
        scale = getattr(self._optimizer, "grad_scale", None)  # a fused optimizer divides by it in its step
        weights = [weight for weight in self._weights() if weight.parameter.grad is not None]
        norms = [weight.parameter.grad.detach().float().norm() for weight in weights]  # type: ignore[union-attr]
        divided = (torch.stack(norms) / (1 if scale is None else scale)).tolist() if norms else []
        return [{"site": weight.fqn or "(root)", "tensor": f"{weight.parameter_name}.grad", "gradient_norm": norm}
                for weight, norm in zip(weights, divided, strict=True)]  # fmt: skip

    def _open_window(self) -> None:
        """Begin to follow the weights if a window begins at this step and no window is open."""
        wanted = self._metrics & {"oscillation", "flips", "rate_of_change"}
        if wanted and not self._left and (self._step + self._window) % self._window_every == 0:
            used = [weight for weight in self._weights() if weight.is_used and weight.parameter.numel()]
            self._moving, self._left = [Moving(weight, self._sample) for weight in used], self._window + 1
            self._follow()

    def _follow(self) -> None:
        for moving in self._moving:
            moving.advance(self._runtime.step, self._runtime.autocast)
        self._left -= 1
        if self._left <= self.PROBED and self._probe is not None and "rate_of_change" in self._metrics:
            self._run_probe()
            self._outputs.advance()

    def _run_probe(self) -> None:
        """Run the probe as the training calls the model, but in evaluation mode, and observe every site's output."""
        dtype = self._runtime.autocast
        self._current().observe(self._outputs, training=False)
        autocast = torch.autocast(self._runtime.device.type, dtype, enabled=dtype is not None)
        try:
            with evaluating(self._model), torch.no_grad(), autocast:
                if callable(self._probe):
                    self._probe()
                elif isinstance(self._probe, Mapping):
                    self._model(**self._probe)
                else:
                    self._model(*self._probe or ())
        finally:
            self._current().observe(self._operands if self._armed else None)

    def _header(self) -> dict[str, Any]:
        policy = self._runtime.policy
        options = {name: getattr(self, f"_{name}") for name in ("step", "every", "window", "window_every", "sample")}
        weights = [
            {"site": weight.fqn or "(root)", "shape": list(weight.parameter.shape), "rule": weight.rule.name,
             "operands": {operand.value: describe(spec) for operand, spec in weight.plan.specs}}
            for weight in self._runtime.weights
        ]  # fmt: skip
        return {"policy": policy.name, "fingerprint": policy.fingerprint, **options, "metrics": sorted(self._metrics),
                "weights": weights}  # fmt: skip


def _checked(metrics: Iterable[str] | None) -> frozenset[str]:
    chosen = frozenset(METRICS if metrics is None else [metrics] if isinstance(metrics, str) else metrics)
    for name in sorted(chosen - METRICS.keys()):
        raise Error(f"unknown metric {name!r}; {suggest(name, METRICS)}")
    if not chosen:
        raise Error(f"metrics is empty; choose from {', '.join(METRICS)}")
    return chosen


def _check_sites(patterns: Sequence[str], sites: Iterable[str]) -> None:
    """Raise an Error for a pattern that matches no site."""
    for pattern in patterns:
        if not any(matches((pattern,), site) for site in sites):
            raise Error(f"no quantized site matches {pattern!r}; {suggest(pattern, sites)}")


def _steps_done(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of steps that an optimizer such as Adam has counted; 0 for one that does not count.

    StableSPAM sets the counts of its parameters back to 0, so the count of its schedule is read too.
    """
    counts = [float(entry["step"]) for entry in optimizer.state.values() if "step" in entry]
    return int(max([*counts, *(group.get("schedule_step", 0) for group in optimizer.param_groups)], default=0))
