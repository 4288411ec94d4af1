"""How weights and their quantized values move over a window of optimizer steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4graph.analysis import metrics as m
from fp4graph.analysis.lines import Quantizers, Rows, Selection, by_block, row_width, stacked
from fp4graph.model.weight import Weight
from fp4graph.numerics.sharding import whole
from fp4graph.ops.product import total
from fp4graph.ops.state import OperandState

#: Elements of each weight that are followed step by step, and of those how many end up in the record.
FOLLOWED, SHOWN = 256, 2


class Window:
    """Measures over ``steps`` differences: :meth:`advance` once to begin, then after each optimizer step.

    Args:
        weights: that are quantized. sample: about how many elements of each are looked at, None for all.
        metrics: what :meth:`records` is to hold.
    """

    def __init__(self, weights: Sequence[Weight], steps: int, sample: int | None, metrics: frozenset[str]) -> None:
        self._steps, self._metrics = steps, metrics
        self._taken = -1  # differences so far
        quantizers = Quantizers()
        self._weights = [_Moving(weight, sample, quantizers) for weight in weights if weight.parameter.numel()]

    @property
    def full(self) -> bool:
        return self.left == 0

    @property
    def left(self) -> int:
        """Differences still to come."""
        return self._steps - self._taken

    @torch.no_grad()
    def advance(self, step: Tensor) -> None:
        """Look at the weights as they are now; ``step`` is the noise of the latest forward."""
        together: dict[Any, list[_Moving]] = defaultdict(list)
        for moving in self._weights:
            moving.take()
            together[moving.alike].append(moving)
        for group in together.values():
            program = group[0].program
            if program is None:
                for moving in group:
                    moving.quantized(moving.whole_quantized(step))
                continue
            rows = Rows(tuple(tuple(moving.now.shape) for moving in group), group[0].width)
            state = stacked(rows, [moving.state() for moving in group])
            q = total(program(rows.stack([moving.now for moving in group]), None, state))
            for place, moving in enumerate(group):
                moving.quantized(rows.of(q, place))
        self._taken += 1

    def records(self) -> list[dict[str, Any]]:
        """One for each weight."""
        return [moving.record(self._steps, self._metrics) for moving in self._weights]


class _Moving:
    """Lines of one weight in motion."""

    def __init__(self, weight: Weight, sample: int | None, quantizers: Quantizers) -> None:
        self._weight = weight
        out_features, in_features = self._canonical(weight.parameter).shape
        self._selection = Selection((out_features, in_features), sample)
        assert weight.plan.program is not None
        fprop = weight.plan.program.fprop
        self.element = None if fprop.right.spec is None else fprop.right.spec.element
        simple = by_block(fprop.right) and not fprop.right.draws and not fprop.transforms
        #: The quantizer, where blocks can be quantized by themselves and with those of other weights.
        self.program = quantizers.one(fprop.right) if simple else None
        self._last: tuple[Tensor, Tensor] | None = None
        self._moved = self._moved_q = self._flips = torch.zeros(())
        self._rates: list[Tensor] = []
        self._path: list[Tensor] = []

    @property
    def alike(self) -> Any:
        """What is equal for weights that are quantized together."""
        return id(self) if self.program is None else (id(self.program), self.width, self.now.device)

    @property
    def width(self) -> int:
        """Elements of a row, where there is a program."""
        assert self.program is not None
        return row_width(self.program, self.now)

    def state(self) -> OperandState:
        """The same lines of the state of the quantizer's techniques."""
        return self._weight.fprop_state(self._selection.of)

    def take(self) -> None:
        self.now = self._selection.of(self._canonical(self._weight.parameter)).to(torch.float32, copy=True)

    def whole_quantized(self, step: Tensor) -> Tensor:
        """The same lines of the whole weight, quantized as the graph does it and brought back to the weight's basis."""
        if self.element is None:
            return self.now
        quantized = self._weight.quantize(self._weight.parameter, step)
        return self._selection.of(self._canonical(quantized)).to(torch.float32, copy=True)

    def quantized(self, q: Tensor) -> None:
        if self._last is not None:
            former, former_q = self._last
            self._moved, self._moved_q = self._moved + (self.now - former).abs(), self._moved_q + (q - former_q).abs()
            if self.element is not None:
                self._flips = self._flips + m.flipped(q, former_q, self.element)
            rates = m.relative_change(self.now, former), m.relative_change(q, former_q)
            self._rates.append(torch.stack(rates))
        self._last = self.now, q
        self._path.append(torch.stack([self.now.flatten()[:FOLLOWED], q.flatten()[:FOLLOWED]]))

    def record(self, steps: int, metrics: frozenset[str]) -> dict[str, Any]:
        site, name = self._weight.fqn or "(root)", self._weight.parameter_name
        record: dict[str, Any] = {"site": site, "tensor": name, "window": steps}
        if "oscillation" in metrics:
            record |= self._oscillation()
        if "flips" in metrics:
            record |= {
                "flips": (self._flips / steps).mean().item(),
                "flipping": (self._flips > 0).float().mean().item(),
            }
        if "rate_of_change" in metrics:
            rates = torch.stack(self._rates)
            of_w, of_q = rates.nanmean(0).tolist()
            skipped = int(rates.isnan().any(1).sum())
            record |= {"rate_of_change": of_w, "quantized_rate_of_change": of_q, "skipped_steps": skipped}
        return record

    def _oscillation(self) -> dict[str, Any]:
        ratio = m.oscillation_ratio(self._moved_q, self._moved)
        edges = torch.tensor(m.RATIO_EDGES, device=ratio.device)
        counts = torch.bincount(torch.bucketize(ratio.flatten(), edges), minlength=len(edges) + 1)
        return {
            "oscillating": (ratio > m.OSCILLATING).float().mean().item(),
            "ratio_counts": counts.tolist(),
            "trajectories": self._trajectories(ratio),
        }

    def _trajectories(self, ratio: Tensor) -> list[dict[str, Any]]:
        """Of the elements followed, those with the largest finite ratio."""
        of_followed = ratio.flatten()[:FOLLOWED]
        of_followed = torch.where(of_followed.isfinite(), of_followed, -1.0)
        path = torch.stack(self._path)  # [steps + 1, 2, followed]
        chosen = of_followed.topk(min(SHOWN, len(of_followed))).indices.tolist()
        return [
            {"ratio": of_followed[i].item(), "weight": path[:, 0, i].tolist(), "quantized": path[:, 1, i].tolist()}
            for i in chosen
            if of_followed[i] > 0
        ]

    def _canonical(self, w: Tensor) -> Tensor:
        w = whole(w.detach())
        return w.mT if self._weight.stored_transposed else w
