"""Where quantization hurts: the loss increase of quantizing one part of a model at a time, measured and estimated."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyWarning, suggest
from fp4graph.graph.blocks import upwards
from fp4graph.graph.observe import substituted
from fp4graph.lab.data.images import seeded
from fp4graph.lab.estimates import BackwardEstimate, ForwardEstimate, Noise
from fp4graph.lab.scores import Score, Sensitivity
from fp4graph.lab.variants import at, only
from fp4graph.model.api import apply
from fp4graph.model.conversion import refuse_other_models
from fp4graph.model.current import PLAIN
from fp4graph.model.distributed import unwrapped
from fp4graph.model.runtime import detach, require_runtime
from fp4graph.policy import Policy, load_policy
from fp4graph.policy.rule import DEFAULT, Rule
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.torch_internals import pytree
from fp4graph.training import prepare_optimizer

__all__ = ["Score", "Sensitivity", "sensitivity"]

KINDS = ("site", "block", "operand", "gemm")
#: The operands that are quantized, by site: a unit.
_Parts = Mapping[str, frozenset[Operand]]
_FPROP = frozenset(operand for operand in Operand if operand.gemm is Gemm.FPROP)


def sensitivity(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    policies: Any,
    *,
    by: str | Sequence[str] = "site",
    together: Iterable[Sequence[str]] = (),
    keep: bool = False,
    exact: bool = True,
    repeats: int = 3,
    steps: int = 1,
    decrease: float = 0.01,
    terms: int | None = None,
    known: Iterable[Score] = (),
    report: Callable[[Score], None] = lambda score: None,
) -> Sensitivity:
    """Quantize one unit of ``model`` at a time, and measure and estimate how much the loss increases.

    Everything runs on a copy, uncompiled, in the mode (training or evaluation) that ``model`` is in: in evaluation
    fprop rounds to nearest whatever the policy says. For a unit u, batch b and seed r of the noise::

        d_br = L_b(only u quantized, noise r) − L_b(nothing quantized)
        d_br = L_b(all but u quantized, noise r) − L_b(all quantized, noise r)              with keep=True

    ``increase`` is the mean of d_b = mean_r d_br, and ``error`` its standard error s(d_b)/√B (of one batch, that of the
    d_r). Dropout draws the same in both losses. For a unit without operands of fprop L_b is the loss on the batch after
    ``steps`` steps of SGD on it, at the learning rate at which the exact step lowers the loss by the share ``decrease``
    to first order, η_b = decrease · |L_b| / ‖∇L_b‖². Estimates are described in :mod:`fp4graph.lab.estimates`; with
    ``keep`` they are negative: errors are taken to add up.

    Args:
        model: a plain or an applied model, which stays as it is. A policy's state, such as a moving average, begins
            anew at the weights.
        loss: ``loss(model, batch)`` returns a differentiable scalar. It must call the model that it is given.
        batches: what ``loss`` is called with, one after the other.
        policies: one or several, each as for :func:`fp4graph.apply`. Of a policy with phases the first counts.
        by: "site" (a module with all of its products), "block" (of a repeated stack; a site outside of all is one by
            itself), "operand", "gemm", or several, such as ``("site", "operand")``.
        together: groups of modules, such as q, k and v, each of which is one site.
        exact: False estimates only.
        repeats: seeds of noise, where a policy draws any.
        terms: the number N of terms that the loss of a batch is the mean of, for the estimate: images, or the tokens of
            a language model. By default the length of the first axis of the first tensor of a batch.
        known: scores of an earlier call with the same arguments, which are not measured again.
        report: called with each new score as soon as it is measured.

    Raises:
        Error: a unit is unknown, there are no batches, or the loss is no finite scalar. PolicyError: a policy does not
            fit the model.
    """
    refuse_other_models(model, "sensitivity")
    kinds = (by,) if isinstance(by, str) else tuple(by)
    for kind in kinds:
        if kind not in KINDS:
            raise Error(f"a unit is a site, block, operand or gemm, and not {kind!r}; {suggest(str(kind), KINDS)}")
    for name, value in (("repeats", repeats), ("steps", steps), ("terms", terms)):
        if value is not None and (type(value) is not int or value < 1):
            raise Error(f"{name} is a whole number of at least 1; got {value!r}")
    several = policies if isinstance(policies, list | tuple) else [policies]
    loaded = [dataclasses.replace(load_policy(policy), phases=()) for policy in several]
    if not (batches := list(batches)):
        raise Error("there are no batches to measure the loss on; give at least one")
    if not kinds or not loaded:
        raise Error("nothing to measure: by and policies need at least one entry each")
    terms = terms or next((len(x) for x in pytree.tree_leaves(batches[0]) if isinstance(x, Tensor) and x.dim()), 1)
    site_of = {module: f"{g[0]} and {len(g) - 1} more" for g in together if len(g) > 1 for module in g}
    scores = {(score.policy, score.unit): score for score in known}
    wanted: list[tuple[str, str]] = []
    with _undisturbed():
        twin = _Twin(model, loss, batches, decrease)
        studies = [_Study(twin, policy, kinds, site_of) for policy in loaded]  # what does not fit is raised first
        for study in studies:
            names = {(study.policy.name, unit): unit for unit in study.units}
            wanted += names
            estimates = {} if names.keys() <= scores.keys() else study.estimates(terms)
            for key, unit in names.items():
                if key in scores:
                    continue
                parts, (estimate, snr) = study.units[unit], estimates[unit]
                measured = study.differences(parts, keep=keep, repeats=repeats, steps=steps) if exact else []
                chosen = frozenset[Operand]().union(*parts.values())
                operands = tuple(str(operand) for operand in Operand if operand in chosen)
                scores[key] = Score(unit, tuple(parts), operands, study.policy.name, *_mean(measured), snr,
                                    -estimate if keep else estimate, _measure(parts))  # fmt: skip
                report(scores[key])
    found = tuple(scores[key] for key in wanted)
    return Sensitivity(found, statistics.fmean(twin.exact), len(batches), repeats, keep)


def _measure(parts: _Parts) -> Literal["forward", "step"]:
    return "forward" if any(operands & _FPROP for operands in parts.values()) else "step"


def _mean(differences: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean of the differences of each batch, by seed, and its standard error."""
    means = [statistics.fmean(row) for row in differences]
    if not all(map(math.isfinite, means)):
        return math.inf, math.nan
    pairs = means if means[1:] else list(*differences)
    error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if pairs[1:] else math.nan
    return statistics.fmean(means) if means else math.nan, error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Run the forwards of this context without Dynamo and with random numbers of their own."""
    with torch.random.fork_rng(), seeded(0), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # of what runs uncompiled
        yield


class _Twin:
    """A copy of the model, whose losses are measured from the same weights, buffers and random numbers every time.

    Attributes:
        exact: the loss of each batch where nothing is quantized.
        rates: the learning rate at which one exact step lowers the loss of each batch by the share ``decrease``.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any], decrease: float
    ) -> None:
        self.model: nn.Module = copy.deepcopy(unwrapped(model), {PLAIN: True})
        self.batches = range(len(batches))
        self._loss, self._data = loss, batches
        self._state: list[tuple[Tensor, Tensor]] = []
        self.use(None)
        self.exact = [self.value(batch).item() for batch in self.batches]
        self.rates = []
        for batch, exact in enumerate(self.exact):
            if not math.isfinite(exact):
                what = f"the loss of batch {batch} is {exact} before anything is quantized"
                raise Error(f"{what}; correct the model or the data")
        for batch, exact in enumerate(self.exact):
            self._reset()
            self.value(batch, gradients=True).backward()  # type: ignore[no-untyped-call]
            norm = sum(p.grad.double().square().sum().item() for p in self.model.parameters() if p.grad is not None)
            self.rates.append(decrease * abs(exact) / norm if norm else 0.0)

    def use(self, policy: Policy | None) -> None:
        """Put the model under a policy; None quantizes nothing."""
        self._reset()
        if policy is None:
            detach(self.model)
            self.model._compiled_call_impl = None
        else:
            apply(self.model, policy, backend="eager")
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._sgd = torch.optim.SGD(trained or [torch.zeros(1)], lr=0.0)
        self._applied = policy is not None
        if self._applied:
            prepare_optimizer(self.model, self._sgd)
        self._state = [(t, t.detach().clone()) for t in (*self.model.parameters(), *self.model.buffers())]

    @torch.no_grad()
    def _reset(self) -> None:
        for tensor, kept in self._state:
            tensor.copy_(kept)
        self.model.zero_grad()

    def value(self, batch: int, seed: int = 0, *, gradients: bool = False) -> Tensor:
        """Return the loss of a batch; ``seed`` is that of the policy's noise."""
        if self._applied:
            runtime = require_runtime(self.model, "sensitivity")
            runtime.settings = dataclasses.replace(runtime.settings, seed=seed * len(self.batches) + batch)
        with seeded(batch), torch.set_grad_enabled(gradients):
            torch.manual_seed(batch)  # on all devices
            value = self._loss(self.model, self._data[batch])
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
            raise Error(f"loss(model, batch) returned {what} for batch {batch}; return a tensor of one number")
        if gradients and not value.requires_grad:
            raise Error("loss(model, batch) has no gradient, which estimates and steps need; do not detach it, and let "
                        "some parameters require gradients")  # fmt: skip
        return value.sum()

    def measure(self, batch: int, seed: int, steps: int) -> float:
        """Return the loss of a batch after steps of SGD on it."""
        self._reset()
        for _ in range(steps):
            self._descend(batch, seed)
        return self.value(batch, seed).item()

    def _descend(self, batch: int, seed: int) -> None:
        self.value(batch, seed, gradients=True).backward()  # type: ignore[no-untyped-call]
        self._sgd.param_groups[0]["lr"] = self.rates[batch]
        self._sgd.step()
        self._sgd.zero_grad()

    def estimate(self, batch: int, estimate: ForwardEstimate | BackwardEstimate) -> None:
        """Add a batch to an estimate."""
        self._reset()
        with substituted(estimate):
            if isinstance(estimate, ForwardEstimate):
                self.value(batch, gradients=True).backward()  # type: ignore[no-untyped-call]
            else:
                estimate.begin()
                self._descend(batch, 0)
                estimate.begin(stepped=True)
                self.value(batch)


