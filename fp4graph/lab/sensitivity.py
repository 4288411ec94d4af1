"""The loss increase of quantizing one part of a model at a time, measured and estimated."""

from __future__ import annotations

import copy
import dataclasses
import glob
import itertools
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyWarning, suggest
from fp4graph.graph.blocks import upwards
from fp4graph.graph.nested import nested
from fp4graph.graph.observe import substituted
from fp4graph.lab.data.images import seeded
from fp4graph.lab.estimates import BackwardEstimate, ForwardEstimate, Noise
from fp4graph.lab.scores import Score, Sensitivity
from fp4graph.lab.variants import only
from fp4graph.model.api import apply
from fp4graph.model.conversion import refuse_other_models
from fp4graph.model.current import PLAIN
from fp4graph.model.distributed import unwrapped
from fp4graph.model.runtime import detach, require_runtime
from fp4graph.policy import DEFAULT_INDEX, Policy, Rule, load_policy
from fp4graph.policy.rule import DEFAULT
from fp4graph.technique import draws
from fp4graph.technique.operands import GROUPS, Gemm, Operand
from fp4graph.training import prepare_optimizer

__all__ = ["Score", "Sensitivity", "sensitivity"]

KINDS = ("site", "block", "operand", "gemm")
#: A unit: the sites and operands that are quantized together.
_Parts = Collection[tuple[str, Operand]]
_FPROP = frozenset(GROUPS[Gemm.FPROP])


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

    Everything runs on an uncompiled copy, in the mode (training or evaluation) of ``model``. In evaluation, fprop
    rounds to nearest under every policy. For a unit u, batch b and seed r of the noise::

        d_br = L_b(only u quantized, noise r) − L_b(nothing quantized)
        d_br = L_b(all but u quantized, noise r) − L_b(all quantized, noise r)              with keep=True

    ``increase`` is the mean of d_b = mean_r d_br, and ``error`` its standard error s(d_b)/√B (for one batch, over the
    d_r). For a unit without operands of fprop, L_b is the loss after ``steps`` steps of SGD on the same batch, with the
    learning rate η_b = decrease · |L_b| / ‖∇L_b‖². With ``keep``, ``estimate`` is minus that for quantizing u alone.

    Args:
        model: a plain or an applied model. The state of techniques is initialized anew from its weights.
        loss: ``loss(model, batch)`` calls its argument ``model``, and returns a differentiable scalar.
        policies: a policy or a list of them, each as for :func:`fp4graph.apply`. Only the first phase of each counts.
        by: "site" (a module with all of its products), "block" (of a repeated stack; a site outside every block is a
            unit by itself), "operand", "gemm", or a combination such as ``("site", "operand")``.
        together: groups of modules, such as q, k and v; each group counts as one site.
        exact: False skips the measurement and only estimates (:mod:`fp4graph.lab.estimates`).
        repeats: the number of seeds of noise, if a policy draws.
        terms: the number of terms that a batch's loss averages: images, or the tokens of a language model. By default
            the length of the first axis of the first tensor in the first batch.
        known: scores of an earlier call with the same arguments, which are not measured again.
        report: is called with each new score.

    Raises:
        Error: a unit is unknown, there are no batches, or the loss is not a finite scalar. PolicyError: a policy does
            not fit the model.
    """
    refuse_other_models(model, "sensitivity")
    kinds = (by,) if isinstance(by, str) else tuple(by)
    for kind in kinds:
        if kind not in KINDS:
            raise Error(f"by has {kind!r}, but units are sites, blocks, operands or gemms; {suggest(str(kind), KINDS)}")
    for name, value in (("repeats", repeats), ("steps", steps), ("terms", terms)):
        if value is not None and (type(value) is not int or value < 1):
            raise Error(f"{name} must be a whole number of at least 1; got {value!r}")
    if type(decrease) not in (int, float) or not 0 < decrease < math.inf:
        raise Error(f"decrease must be a number above 0; got {decrease!r}")
    listed = policies if isinstance(policies, list | tuple) else [policies]
    loaded = [dataclasses.replace(load_policy(policy), phases=()) for policy in listed]
    if not (batches := list(batches)):
        raise Error("there are no batches to measure the loss on; give at least one")
    if not kinds or not loaded:
        raise Error("nothing to measure: by and policies need at least one entry each")
    terms = terms or next((len(x) for x in nested(batches[0], Tensor) if x.dim()), 1)
    site_of = _grouped(model, together)
    scores = {(score.policy, score.unit): score for score in known}
    wanted: list[tuple[str, str]] = []
    # Forwards run without Dynamo, and leave the caller's random numbers unchanged.
    with torch.random.fork_rng(), seeded(0), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # about calls that run uncompiled
        twin = _Twin(model, loss, batches, decrease)
        studies = [_Study(twin, policy, kinds, site_of) for policy in loaded]  # raises here if a policy does not fit
        for study in studies:
            names = {(study.policy.name, unit): unit for unit in study.units}
            wanted += names
            estimates = {} if names.keys() <= scores.keys() else study.estimates(terms)
            for key, unit in names.items():
                if key in scores:
                    continue
                parts, (estimate, snr) = study.units[unit], estimates[unit]
                measured = study.differences(parts, keep=keep, repeats=repeats, steps=steps) if exact else []
                quantized = {operand for _, operand in parts}
                operands = tuple(str(operand) for operand in Operand if operand in quantized)
                scores[key] = Score(unit, tuple(_by_site(parts)), operands, study.policy.name, *_mean(measured), snr,
                                    -estimate if keep else estimate, _measure(parts))  # fmt: skip
                report(scores[key])
    return Sensitivity(tuple(scores[key] for key in wanted), statistics.fmean(twin.exact), len(batches), repeats, keep)


def _grouped(model: nn.Module, together: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return the name of the group of each grouped module; raise an Error for a module that the model lacks."""
    groups, known = [*together], dict(model.named_modules(remove_duplicate=False))
    if unknown := [module for group in groups for module in group if module not in known]:
        raise Error(f"together has {unknown[0]!r}, which is no module of the model; give lists of modules' names; "
                    f"{suggest(unknown[0], known)}")  # fmt: skip
    return {module: f"{g[0]} and {len(g) - 1} more" for g in groups if len(g) > 1 for module in g}


