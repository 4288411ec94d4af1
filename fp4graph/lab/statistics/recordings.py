"""Recordings of operands and of sites' outputs (:class:`fp4graph.graph.observe.Recording`), and of moving weights."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4graph.lab.statistics import metrics as m
from fp4graph.lab.statistics.sampling import Moments, Selection, by_block, sample
from fp4graph.model import weight_quantizer
from fp4graph.model.weight import Weight
from fp4graph.ops.observe import ObservedOperand, OperandObserver
from fp4graph.ops.product import total
from fp4graph.technique.operands import Gemm, Operand

#: The number of each weight's elements that are followed step by step, and the number of their paths in a record.
FOLLOWED, SHOWN = 256, 2


def matches(patterns: Sequence[str], site: str) -> bool:
    """Return whether a pattern matches a site's name, with or without the number after ``#``."""
    return any(fnmatch.fnmatchcase(name, p) for p in patterns for name in (site, site.partition("#")[0]))


class OperandRecording:
    """Sums over sampled operands, added up over the forwards and backwards of a step.

    The sums are Python numbers, because a checkpointed region must run the same operators when it is recomputed.
    """

    def __init__(self, patterns: Sequence[str], metrics: frozenset[str], sample: int | None) -> None:
        self._patterns, self._metrics, self._sample = patterns, metrics, sample
        self.sites: set[str] = set()  # every site that has run
        self.clear()

    def clear(self) -> None:
        """Begin a new step."""
        self._sums: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
        self._limits: dict[str, float] = {}
        self._left_out: dict[tuple[str, str], list[str]] = {}
        self.seen = False

    def operands(self, site: str) -> OperandObserver | None:
        self.sites.add(site)
        self.seen = True
        return partial(self._add_gemm, site, {}) if matches(self._patterns, site) else None

    def output(self, site: str, y: Tensor) -> None:
        """Ignore outputs, because a site's input differs between steps."""

    def finish(self) -> list[dict[str, Any]]:
        """Return the measurements of the step, one for each site and tensor."""
        measured = []
        for (site, tensor), sums in self._sums.items():
            is_gemm = tensor in set(Gemm)
            fields = m.gemm_fields(sums) if is_gemm else m.operand_fields(sums, self._metrics, self._limits.get(site))
            left_out = self._left_out.get((site, tensor))
            measured.append({"site": site, "tensor": tensor, **fields, **({"left_out": left_out} if left_out else {})})
        return measured

    @torch.no_grad()
    def _add_gemm(self, site: str, exact: dict[Operand, Tensor], left: ObservedOperand, right: ObservedOperand) -> None:
        """Add the statistics of one GEMM; ``exact`` holds the fprop operands in high precision until the backward."""
        gemm, wants_gradient = left.operand.gemm, "gradient" in self._metrics
        if gemm is Gemm.FPROP and wants_gradient:
            exact.update({Operand.DGRAD_WEIGHT: right.given.mT, Operand.WGRAD_INPUT: left.given.mT})
        # An operand may be empty, such as the input of an expert without tokens; the other operand is still measured.
        measured = [self._add_operand(site, exact, seen) for seen in (left, right) if seen.x.numel()]
        if gemm is not Gemm.FPROP and wants_gradient and len(measured) == 2:
            (left_moments, left_exact), (right_moments, right_exact) = measured
            self._add(site, str(gemm), m.gradient_sums(left_moments, right_moments, left_exact, right_exact))

    def _add_operand(self, site: str, exact: dict[Operand, Tensor], seen: ObservedOperand) -> tuple[Moments, Tensor]:
        """Add an operand; return the moments of its sampled lines, and the same lines of its high-precision factor."""
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
                # Confidence needs thresholds, which differ between blocks that choose their format.
                left_out = self._metrics & {"confidence"} if seen.program.spec.others else frozenset()
                sums |= m.latent_sums(sampled.ratio, sampled.element, self._metrics - left_out)
                self._left_out[site, str(seen.operand)] = sorted(left_out)
                self._limits[site] = sampled.element.max
            self._add(site, str(seen.operand), sums)
        factor = exact.get(seen.operand, seen.given)
        return moments, x if factor is seen.x or seen.operand.gemm is Gemm.FPROP else selection.of(factor)

    def _add(self, site: str, tensor: str, sums: Mapping[str, Tensor]) -> None:
        totals = self._sums[site, tensor]
        # One transfer off the device for scalars and histograms.
        values = iter(torch.cat([each.reshape(-1) for each in sums.values()]).tolist() if sums else ())
        for name, each in sums.items():
            if each.dim():
                counts = totals.get(name, [0.0] * each.numel())
                totals[name] = [count + next(values) for count in counts]
            else:
                totals[name] = totals.get(name, 0.0) + next(values)


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
        """Compare the outputs of the latest run with those of the run before."""
        for site in self._now.keys() & self._last.keys():
            self._rates[site].append(m.relative_change(self._now[site], self._last[site]))
        self._last, self._now = self._now, {}

    def measurements(self) -> list[dict[str, Any]]:
        """Return one measurement for each site, in the model's order: the mean over the window's steps."""
        rates = {site: torch.stack(self._rates[site]).nanmean().item() for site in self._last if self._rates[site]}
        return [{"site": site, "tensor": "output", "rate_of_change": rate} for site, rate in rates.items()]