class _Study:
    """The units of a model under one policy, and what they cost.

    Attributes:
        units: the parts of each unit by its name, in the order of the model.
    """

    def __init__(self, twin: _Twin, policy: Policy, kinds: Sequence[str], site_of: Mapping[str, str]) -> None:
        if not policy.quantizes:
            raise Error(f"policy {policy.name!r} quantizes nothing, so there is nothing to measure; leave it out")
        self._twin, self.policy = twin, policy
        self._measured: dict[Any, list[list[float]]] = {}
        self._only: dict[frozenset[Operand], Policy] = {}
        self._quantized: dict[str, frozenset[Operand]] = {}
        self._modules: defaultdict[int, set[str]] = defaultdict(set)  # those that each rule quantizes
        twin.use(policy)
        twin.value(0)
        runtime = require_runtime(twin.model, "sensitivity")
        for site in runtime.sites:
            if not site.quantized or site.rule_index is None:
                continue
            if site.module is None:
                raise Error(f"policy {policy.name!r} quantizes a {site.op} of no module, which no rule names; keep it")
            name = site.module or "(root)"
            operands = frozenset(operand for operand, spec in site.operands.items() if spec is not None)
            self._quantized[name] = operands | self._quantized.get(name, frozenset())
            self._modules[site.rule_index].add(site.module)
        blocks = runtime.plan.names.blocks
        self.units: dict[str, dict[str, frozenset[Operand]]] = {}
        for name, operands in self._quantized.items():
            module = name.removeprefix("(root)")
            block = next((around for around in upwards(module) if around in blocks), module) or "(root)"
            for operand in filter(operands.__contains__, Operand):
                labels = {"site": site_of.get(module, name), "block": block, "operand": operand, "gemm": operand.gemm}
                unit = self.units.setdefault(", ".join(str(labels[kind]) for kind in kinds), {})
                unit[name] = unit.get(name, frozenset()) | {operand}

    def _policy(self, parts: _Parts) -> Policy | None:
        """Return the policy that quantizes ``parts`` and nothing else; None where they are empty."""
        groups: defaultdict[frozenset[Operand], set[str]] = defaultdict(set)
        for site, operands in parts.items():
            groups[operands].add(site.removeprefix("(root)"))
        groups.pop(frozenset(), None)
        rules: list[Rule] = []
        for operands, modules in groups.items():
            part = self._only.setdefault(operands, only(self.policy, operands))
            own = {index: sorted(names & modules) for index, names in self._modules.items() if names & modules}
            rules += at(part, own)
        return Policy(name=self.policy.name, rules=tuple(rules), default=DEFAULT) if rules else None

    def differences(self, parts: _Parts, *, keep: bool, repeats: int, steps: int) -> list[list[float]]:
        """Return the loss increase that a unit causes, of each batch by seeds of noise."""
        steps = steps if _measure(parts) == "step" else 0
        reference: _Parts = {}
        if keep:
            reference = self._quantized
            parts = {site: own - parts.get(site, frozenset()) for site, own in reference.items()}
        rules = (*self.policy.rules, self.policy.default)
        draws = any(spec is not None and spec.needs_key for rule in rules for spec in rule.specs.values()) or any(
            technique.draws for rule in rules for technique in rule.techniques
        )
        seeds = range(repeats if draws else 1)
        pairs = zip(self._losses(parts, seeds, steps), self._losses(reference, seeds, steps), strict=True)
        return [[a - b for a, b in zip(*rows, strict=True)] for rows in pairs]

    def _losses(self, parts: _Parts, seeds: range, steps: int) -> list[list[float]]:
        key = tuple(parts.items()), seeds, steps
        if key not in self._measured:
            self._twin.use(self._policy(parts))
            self._measured[key] = [
                [self._twin.measure(batch, seed, steps) for seed in seeds] for batch in self._twin.batches
            ]
        return self._measured[key]

    def estimates(self, terms: int) -> dict[str, tuple[float, float | None]]:
        """Return the estimate and the signal-to-noise ratio in dB of each unit, by name."""
        noise = Noise()
        sites: defaultdict[frozenset[Operand], set[str]] = defaultdict(set)
        for parts in self.units.values():
            for site, operands in parts.items():
                sites[operands & _FPROP].add(site)
                sites[operands - _FPROP].add(site)
        sites.pop(frozenset(), None)
        values: dict[tuple[str, frozenset[Operand]], float] = {}
        for operands, names in sites.items():
            estimate = ForwardEstimate(noise, terms) if operands <= _FPROP else BackwardEstimate(noise)
            self._twin.use(self._policy(dict.fromkeys(names, operands)))
            for batch in self._twin.batches:
                self._twin.estimate(batch, estimate)
            values |= {(site, operands): estimate.increase(site) / len(self._twin.batches) for site in names}
        result = {}
        for name, parts in self.units.items():
            counted = _FPROP if _measure(parts) == "forward" else frozenset(Operand)
            ratios = [noise.ratio(site, operand) for site, operands in parts.items() for operand in operands]
            known = [ratio for ratio in ratios if ratio is not None]
            mean = statistics.fmean(known) if known else 0.0
            increase = math.fsum(values.get((site, operands & counted), 0.0) for site, operands in parts.items())
            result[name] = increase, -10 * math.log10(mean) if mean else None
        return result
