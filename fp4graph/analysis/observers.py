"""What looks on while a step is computed: takes lines of operands down, and makes statistics of them afterwards."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4graph.analysis import metrics as m
from fp4graph.analysis.lines import Lines, Moments, Quantizers, Raw, Selection, quantize_together, taken
from fp4graph.analysis.records import gemm_record, operand_record
from fp4graph.ops.observe import ObservedOperand, OperandObserver
from fp4graph.technique.operands import Gemm, Operand

#: Elements that may wait for being looked at; a step of many forwards is then looked at piece by piece.
_WAITING = 1 << 24
#: Elements that are looked at at once: what is made of them takes dozens of times as much memory, in fp32.
_TOGETHER = 1 << 20


class Collector:
    """The observer of a step: keeps lines of operands, and makes statistics of them when the step is done."""

    def __init__(self, patterns: Sequence[str], metrics: frozenset[str], sample: int | None, device: str) -> None:
        self._patterns, self._metrics, self._sample, self._device = patterns, metrics, sample, device
        self._selections: dict[tuple[int, ...], Selection] = {}
        self.sites: set[str] = set()  # that were offered
        self._quantizers = Quantizers()
        self.autocast: torch.dtype | None = None  # in which the latest forward ran
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._raw: list[tuple[str, Operand, Raw]] = []
        self._whole: list[tuple[str, Operand, Lines]] = []
        self._pairs: list[_Pair] = []
        self._waiting = 0
        self._sums: dict[tuple[str, str], dict[str, Any]] = {}
        self.seen = False

    def operands(self, site: str) -> OperandObserver | None:
        self.sites.add(site)
        self.seen = True
        if not matches(self._patterns, site):
            return None
        if self._waiting > _WAITING:
            self._look()
        enabled = torch.is_autocast_enabled(self._device)
        self.autocast = torch.get_autocast_dtype(self._device) if enabled else None
        return _SiteCall(self, site)

    def output(self, site: str, y: Tensor) -> None:
        """Not looked at: from step to step its input changes."""

    def keep(self, site: str, seen: ObservedOperand, selection: Selection) -> tuple[Tensor, Callable[[], Moments]]:
        """Take lines of an operand down; returns them as they were before they were quantized, and what gives the
        moments of what became of them, once :meth:`finish` is at work."""
        if seen.program.spec is None:
            exact = selection.of(seen.x)
            return exact, lambda: Moments(exact)
        lines = taken(seen, selection, self._quantizers)
        self._waiting += 2 * lines.x.numel()
        if isinstance(lines, Lines):
            self._whole.append((site, seen.operand, lines))
            return lines.rows.of(lines.x, 0), lambda: lines.moments(0)
        self._raw.append((site, seen.operand, lines))
        return lines.x, lambda: self._moments(lines)

    def pair(self, pair: _Pair) -> None:
        """The operands of a backward GEMM, for its gradient's statistics."""
        self._pairs.append(pair)

    @property
    def wants_gradients(self) -> bool:
        return "gradient" in self._metrics

    def selection(self, x: Tensor) -> Selection:
        """Which lines of ``x`` are looked at."""
        shape = tuple(x.shape)
        if shape not in self._selections:
            self._selections[shape] = Selection(shape, self._sample)
        return self._selections[shape]

    def finish(self) -> list[dict[str, Any]]:
        """The records of the step."""
        self._look()
        records = []
        for (site, tensor), sums in self._sums.items():
            make = gemm_record if tensor in set(Gemm) else operand_record
            records.append({"site": site, "tensor": tensor, **make(sums, self._metrics)})
        return records

    def _look(self) -> None:
        """Make sums of all that waits."""
        self._places: dict[Raw, tuple[Lines, int]] = {}
        for group in _grouped(self._raw):
            lines = quantize_together([raw for *_, raw in group])
            self._places |= {raw: (lines, place) for place, (*_, raw) in enumerate(group)}
            self._add([(site, operand) for site, operand, _ in group], lines)
        for site, operand, lines in self._whole:
            self._add([(site, operand)], lines)
        self._add_gradients()
        self._raw, self._whole, self._pairs, self._waiting = [], [], [], 0
        del self._places

    def _moments(self, raw: Raw) -> Moments:
        lines, place = self._places[raw]
        return lines.moments(place)

    def _add_gradients(self) -> None:
        """Pairs of equal shapes side by side."""
        groups: dict[Any, list[tuple[_Pair, Moments, Moments]]] = defaultdict(list)
        for pair in self._pairs:
            left, right = pair.left(), pair.right()
            if left.mean is None or right.mean is None:  # random in more than the rounding of elements
                self._sums.setdefault((pair.site, str(pair.gemm)), {})
            else:
                shapes = left.mean.shape, right.mean.shape, pair.left_exact.shape, pair.right_exact.shape
                groups[(*shapes, left.variance is None, right.variance is None)].append((pair, left, right))
        for group in groups.values():
            pairs, lefts, rights = zip(*group, strict=True)
            exact = torch.stack([p.left_exact for p in pairs]), torch.stack([p.right_exact for p in pairs])
            sums = m.gradient_sums(Moments.together(lefts), Moments.together(rights), *exact)
            self._add_rows([(pair.site, str(pair.gemm)) for pair in pairs], _rows(sums))

    def _add(self, tensors: Sequence[tuple[str, Operand]], lines: Lines) -> None:
        sums = m.operand_sums(lines)
        if "scales" in self._metrics:
            sums |= m.scale_sums(lines)
        rows = _rows(sums)
        # Weights may be among activations and gradients.
        weights = [place for place, (_, operand) in enumerate(tensors) if operand is Operand.FPROP_WEIGHT]
        if weights and self._metrics & {"confidence", "latent"}:
            latent = lines.rows.choose(lines.ratio, weights)
            of_weights = _rows(m.latent_sums(latent, lines.rows.chosen(weights), lines.element, self._metrics))
            for place, of_weight in zip(weights, of_weights, strict=True):
                rows[place] |= of_weight
        self._add_rows([(site, str(operand)) for site, operand in tensors], rows)

    def _add_rows(self, tensors: Sequence[tuple[str, str]], rows: Sequence[dict[str, Any]]) -> None:
        for tensor, new in zip(tensors, rows, strict=True):
            former = self._sums.get(tensor)
            self._sums[tensor] = new if not former else _summed(former, new)


