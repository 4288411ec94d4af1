"""Recordings of a sample of each operand, and of each site's output (:class:`fp4graph.graph.observe.Recording`)."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4graph.lab.statistics import metrics as m
from fp4graph.lab.statistics.sampling import Moments, Selection, sample
from fp4graph.ops.observe import ObservedOperand, OperandObserver
from fp4graph.technique.operands import Gemm, Operand


class OperandRecording:
    """Sums over sampled operands, added up over the forwards and backwards of a step.

    Sums are added as Python numbers: a checkpointed region must run the same operators when it is recomputed.
    """

    def __init__(self, patterns: Sequence[str], metrics: frozenset[str], sample: int | None, device: str) -> None:
        self._patterns, self._metrics, self._sample, self._device = patterns, metrics, sample, device
        self.sites: set[str] = set()  # every site that was offered
        self.autocast: torch.dtype | None = None  # the dtype of the latest forward's autocast
        self.clear()

    def clear(self) -> None:
        """Begin a new step."""
        self._sums: dict[tuple[str, str], dict[str, Any]] = {}
        self._limits: dict[str, float] = {}
        self._left_out: dict[tuple[str, str], list[str]] = {}
        self.seen = False

    def operands(self, site: str) -> OperandObserver | None:
        self.sites.add(site)
        self.seen = True
        if not matches(self._patterns, site):
            return None
        enabled = torch.is_autocast_enabled(self._device)
        self.autocast = torch.get_autocast_dtype(self._device) if enabled else None
        return partial(self._add_gemm, site, {})

    def output(self, site: str, y: Tensor) -> None:
        """Ignored: the input of a site changes from step to step."""

    def finish(self) -> list[dict[str, Any]]:
        """Return the measurements of the step, one for each site and tensor."""
        measured = []
        for (site, tensor), sums in self._sums.items():
            is_gemm = tensor in set(Gemm)
            fields = m.gemm_fields(sums) if is_gemm else m.operand_fields(sums, self._metrics, self._limits.get(site))
            if left_out := self._left_out.get((site, tensor)):
                fields["left_out"] = left_out
            measured.append({"site": site, "tensor": tensor, **fields})
        return measured

    @torch.no_grad()
    def _add_gemm(self, site: str, exact: dict[Operand, Tensor], left: ObservedOperand, right: ObservedOperand) -> None:
        """Add the statistics of one GEMM; ``exact`` holds the fprop operands in high precision until the backward."""
        gemm, wants_gradient = left.operand.gemm, "gradient" in self._metrics
        if gemm is Gemm.FPROP and wants_gradient:
            exact.update({Operand.DGRAD_WEIGHT: right.given.mT, Operand.WGRAD_INPUT: left.given.mT})
        # An operand may be empty, such as the input of an expert without tokens; the other one is measured.
        measured = [self._add_operand(site, exact, seen) for seen in (left, right) if seen.x.numel()]
        if gemm is not Gemm.FPROP and wants_gradient and len(measured) == 2:
            (left_moments, left_exact), (right_moments, right_exact) = measured
            self._add(site, str(gemm), m.gradient_sums(left_moments, right_moments, left_exact, right_exact))

    def _add_operand(self, site: str, exact: dict[Operand, Tensor], seen: ObservedOperand) -> tuple[Moments, Tensor]:
        """Return the moments of the sampled lines, and the same lines of the factor in high precision."""
        selection = Selection(tuple(seen.x.shape), self._sample)
        if seen.program.spec is None:
            x = selection.of(seen.x)
            moments = Moments(x)
        else:
            sampled = sample(seen, selection)
            x, moments = sampled.x, sampled.moments
            sums = m.operand_sums(sampled)
            if "scales" in self._metrics:
                sums |= m.scale_sums(sampled.scales, seen.program.spec.scale.format)
            if seen.operand is Operand.FPROP_WEIGHT:
                # A threshold belongs to one element format: where blocks choose, none is common to the weights.
                several = self._metrics & {"confidence"} if seen.program.spec.others else frozenset()
                sums |= m.latent_sums(sampled.ratio, sampled.element, self._metrics - several)
                if several:
                    self._left_out[site, str(seen.operand)] = sorted(several)
                self._limits[site] = sampled.element.max
            self._add(site, str(seen.operand), sums)
        given = exact.get(seen.operand, seen.given)
        return moments, x if given is seen.x or seen.operand.gemm is Gemm.FPROP else selection.of(given)

    def _add(self, site: str, tensor: str, sums: Mapping[str, Tensor]) -> None:
        # One transfer off the device for scalars and histograms.
        values = iter(torch.cat([each.reshape(-1) for each in sums.values()]).tolist() if sums else ())
        former = self._sums.setdefault((site, tensor), {})
        for name, each in sums.items():
            if each.dim():
                counts = former.get(name, [0.0] * each.numel())
                former[name] = [count + next(values) for count in counts]
            else:
                former[name] = former.get(name, 0.0) + next(values)


class OutputRecording:
    """Each site's output, and its relative change from one run of a probe to the next."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns
        self.clear()

    def clear(self) -> None:
        """Begin a new window."""
        self._now: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._rates: dict[str, list[Tensor]] = defaultdict(list)

    def operands(self, site: str) -> OperandObserver | None:
        return None

    def output(self, site: str, y: Tensor) -> None:
        if matches(self._patterns, site):
            self._now[site] = y.detach().clone()

    def advance(self) -> None:
        """Compare the outputs of the run that has just ended with those of the run before it."""
        for site in self._now.keys() & self._last.keys():
            self._rates[site].append(m.relative_change(self._now[site], self._last[site]))
        self._last, self._now = self._now, {}

    def measurements(self) -> list[dict[str, Any]]:
        """Return one measurement for each site, in the model's order: the mean over the window's steps."""
        return [
            {"site": site, "tensor": "output", "rate_of_change": torch.stack(self._rates[site]).nanmean().item()}
            for site in self._last
            if self._rates[site]
        ]


def matches(patterns: Sequence[str], site: str) -> bool:
    """Return whether a pattern fits a site, or the module whose second or later site it is."""
    return any(fnmatch.fnmatchcase(name, p) for p in patterns for name in (site, site.partition("#")[0]))
