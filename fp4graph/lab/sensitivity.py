"""Where quantization hurts: the loss increase of quantizing one part of a model at a time, measured and estimated."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp4graph.errors import Error, PolicyWarning
from fp4graph.files import read_json, write
from fp4graph.graph.blocks import upwards
from fp4graph.graph.observe import substituted
from fp4graph.lab.data.images import seeded
from fp4graph.lab.estimates import BackwardEstimate, ForwardEstimate, Noise
from fp4graph.lab.pictures.style import LABELS, styled, subplots
from fp4graph.lab.variants import at, joined, only
from fp4graph.model.api import apply
from fp4graph.model.conversion import refuse_other_models
from fp4graph.model.current import PLAIN
from fp4graph.model.distributed import unwrapped
from fp4graph.model.runtime import detach, require_runtime
from fp4graph.policy import Policy, load_policy
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.text import suggest
from fp4graph.training import prepare_optimizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("site", "block", "operand", "gemm")
FORMAT, VERSION = "fp4graph.sensitivity", 1
#: The operands that are quantized, by site.
_Parts = Mapping[str, frozenset[Operand]]
_FPROP = frozenset(operand for operand in Operand if operand.gemm is Gemm.FPROP)


@dataclass(frozen=True)
class Score:
    """The loss that one unit costs under one policy.

    Attributes:
        unit: name of the unit: a site, a block, an operand, a GEMM, or several of these with ", " between them.
        sites: the unit's sites, by the names of their modules; "(root)" is the root.
        operands: the unit's operands that the policy quantizes, such as "fprop.input".
        policy: name of the policy.
        increase: mean loss increase; NaN where it was only estimated, infinite where a quantized loss was not finite.
        error: standard error of ``increase``; NaN where there is one difference only.
        snr_db: signal-to-noise ratio of the unit's operands in dB; None where none was multiplied.
        estimate: the cheap estimate of ``increase``.
        measure: "forward" for a unit with operands of fprop, whose loss is that of the forward; "step" for a unit of
            dgrad and wgrad alone, whose loss is that after steps of SGD.
    """

    unit: str
    sites: tuple[str, ...]
    operands: tuple[str, ...]
    policy: str
    increase: float
    error: float
    snr_db: float | None = None
    estimate: float | None = None
    measure: Literal["forward", "step"] = "forward"


@dataclass(frozen=True)
class Sensitivity:
    """The scores of every unit under every policy.

    Attributes:
        scores: by policy, and within it in the order of the model.
        loss: the mean loss of the unquantized model over the batches.
        batches, repeats: how many batches, and seeds of noise where a policy draws.
        keep: whether everything but the unit was quantized, and ``increase`` is over the fully quantized model.
    """

    scores: tuple[Score, ...]
    loss: float
    batches: int
    repeats: int
    keep: bool = False

    def ranking(self, policy: str | None = None, measure: str | None = None) -> tuple[Score, ...]:
        """Return the scores, of one policy and measure if named, the unit that hurts most first: by what was measured,
        else by the estimate."""
        chosen = [s for s in self.scores if policy in (None, s.policy) and measure in (None, s.measure)]
        return tuple(sorted(chosen, key=lambda score: _value(score) if self.keep else -_value(score)))

    @property
    def correlation(self) -> dict[tuple[str, str], float]:
        """Spearman's rank correlation of ``estimate`` with ``increase`` over units, by policy and measure.

        A pair with fewer than three units, or without what was measured, is left out. NaN says that one of the two is
        constant.
        """
        try:
            from scipy.stats import spearmanr
        except ImportError:
            raise Error("rank correlations need scipy; pip install 'fp4graph[analysis]'") from None
        pairs: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for score in self.scores:
            if score.estimate is not None and not math.isnan(score.increase):
                pairs[score.policy, score.measure].append((score.estimate, score.increase))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of constant values
            ranked = {key: spearmanr(*zip(*each, strict=True)) for key, each in pairs.items() if each[2:]}
        return {key: float(result.statistic) for key, result in ranked.items()}

    def table(self, limit: int | None = 20) -> Table:
        """Return the ranking as a table for a terminal: of each policy and measure the first ``limit`` units."""
        what = "everything but one unit quantized, over all quantized" if self.keep else "one unit quantized, over none"
        table = Table(title=f"loss {self.loss:.4g}; {what}; {self.batches} batches", title_justify="left")
        for column in ("policy", "unit", "measure"):
            table.add_column(column, overflow="fold")
        for column in ("increase", "± se", "estimate", "SNR, dB"):
            table.add_column(column, justify="right")
        groups = dict.fromkeys((score.policy, score.measure) for score in self.scores)
        for group in groups:
            for score in self.ranking(*group)[:limit]:
                numbers = (score.increase, score.error, score.estimate, score.snr_db)
                texts = ("-" if x is None or math.isnan(x) else f"{x:.3g}" for x in numbers)
                table.add_row(score.policy, score.unit, score.measure, *texts)
            table.add_section()
        table.caption = "\n".join(
            f"rank correlation of estimate and measurement, {policy}, {measure}: {value:.2f}"
            for (policy, measure), value in self.correlation.items()
        )
        return table

    @styled()
    def figure(self, policy: str | None = None) -> Figure:
        """Draw heat maps of the increase, sites by operands, of one policy (by default the first), one for a measure.

        A unit of several sites fills all of their places.
        """
        policy = policy or self.scores[0].policy
        groups = {measure: scores for measure in ("forward", "step") if (scores := self.ranking(policy, measure))}
        sites = list(dict.fromkeys(site for s in self.scores if s.policy == policy for site in s.sites))
        height = 1.4 + 0.24 * len(sites)
        picture, panels = subplots(height, 1, len(groups), sharey=True, squeeze=False)
        for axes, (measure, scores) in zip(panels.flat, groups.items(), strict=True):
            columns = sorted({score.operands for score in scores}, key=lambda names: [*map([*LABELS].index, names)])
            values = np.full((len(sites), len(columns)), math.nan)
            for score in scores:
                values[[sites.index(site) for site in score.sites], columns.index(score.operands)] = _value(score)
            limit = np.abs(values[np.isfinite(values)]).max(initial=0) or 1.0
            image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
            axes.set_yticks(range(len(sites)), sites, fontsize=8)
            names = ["\n".join(LABELS[o] for o in operands) if len(operands) < 6 else "all six" for operands in columns]
            axes.set_xticks(range(len(columns)), names, fontsize=8, rotation=20)
            axes.grid(visible=False)
            axes.set_title(f"{policy}, {measure}")
            picture.colorbar(image, label="loss increase" if _measured(scores[0]) else "estimated increase")
        return picture

    def to_json(self, file: str | PathLike[str]) -> None:
        """Write everything to a file."""
        data = dataclasses.asdict(self)
        data["scores"] = [{name: _text(value) for name, value in score.items()} for score in data["scores"]]
        write(file, json.dumps({"format": FORMAT, "version": VERSION, **data}, indent=1, allow_nan=False) + "\n")

    @classmethod
    def from_json(cls, file: str | PathLike[str]) -> Sensitivity:
        """Read what :meth:`to_json` wrote."""
        data = read_json(Path(file))
        if not isinstance(data, dict) or (data.pop("format", None), data.pop("version", None)) != (FORMAT, VERSION):
            raise Error(f"{file} holds no sensitivity of this version of fp4graph; measure it again")
        scores = []
        for score in data.pop("scores"):
            numbers = {name: float(score[name]) for name in ("increase", "error")}
            names = {name: tuple(score[name]) for name in ("sites", "operands")}
            scores.append(Score(**{**score, **numbers, **names}))
        return cls(tuple(scores), **data)


def _measured(score: Score) -> bool:
    return not math.isnan(score.increase)


def _value(score: Score) -> float:
    return score.increase if _measured(score) else score.estimate or 0.0


def _text(value: Any) -> Any:
    """Return a number that JSON does not have as text, which float() reads."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def sensitivity(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    policies: Any,
    *,
    by: str | Sequence[str] = "site",
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
    ``steps`` steps of SGD on the same batch, at a learning rate of its own, Polyak's with a target::

        η_b = decrease · |L_b| / ‖∇L_b‖²

    at which the exact step lowers the loss by the share ``decrease``, to first order. Estimates are described in
    :mod:`fp4graph.lab.estimates`; with ``keep`` they are negative: errors are taken to add up.

    Args:
        model: a plain or an applied model, which stays as it is. Of a policy's state, such as a moving average of
            weights, nothing is taken over: it begins at the weights.
        loss: ``loss(model, batch)`` returns a differentiable scalar. It must call the model that it is given.
        batches: what ``loss`` is called with, one after the other.
        policies: one or several, each as for :func:`fp4graph.apply`. Of a policy with phases the first counts.
        by: "site" (a module with all of its products), "block" (of a repeated stack; a site outside of all is one by
            itself), "operand", "gemm", or several, such as ``("site", "operand")``.
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
    with _undisturbed():
        twin = _Twin(model, loss, batches)
        rates, terms = twin.rates(decrease), terms or _length(batches[0])
        studies = [_Study(twin, policy, kinds, rates) for policy in loaded]  # what does not fit is raised first
        earlier = {(score.policy, score.unit): score for score in known}
        scores: list[Score] = []
        for policy, study in zip(loaded, studies, strict=True):
            if all((policy.name, unit.name) in earlier for unit in study.units):
                scores += [earlier[policy.name, unit.name] for unit in study.units]
                continue
            for unit, (estimate, snr) in zip(study.units, study.estimates(terms).values(), strict=True):
                if (policy.name, unit.name) in earlier:
                    scores.append(earlier[policy.name, unit.name])
                    continue
                measured = study.differences(unit, keep=keep, repeats=repeats, steps=steps) if exact else []
                sites, chosen = tuple(unit.parts), frozenset[Operand]().union(*unit.parts.values())
                operands = tuple(str(operand) for operand in Operand if operand in chosen)
                scores.append(Score(unit.name, sites, operands, policy.name, *_mean(measured), snr,
                                    -estimate if keep else estimate, unit.measure))  # fmt: skip
                report(scores[-1])
    return Sensitivity(tuple(scores), statistics.fmean(twin.exact), len(batches), repeats, keep)


