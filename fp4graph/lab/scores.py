"""The scores of a sensitivity measurement: a ranking, a table, a heat map, and a file."""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from rich.table import Table

from fp4graph.errors import Error, needs, suggest
from fp4graph.files import read_json, write
from fp4graph.lab.pictures.style import LABELS, plain, styled, subplots
from fp4graph.model.html import html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT, VERSION = "fp4graph.sensitivity", 1
_T = TypeVar("_T")


@dataclass(frozen=True)
class Score:
    """The loss increase that one unit causes under one policy."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")

    unit: str  # a site, block, operand or GEMM, or a combination such as "fc1, fprop"
    sites: tuple[str, ...]  # the modules of the unit's sites, by name; "(root)" is the model itself
    operands: tuple[str, ...]  # the unit's operands that the policy quantizes, such as "fprop.input"
    policy: str
    increase: float  # the increase of the mean loss; NaN if only estimated, infinite if a loss was not finite
    error: float  # the standard error of ``increase``; NaN for a single difference
    snr_db: float | None = None  # signal-to-noise ratio of the unit's operands; None if no operand was multiplied
    estimate: float | None = None  # the estimate of ``increase``
    #: Which loss increased: that of a forward or, for units without operands of fprop, the loss after steps of SGD.
    measure: Literal["forward", "step"] = "forward"

    def to_json(self) -> dict[str, Any]:
        return dict(json.loads(TypeAdapter(Score).dump_json(self)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Score:
        """Read what :meth:`to_json` returned; raise an Error if a field is missing or has another type."""
        return _valid(cls, data, "a score")

    @property
    def value(self) -> float:
        """The increase if it was measured, else the estimate."""
        return (self.estimate or 0.0) if math.isnan(self.increase) else self.increase


@dataclass(frozen=True)
class Sensitivity:
    """The scores of every unit under every policy."""

    scores: tuple[Score, ...]  # by policy, and within a policy in the order of the model
    loss: float  # of the unquantized model, averaged over the batches
    batches: int
    repeats: int  # the number of noise seeds, if a policy rounds stochastically or otherwise draws
    keep: bool = False  # True: all but the unit was quantized; increases are relative to the fully quantized model

    def ranking(self, policy: str | None = None, measure: str | None = None) -> tuple[Score, ...]:
        """Return the scores from the most harmful unit on: all scores, or those of a policy, a measure or both."""
        chosen = [s for s in self.scores if policy in (None, s.policy) and measure in (None, s.measure)]
        return tuple(sorted(chosen, key=lambda score: score.value if self.keep else -score.value))

    @property
    def correlation(self) -> dict[tuple[str, str], float]:
        """Spearman's rank correlation of ``estimate`` with ``increase`` over units, by policy and measure.

        It needs at least three measured units, and is NaN if the estimates or the increases are constant.
        """
        needs("scipy", "rank correlations need scipy", "analysis")
        from scipy.stats import spearmanr

        pairs: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for score in self.scores:
            if score.estimate is not None and not math.isnan(score.increase):
                pairs[score.policy, score.measure].append((score.estimate, score.increase))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of constant values
            return {key: float(spearmanr(each).statistic) for key, each in pairs.items() if len(each) > 2}

    def table(self, limit: int | None = 20) -> Table:
        """Return the ranking as a table for a terminal: the first ``limit`` units of each policy and measure."""
        what = "all but one unit quantized, relative to all" if self.keep else "one unit quantized, relative to none"
        table = Table(title=f"loss {self.loss:.4g}; {what}; {self.batches} batches", title_justify="left")
        for name in ("policy", "unit", "measure", "increase", "± se", "estimate", "SNR, dB"):
            words = name in ("policy", "unit", "measure")
            table.add_column(name, justify="left" if words else "right", overflow="fold" if words else "ellipsis")
        for group in dict.fromkeys((score.policy, score.measure) for score in self.scores):
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

    def _repr_html_(self) -> str:
        return html(self.table())

    @styled()
    def figure(self, policy: str | None = None) -> Figure:
        """Draw heat maps of the increase under a policy, by default the first: sites by operands, a map per measure."""
        policies = dict.fromkeys(score.policy for score in self.scores)
        policy = policy or next(iter(policies), "")
        if policy not in policies:
            raise Error(f"there are no scores of policy {policy!r}; {suggest(policy, policies)}")
        groups = {measure: scores for measure in ("forward", "step") if (scores := self.ranking(policy, measure))}
        sites = list(dict.fromkeys(site for s in self.scores if s.policy == policy for site in s.sites))
        picture, panels = subplots(1.4 + 0.24 * len(sites), 1, len(groups), sharey=True, squeeze=False)
        for axes, (measure, scores) in zip(panels.flat, groups.items(), strict=True):
            columns = sorted({score.operands for score in scores}, key=lambda names: [*map([*LABELS].index, names)])
            values = np.full((len(sites), len(columns)), math.nan)
            for score in scores:
                values[[sites.index(site) for site in score.sites], columns.index(score.operands)] = score.value
            limit = np.abs(values[np.isfinite(values)]).max(initial=0) or 1.0
            image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
            axes.set_yticks(range(len(sites)), list(map(plain, sites)), fontsize=8)
            names = ["\n".join(LABELS[o] for o in operands) if len(operands) < 6 else "all six" for operands in columns]
            axes.set_xticks(range(len(columns)), names, fontsize=8, rotation=20)
            axes.grid(visible=False)
            axes.set_title(plain(f"{policy}, {measure}"))
            picture.colorbar(image, label="estimated increase" if math.isnan(scores[0].increase) else "loss increase")
        return picture

    def to_json(self, file: str | PathLike[str]) -> None:
        data = {"format": FORMAT, "version": VERSION, **json.loads(TypeAdapter(Sensitivity).dump_json(self))}
        write(file, json.dumps(data, indent=1, allow_nan=False) + "\n")

    @classmethod
    def from_json(cls, file: str | PathLike[str]) -> Sensitivity:
        """Read a file that :meth:`to_json` wrote; raise an Error for another or a damaged file, or if there is none."""
        try:
            data = read_json(Path(file))
        except OSError as error:
            raise Error(f"cannot read {file}: {error.strerror}; give a file of Sensitivity.to_json") from None
        if not isinstance(data, dict) or (data.pop("format", None), data.pop("version", None)) != (FORMAT, VERSION):
            raise Error(f"{file} was not written by Sensitivity.to_json of this version of fp4graph; measure it again")
        return _valid(cls, data, str(file))


def _valid(kind: type[_T], data: Any, what: str) -> _T:
    """Return ``data`` as a ``kind``; raise an Error that names the first wrong field."""
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as errors:
        first = errors.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise Error(f"{what} is damaged: {place}: {first['msg'].lower()}; restore it or measure it again") from None