class Moving:
    """Sampled lines of one weight over a window; call :meth:`advance` at its beginning and after each step."""

    def __init__(self, weight: Weight, sample: int | None) -> None:
        self._weight, program = weight, weight.plan.program
        assert program is not None
        self._selection = Selection(tuple(weight_quantizer.matrix(weight, weight.parameter).shape), sample)
        quantizer = program.fprop.right
        self._spec = quantizer.spec
        # Flips need the grid of the format, which differs between blocks that choose their format.
        self._element = None if self._spec is None or self._spec.others else self._spec.element
        composed = quantizer.draws or program.fprop.transforms or program.apart is not None
        self._program = quantizer if by_block(quantizer) and not composed else None  # None: lines depend on each other
        self._last: tuple[Tensor, Tensor] | None = None
        self._moved = self._moved_q = self._flips = torch.zeros(())
        self._rates: list[Tensor] = []
        self._path: list[Tensor] = []

    @torch.no_grad()
    def advance(self, step: Tensor, autocast: torch.dtype | None) -> None:
        """Measure the movement since the last call; ``step`` and ``autocast`` are those of the latest forward."""
        now = self._sampled(self._weight.parameter)
        q = self._quantized(now, step, autocast).to(now.dtype)
        if self._last is not None:
            last, last_q = self._last
            self._moved, self._moved_q = self._moved + (now - last).abs(), self._moved_q + (q - last_q).abs()
            if self._element is not None:
                self._flips = self._flips + m.flipped(q, last_q, self._element)
            self._rates.append(torch.stack([m.relative_change(now, last), m.relative_change(q, last_q)]))
        self._last = now, q
        self._path.append(torch.stack([now.flatten()[:FOLLOWED], q.flatten()[:FOLLOWED]]))

    def _quantized(self, now: Tensor, step: Tensor, autocast: torch.dtype | None) -> Tensor:
        """Return the sampled lines quantized as the graph does it, in the weight's basis."""
        if self._spec is None:
            return now
        if self._program is not None:
            x = weight_quantizer.cast(self._weight, now, autocast)
            return total(
                self._program(x, None, weight_quantizer.fprop_state(self._weight, self._selection.of, x.dtype))
            )
        return self._sampled(weight_quantizer.quantize(self._weight, self._weight.parameter, step, autocast))

    def _sampled(self, w: Tensor) -> Tensor:
        return self._selection.of(weight_quantizer.matrix(self._weight, w.detach()))

    def measurement(self, steps: int, metrics: frozenset[str]) -> dict[str, Any]:
        """Return the measurement of a window of ``steps`` steps."""
        site, tensor = self._weight.fqn or "(root)", self._weight.parameter_name
        fields: dict[str, Any] = {"site": site, "tensor": tensor, "window": steps}
        if "oscillation" in metrics:
            ratio = m.oscillation_ratio(self._moved_q, self._moved)
            edges = torch.tensor(m.RATIO_EDGES, device=ratio.device)
            fields["oscillating"] = (ratio > m.OSCILLATING).float().mean().item()
            counts = torch.bincount(torch.bucketize(ratio.flatten(), edges), minlength=len(edges) + 1)
            fields["ratio_counts"] = counts.tolist()
            fields["trajectories"] = self._trajectories(ratio.flatten()[:FOLLOWED])
        if "flips" in metrics and self._spec is not None and self._element is None:
            fields["left_out"] = ["flips"]
        elif "flips" in metrics:
            fields["flips"] = (self._flips / steps).mean().item()
            fields["flipping"] = (self._flips > 0).float().mean().item()
        if "rate_of_change" in metrics:
            rates = torch.stack(self._rates)
            fields["rate_of_change"], fields["quantized_rate_of_change"] = rates.nanmean(0).tolist()
            fields["skipped_steps"] = int(rates.isnan().any(1).sum())
        return fields

    def _trajectories(self, ratio: Tensor) -> list[dict[str, Any]]:
        """Return the paths of the followed elements with the largest finite ratios."""
        ratio = torch.where(ratio.isfinite(), ratio, -1.0)
        path = torch.stack(self._path)  # [steps + 1, 2, followed]
        return [
            {"ratio": ratio[i].item(), "weight": path[:, 0, i].tolist(), "quantized": path[:, 1, i].tolist()}
            for i in ratio.topk(min(SHOWN, len(ratio))).indices.tolist()
            if ratio[i] > 0
        ]