def _length(batch: Any) -> int:
    """Return the length of the first axis of the first tensor of a batch; 1 without any."""
    return next((len(x) for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()), 1)


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
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any]) -> None:
        self.model: nn.Module = copy.deepcopy(unwrapped(model), {PLAIN: True})
        self.count = len(batches)
        self._loss, self._batches = loss, batches
        self._state: list[tuple[Tensor, Tensor]] = []
        self.use(None)
        self.exact = [self.value(batch).item() for batch in range(self.count)]
        for batch, value in enumerate(self.exact):
            if not math.isfinite(value):
                what = f"the loss of batch {batch} is {value} before anything is quantized"
                raise Error(f"{what}; correct the model or the data")

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
            runtime.settings = dataclasses.replace(runtime.settings, seed=seed * self.count + batch)
        with seeded(batch), torch.set_grad_enabled(gradients):
            torch.manual_seed(batch)  # on all devices
            value = self._loss(self.model, self._batches[batch])
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
            raise Error(f"loss(model, batch) returned {what} for batch {batch}; return a tensor of one number")
        if gradients and not value.requires_grad:
            raise Error("loss(model, batch) has no gradient, which estimates and steps need; do not detach it, and let "
                        "some parameters require gradients, or measure units of fprop")  # fmt: skip
        return value.sum()

    def measure(self, batch: int, seed: int, rates: Sequence[float], steps: int) -> float:
        """Return the loss of a batch after steps of SGD on it."""
        self._reset()
        for _ in range(steps):
            self.descend(batch, seed, rates[batch])
        return self.value(batch, seed).item()

    def descend(self, batch: int, seed: int, rate: float) -> None:
        """Take one step of SGD."""
        self.value(batch, seed, gradients=True).backward()  # type: ignore[no-untyped-call]
        self._sgd.param_groups[0]["lr"] = rate
        self._sgd.step()
        self._sgd.zero_grad()

    def rates(self, decrease: float) -> list[float]:
        """Return the learning rates at which one exact step lowers the loss of each batch by the share ``decrease``."""
        self.use(None)
        rates = []
        for batch, loss in enumerate(self.exact):
            self._reset()
            self.value(batch, gradients=True).backward()  # type: ignore[no-untyped-call]
            norm = sum(p.grad.double().square().sum().item() for p in self.model.parameters() if p.grad is not None)
            rates.append(decrease * abs(loss) / norm if norm else 0.0)
        return rates

    def estimate(self, batch: int, estimate: ForwardEstimate) -> None:
        """Add a batch to an estimate."""
        self._reset()
        with substituted(estimate):
            self.value(batch, gradients=True).backward()  # type: ignore[no-untyped-call]

    def estimate_step(self, batch: int, estimate: BackwardEstimate, rate: float) -> None:
        """Add a batch, and the step on it, to an estimate."""
        self._reset()
        with substituted(estimate):
            estimate.begin()
            self.descend(batch, 0, rate)
            estimate.begin(stepped=True)
            self.value(batch)