def _by_site(parts: _Parts) -> dict[str, frozenset[Operand]]:
    sites: dict[str, frozenset[Operand]] = {}
    for site, operand in parts:
        sites[site] = sites.get(site, frozenset()) | {operand}
    return sites


def _measure(parts: _Parts) -> Literal["forward", "step"]:
    return "forward" if any(operand in _FPROP for _, operand in parts) else "step"


def _mean(differences: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean of the differences, ``[batches][seeds]``, and its standard error."""
    means = [statistics.fmean(row) for row in differences]
    if not all(map(math.isfinite, means)):
        return math.inf, math.nan
    samples = means if means[1:] else list(*differences)
    error = statistics.stdev(samples) / math.sqrt(len(samples)) if samples[1:] else math.nan
    return statistics.fmean(means) if means else math.nan, error


class _Twin:
    """A copy of the model; each loss is measured from the same weights, buffers and random numbers.

    Attributes:
        exact: the loss of each batch with nothing quantized.
        rates: the learning rate at which one exact step lowers the loss of each batch by the share ``decrease``.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any], decrease: float
    ) -> None:
        self.model: nn.Module = copy.deepcopy(unwrapped(model), {PLAIN: True})  # without a policy
        self.batches, self._loss, self._data = range(len(batches)), loss, batches
        self._state: list[tuple[Tensor, Tensor]] = []
        self.exact: list[float] = []
        self.rates: list[float] = []
        self.use(None)
        for batch in self.batches:
            self.exact.append(exact := self.measure(batch, seed=0, steps=0))
            if not math.isfinite(exact):
                what = f"the loss of batch {batch} is {exact} before anything is quantized"
                raise Error(f"{what}; correct the model or the data")
            self._reset()
            self.value(batch, gradients=True).backward()  # type: ignore[no-untyped-call]
            norm = sum(p.grad.double().square().sum().item() for p in self.model.parameters() if p.grad is not None)
            self.rates.append(decrease * abs(exact) / norm if norm else 0.0)

    def use(self, policy: Policy | None) -> None:
        """Apply a policy to the model; None quantizes nothing."""
        self._reset()
        if policy is None:
            detach(self.model)
            self.model._compiled_call_impl = None
        else:
            apply(self.model, policy, backend="eager")
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._sgd, self._applied = torch.optim.SGD(trained or [torch.zeros(1)], lr=0.0), policy is not None
        if self._applied:
            prepare_optimizer(self.model, self._sgd)
        self._state = [(t, t.detach().clone()) for t in (*self.model.parameters(), *self.model.buffers())]

    @torch.no_grad()
    def _reset(self) -> None:
        for tensor, kept in self._state:
            tensor.copy_(kept)
        self.model.zero_grad()

    def value(self, batch: int, seed: int = 0, *, gradients: bool = False) -> Tensor:
        """Return the loss of a batch; ``seed`` is the seed of the policy's noise."""
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

    def estimate(self, estimate: ForwardEstimate | BackwardEstimate) -> None:
        """Add all batches to an estimate."""
        with substituted(estimate):
            for batch in self.batches:
                self._reset()
                if isinstance(estimate, ForwardEstimate):
                    self.value(batch, gradients=True).backward()  # type: ignore[no-untyped-call]
                else:
                    estimate.begin()
                    self._descend(batch, 0)
                    estimate.begin(stepped=True)
                    self.value(batch)