@dataclass(frozen=True)
class _Pair:
    """The operands of one backward GEMM, and the same lines of the factors in high precision."""

    site: str
    gemm: Gemm
    left: Callable[[], Moments]
    right: Callable[[], Moments]
    left_exact: Tensor
    right_exact: Tensor


class _SiteCall:
    """One forward of one site, and its backward."""

    def __init__(self, collector: Collector, site: str) -> None:
        self._collector, self._site = collector, site
        self._exact: dict[Operand, Tensor] = {}

    def __call__(self, left: ObservedOperand, right: ObservedOperand) -> None:
        gemm = left.operand.gemm
        if gemm is Gemm.FPROP and self._collector.wants_gradients:
            self._exact = {Operand.DGRAD_WEIGHT: right.given.mT, Operand.WGRAD_INPUT: left.given.mT}
        selections = [self._collector.selection(seen.x) for seen in (left, right)]
        # Of an expert without tokens, say, there is nothing to see but its weight.
        of_left, of_right = (
            self._collector.keep(self._site, seen, selection) if seen.x.numel() else None
            for seen, selection in zip((left, right), selections, strict=True)
        )
        if gemm is Gemm.FPROP or not self._collector.wants_gradients or of_left is None or of_right is None:
            return
        exact = self._given(left, selections[0], of_left[0]), self._given(right, selections[1], of_right[0])
        self._collector.pair(_Pair(self._site, gemm, of_left[1], of_right[1], *exact))

    def _given(self, seen: ObservedOperand, selection: Selection, x: Tensor) -> Tensor:
        """The lines of a factor in high precision; ``x`` are those of what was quantized."""
        given = self._exact.get(seen.operand, seen.given)
        return x if given is seen.x else selection.of(given)


class Outputs:
    """The observer of a probe: what every site returns, and how that changes from one look to the next."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._now: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._rates: dict[str, list[Tensor]] = defaultdict(list)

    def operands(self, site: str) -> OperandObserver | None:
        return None

    def output(self, site: str, y: Tensor) -> None:
        if matches(self._patterns, site):
            self._now[site] = y.detach().clone()

    def advance(self) -> None:
        """The model was run: compare with the time before."""
        for site in self._now.keys() & self._last.keys():
            self._rates[site].append(m.relative_change(self._now[site], self._last[site]))
        self._last, self._now = self._now, {}

    def records(self) -> list[dict[str, Any]]:
        """One for each site, in the model's order: the mean over the steps looked at."""
        return [
            {"site": site, "tensor": "output", "rate_of_change": torch.stack(self._rates[site]).nanmean().item()}
            for site in self._last
            if self._rates[site]
        ]


def _grouped(raw: Sequence[tuple[str, Operand, Raw]]) -> list[list[tuple[str, Operand, Raw]]]:
    """Those that are quantized together, :data:`_TOGETHER` elements at a time."""
    groups: list[list[tuple[str, Operand, Raw]]] = []
    open_: dict[Any, tuple[list[tuple[str, Operand, Raw]], int]] = {}
    for each in raw:
        kind = each[2].alike()
        group, elements = open_.get(kind, ([], _TOGETHER))
        if elements >= _TOGETHER:
            groups.append(group := [])
            elements = 0
        group.append(each)
        open_[kind] = group, elements + each[2].x.numel()
    return groups


def _rows(sums: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Of each of G tensors its numbers and lists of them: one transfer for all scalars, one for each histogram."""
    scalars = {name: value for name, value in sums.items() if value.dim() == 1}
    tables = {name: value.tolist() for name, value in sums.items() if value.dim() == 2}
    columns = torch.stack(list(scalars.values()), 1).tolist()
    return [
        dict(zip(scalars, column, strict=True)) | {name: table[place] for name, table in tables.items()}
        for place, column in enumerate(columns)
    ]


def _summed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    def add(name: str) -> Any:
        if name == "latent_limit":
            return a[name]
        if isinstance(a[name], list):
            return [x + y for x, y in zip(a[name], b[name], strict=True)]
        return a[name] + b[name]

    return {name: add(name) for name in a}


def matches(patterns: Sequence[str], site: str) -> bool:
    """Whether a site, or the module whose second or later site it is, fits a pattern."""
    return any(fnmatch.fnmatchcase(name, p) for p in patterns for name in (site, site.partition("#")[0]))