@dataclass(frozen=True)
class _Unit:
    """A set of sites and operands that is quantized together."""

    name: str
    parts: _Parts

    @property
    def measure(self) -> Literal["forward", "step"]:
        return "forward" if any(operands & _FPROP for operands in self.parts.values()) else "step"


class _Study:
    """The units of a model under one policy, and what they cost.

    Attributes:
        units: in the order of the model.
    """

    def __init__(self, twin: _Twin, policy: Policy, kinds: Sequence[str], rates: Sequence[float]) -> None:
        if not policy.quantizes:
            raise Error(f"policy {policy.name!r} quantizes nothing, so there is nothing to measure; leave it out")
        self._twin, self._policy, self._rates = twin, policy, rates
        self._measured: dict[Any, list[list[float]]] = {}
        twin.use(policy)
        twin.value(0)
        runtime = require_runtime(twin.model, "sensitivity")
        self._quantized: dict[str, frozenset[Operand]] = {}
        self._modules: dict[int, dict[str, str]] = {}  # per rule: its modules by the names of their sites
        for site in runtime.sites:
            if not site.quantized or site.rule_index is None:
                continue
            if site.module is None:
                raise Error(f"policy {policy.name!r} quantizes a {site.op} of no module, which no rule names; keep it")
            name = site.module or "(root)"
            operands = frozenset(operand for operand, spec in site.operands.items() if spec is not None)
            self._quantized[name] = operands | self._quantized.get(name, frozenset())
            self._modules.setdefault(site.rule_index, {})[name] = site.module
        blocks = runtime.plan.names.blocks
        self._only: dict[frozenset[Operand], Policy] = {}
        units: dict[str, dict[str, frozenset[Operand]]] = {}
        for name, operands in self._quantized.items():
            module = name.removeprefix("(root)")
            block = next((around for around in upwards(module) if around in blocks), module) or "(root)"
            for operand in Operand:
                if operand in operands:
                    labels = {"site": name, "block": block, "operand": str(operand), "gemm": str(operand.gemm)}
                    unit = units.setdefault(", ".join(labels[kind] for kind in kinds), {})
                    unit[name] = unit.get(name, frozenset()) | {operand}
        self.units = [_Unit(name, parts) for name, parts in units.items()]

    def policy(self, parts: _Parts) -> Policy | None:
        """Return the policy that quantizes ``parts`` and nothing else; None where they are empty."""
        groups: defaultdict[frozenset[Operand], set[str]] = defaultdict(set)
        for site, operands in parts.items():
            groups[operands].add(site)
        groups.pop(frozenset(), None)
        rules: list[Any] = []
        for operands, sites in groups.items():
            part = self._only.setdefault(operands, only(self._policy, operands))
            rules += at(part, {
                index: names for index, modules in self._modules.items()
                if (names := [module for site, module in modules.items() if site in sites])
            })  # fmt: skip
        return joined(self._policy.name, rules) if rules else None

    def differences(self, unit: _Unit, *, keep: bool, repeats: int, steps: int) -> list[list[float]]:
        """Return the loss increase that a unit causes, of each batch by seeds of noise."""
        steps = steps if unit.measure == "step" else 0
        parts: _Parts = unit.parts
        if keep:
            parts = {site: own - unit.parts.get(site, frozenset()) for site, own in self._quantized.items()}
        seeds = range(repeats if self._draws else 1)
        reference = self._losses(self._quantized if keep else {}, seeds, steps)
        losses = self._losses(parts, seeds, steps)
        return [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(losses, reference, strict=True)]

    @property
    def _draws(self) -> bool:
        """Whether any quantizer of the policy may draw noise."""
        rules = (*self._policy.rules, self._policy.default)
        specs = any(spec is not None and spec.needs_key for rule in rules for spec in rule.specs.values())
        return specs or any(technique.draws for rule in rules for technique in rule.techniques)

    def _losses(self, parts: _Parts, seeds: range, steps: int) -> list[list[float]]:
        key = tuple(parts.items()), len(seeds), steps
        if key not in self._measured:
            self._twin.use(self.policy(parts))
            self._measured[key] = [
                [self._twin.measure(batch, seed, self._rates, steps) for seed in seeds]
                for batch in range(self._twin.count)
            ]
        return self._measured[key]

    def estimates(self, terms: int) -> dict[str, tuple[float, float | None]]:
        """Return the estimate and the signal-to-noise ratio in dB of each unit, by name."""
        noise = Noise()
        sites: defaultdict[frozenset[Operand], set[str]] = defaultdict(set)
        for unit in self.units:
            for site, operands in unit.parts.items():
                sites[operands & _FPROP].add(site)
                sites[operands - _FPROP].add(site)
        sites.pop(frozenset(), None)
        values: dict[tuple[str, frozenset[Operand]], float] = {}
        for operands, named in sites.items():
            estimate = ForwardEstimate(noise, terms) if operands <= _FPROP else BackwardEstimate(noise)
            self._twin.use(self.policy(dict.fromkeys(named, operands)))
            for batch in range(self._twin.count):
                if isinstance(estimate, ForwardEstimate):
                    self._twin.estimate(batch, estimate)
                else:
                    self._twin.estimate_step(batch, estimate, self._rates[batch])
            values |= {(site, operands): estimate.increase(site) / self._twin.count for site in named}
        result = {}
        for unit in self.units:
            wanted = _FPROP if unit.measure == "forward" else frozenset(Operand)
            ratios = [noise.ratio(site, operand) for site, operands in unit.parts.items() for operand in operands]
            known = [ratio for ratio in ratios if ratio is not None]
            mean = statistics.fmean(known) if known else 0.0
            increase = math.fsum(values.get((site, operands & wanted), 0.0) for site, operands in unit.parts.items())
            result[unit.name] = increase, -10 * math.log10(mean) if mean else None
        return result