class _Study:
    """Measures a model under one policy. ``units`` maps names to units, in the order of the model."""

    def __init__(self, twin: _Twin, policy: Policy, kinds: Sequence[str], site_of: Mapping[str, str]) -> None:
        if not policy.quantizes:
            raise Error(f"policy {policy.name!r} quantizes nothing, so there is nothing to measure; leave it out")
        self._twin, self.policy = twin, policy
        rules = (*policy.rules, policy.default)
        techniques = {technique for rule in rules for technique in rule.techniques}
        self._draws = any(map(draws, techniques)) or any(
            spec is not None and spec.needs_key for rule in rules for spec in rule.specs.values()
        )
        self._measured: dict[Any, list[list[float]]] = {}
        self._only: dict[frozenset[Operand], Policy] = {}
        self._modules: defaultdict[int, set[str]] = defaultdict(set)  # by the rule that quantizes them
        twin.use(policy)
        twin.value(0)
        runtime = require_runtime(twin.model, "sensitivity")
        quantized: defaultdict[str, set[Operand]] = defaultdict(set)
        for site in runtime.sites:
            if not site.quantized or site.rule_index is None:
                continue
            if site.module is None:
                raise Error(f"policy {policy.name!r} quantizes a {site.op} outside every module, so no rule can select "
                            "it; keep it")  # fmt: skip
            quantized[site.module] |= {operand for operand, spec in site.operands.items() if spec is not None}
            self._modules[site.rule_index].add(site.module)
        blocks = runtime.plan.names.blocks
        self.units: defaultdict[str, list[tuple[str, Operand]]] = defaultdict(list)
        for module, operands in quantized.items():
            name = module or "(root)"
            block = next((parent for parent in upwards(module) if parent in blocks), module) or "(root)"
            for operand in filter(operands.__contains__, Operand):
                labels = {"site": site_of.get(module, name), "block": block, "operand": operand, "gemm": operand.gemm}
                self.units[", ".join(str(labels[kind]) for kind in kinds)].append((name, operand))

    def _use(self, parts: _Parts) -> None:
        """Quantize only ``parts`` of the twin, by the study's policy."""
        groups: defaultdict[frozenset[Operand], set[str]] = defaultdict(set)
        for site, operands in _by_site(parts).items():
            groups[operands].add(site.removeprefix("(root)"))
        rules: list[Rule] = []
        for operands, modules in groups.items():
            part = self._only.setdefault(operands, only(self.policy, operands))
            for index, names in self._modules.items():
                if matched := sorted(names & modules):
                    rule = part.default if index == DEFAULT_INDEX else part.rules[index]
                    match = rule.match.model_copy(update={"module": tuple(map(glob.escape, matched))})
                    rules.append(dataclasses.replace(rule, match=match, required=False))
        self._twin.use(Policy(name=self.policy.name, rules=tuple(rules), default=DEFAULT) if rules else None)

    def differences(self, parts: _Parts, *, keep: bool, repeats: int, steps: int) -> list[list[float]]:
        """Return d_br of a unit (see :func:`sensitivity`), ``[batches][seeds]``."""
        seeds, steps = range(repeats if self._draws else 1), steps if _measure(parts) == "step" else 0
        unit, reference = frozenset(parts), frozenset[tuple[str, Operand]]()
        if keep:
            reference = reference.union(*self.units.values())
            unit = reference - unit
        pairs = zip(*(self._losses(each, seeds, steps) for each in (unit, reference)), strict=True)
        return [[a - b for a, b in zip(*rows, strict=True)] for rows in pairs]

    def _losses(self, parts: frozenset[tuple[str, Operand]], seeds: range, steps: int) -> list[list[float]]:
        key, twin = (parts, seeds, steps), self._twin
        if key not in self._measured:
            self._use(parts)
            self._measured[key] = [[twin.measure(batch, seed, steps) for seed in seeds] for batch in twin.batches]
        return self._measured[key]

    def estimates(self, terms: int) -> dict[str, tuple[float, float | None]]:
        """Return the estimate and the signal-to-noise ratio in dB of each unit, by name."""
        noise, count = Noise(), len(self._twin.batches)
        sites: defaultdict[frozenset[Operand], set[str]] = defaultdict(set)
        for parts in self.units.values():
            for site, operands in _by_site(parts).items():
                sites[operands & _FPROP].add(site)
                sites[operands - _FPROP].add(site)
        sites.pop(frozenset(), None)
        values: dict[tuple[str, frozenset[Operand]], float] = {}
        for operands, names in sites.items():
            estimate = ForwardEstimate(noise, terms) if operands <= _FPROP else BackwardEstimate(noise)
            self._use(list(itertools.product(names, operands)))
            self._twin.estimate(estimate)
            values |= {(site, operands): estimate.increase(site) / count for site in names}
        result = {}
        for name, parts in self.units.items():
            counted = _FPROP if _measure(parts) == "forward" else frozenset(Operand)
            ratios = [ratio for part in parts if (ratio := noise.ratio(*part)) is not None]
            mean = statistics.fmean(ratios) if ratios else 0.0
            increase = math.fsum(values.get((site, ops & counted), 0.0) for site, ops in _by_site(parts).items())
            result[name] = increase, -10 * math.log10(mean) if mean else None
        return result
