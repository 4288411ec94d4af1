"""Checks that every policy fits a training's model, before the first training."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fp4graph.errors import Error, PolicyWarning
from fp4graph.lab.comparison.training import Log, Stop, Train, call, seeded
from fp4graph.model.explain import explain
from fp4graph.model.listening import Silent, listening
from fp4graph.model.runtime import require_runtime
from fp4graph.policy import Policy, load_policy


def check(train: Train, policies: Sequence[Policy], seed: int) -> list[str]:
    """Run ``train`` under each policy up to the model's first call, and check that the policy fits that call.

    The call is captured on fake tensors under the policy and each of its phases, with the options that ``train`` gave
    ``apply`` and in the training's autocast.

    Returns:
        Sentences about policies that could not be checked.

    Raises:
        Error: some policies do not fit, quantize nothing or keep every block (the text names each with its reason), or
            ``train`` never applies a policy.
    """
    faults: dict[str, str] = {}
    unchecked: list[str] = []
    for policy in policies:
        try:
            _first_call(train, policy, seed)
        except Error as error:
            faults[policy.name] = str(error)
        except _Unchecked as why:
            unchecked.append(f"policy {policy.name!r} was not checked before the training: {why}")
    of_training = [faults.get(policy.name) for policy in policies if not policy.ever_quantizes]
    if any(of_training) and len(faults) == len(policies) and len({*faults.values()}) == 1:
        raise Error(next(iter(faults.values())))  # a policy without rules has it too, so no rule is its cause
    if faults:
        reasons = "".join(f"\n  {name}: {fault}" for name, fault in faults.items())
        raise Error(f"{len(faults)} of the policies cannot train this model, so nothing was trained:{reasons}")
    return unchecked


class _Unchecked(BaseException):
    """The first call of the model cannot be checked; the text says why."""


class _Called(BaseException):
    """Ends the first call of a model, with a problem or None. Trainings do not catch a BaseException."""


class _Probe(Silent):
    """Checks the first call of an applied model instead of running it."""

    heard = False

    def applied(self, model: nn.Module) -> None:
        self.heard = True
        runtime = require_runtime(model, "compare")

        def intercept(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            runtime.intercept = None  # because the captures copy the model
            raise _Called(_problem(runtime.root, runtime.policy, args, kwargs))

        runtime.intercept = intercept


def _first_call(train: Train, policy: Policy, seed: int) -> None:
    """Raise the error that the first call of the model would raise under ``policy``."""

    def stop(step: int, loss: float | None) -> None:
        raise Stop

    probe = _Probe()
    ended = "train() logged a loss before it called the applied model itself; perhaps it calls a part of the model"
    with tempfile.TemporaryDirectory() as folder, seeded(seed), listening(probe), warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # the training warns again
        try:
            call(train, policy, seed, Log(Path(folder), stop))
            ended = "train() returned without calling the applied model"
        except _Called as first:
            (problem,) = first.args
            if problem is not None:
                raise Error(problem) from None
            return
        except Stop:
            pass
        except Error:
            raise
        except Exception as error:  # the training will raise it again, and will be recorded as failed
            raise _Unchecked(f"train() raised {type(error).__name__} before it called the model") from error
    if not probe.heard:
        raise Error("train() never called fp4graph.apply(model, policy), so every policy would train alike; call apply")
    raise _Unchecked(ended)


def _problem(model: nn.Module, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    for phase in (policy, *(phase.policy for phase in policy.phases)):
        if phase.quantizes and (problem := _fault(model, phase, args, kwargs)) is not None:
            if _fault(model, load_policy("bf16"), args, kwargs) is not None:
                raise _Unchecked("the model cannot be captured on tensors without data, under any policy")
            return problem
    return None


def _fault(model: nn.Module, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    try:
        explanation = explain(model, policy, args, kwargs)
    except Error as error:
        return str(error)
    if explanation.problem is None or explanation.quantized:
        return explanation.problem
    kept = Counter((site.rule, site.reason) for site in explanation.sites if not site.quantized)
    reasons = [
        f"{count} {f'by rule {rule!r}' if rule else 'by default'} ({reason})"
        for (rule, reason), count in kept.most_common(8)
    ]
    return f"{explanation.problem}\n    Kept: {', '.join(reasons)}"
