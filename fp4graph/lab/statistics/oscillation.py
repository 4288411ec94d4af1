"""Movement of weights and their quantized values over a window of optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4graph.lab.statistics import metrics as m
from fp4graph.lab.statistics.sampling import Selection, by_block
from fp4graph.model.weight import Weight
from fp4graph.numerics.sharding import whole
from fp4graph.ops.product import total

#: Elements of each weight that are followed step by step, and the number of them whose paths are recorded.
FOLLOWED, SHOWN = 256, 2


class Moving:
    """Sampled lines of one weight over a window: :meth:`advance` once to begin, then after each optimizer step."""

    def __init__(self, weight: Weight, sample: int | None) -> None:
        self._weight = weight
        stored = weight.parameter
        self._selection = Selection(tuple((stored.mT if weight.stored_transposed else stored).shape), sample)
        assert weight.plan.program is not None
        fprop = weight.plan.program.fprop
        spec = fprop.right.spec
        self._quantizes = spec is not None
        #: The format whose grid tells a flip from a new scale; None where blocks choose, for none is common to them.
        self._element = None if spec is None or spec.others else spec.element
        composed = fprop.right.draws or fprop.transforms or weight.plan.program.apart is not None
        #: The quantizer, where the sampled lines can be quantized without the others.
        self._program = fprop.right if by_block(fprop.right) and not composed else None
        self._last: tuple[Tensor, Tensor] | None = None
        self._moved = self._moved_q = self._flips = torch.zeros(())
        self._rates: list[Tensor] = []
        self._path: list[Tensor] = []

    @torch.no_grad()
    def advance(self, step: Tensor) -> None:
        """Measure the movement since the last call; ``step`` is the noise of the latest forward."""
        now = self._sampled(self._weight.parameter)
        q = self._quantized(now, step)
        if self._last is not None:
            former, former_q = self._last
            self._moved, self._moved_q = self._moved + (now - former).abs(), self._moved_q + (q - former_q).abs()
            if self._element is not None:
                self._flips = self._flips + m.flipped(q, former_q, self._element)
            self._rates.append(torch.stack([m.relative_change(now, former), m.relative_change(q, former_q)]))
        self._last = now, q
        self._path.append(torch.stack([now.flatten()[:FOLLOWED], q.flatten()[:FOLLOWED]]))

    def _quantized(self, now: Tensor, step: Tensor) -> Tensor:
        """Return the sampled lines quantized as the graph does it, in the weight's basis."""
        if not self._quantizes:
            return now
        if self._program is not None:
            return total(self._program(now, None, self._weight.fprop_state(self._selection.of)))
        return self._sampled(self._weight.quantize(self._weight.parameter, step))

    def _sampled(self, w: Tensor) -> Tensor:
        w = whole(w.detach())
        return self._selection.of(w.mT if self._weight.stored_transposed else w)

    def measurement(self, steps: int, metrics: frozenset[str]) -> dict[str, Any]:
        """Return the measurement of a window of so many steps."""
        site, name = self._weight.fqn or "(root)", self._weight.parameter_name
        found: dict[str, Any] = {"site": site, "tensor": name, "window": steps}
        if "oscillation" in metrics:
            ratio = m.oscillation_ratio(self._moved_q, self._moved)
            edges = torch.tensor(m.RATIO_EDGES, device=ratio.device)
            found["oscillating"] = (ratio > m.OSCILLATING).float().mean().item()
            counts = torch.bincount(torch.bucketize(ratio.flatten(), edges), minlength=len(edges) + 1)
            found["ratio_counts"] = counts.tolist()
            found["trajectories"] = self._trajectories(ratio.flatten()[:FOLLOWED])
        if "flips" in metrics and self._quantizes and self._element is None:
            found["left_out"] = ["flips"]
        elif "flips" in metrics:
            found["flips"] = (self._flips / steps).mean().item()
            found["flipping"] = (self._flips > 0).float().mean().item()
        if "rate_of_change" in metrics:
            rates = torch.stack(self._rates)
            found["rate_of_change"], found["quantized_rate_of_change"] = rates.nanmean(0).tolist()
            found["skipped_steps"] = int(rates.isnan().any(1).sum())
        return found

    def _trajectories(self, ratio: Tensor) -> list[dict[str, Any]]:
        """Return the paths of the followed elements with the largest finite ratios."""
        ratio = torch.where(ratio.isfinite(), ratio, -1.0)
        path = torch.stack(self._path)  # [steps + 1, 2, followed]
        return [
            {"ratio": ratio[i].item(), "weight": path[:, 0, i].tolist(), "quantized": path[:, 1, i].tolist()}
            for i in ratio.topk(min(SHOWN, len(ratio))).indices.tolist()
            if ratio[i] > 0
        ]
