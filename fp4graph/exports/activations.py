"""The tensor scales of activations, measured: formats hold them as constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.model.runtime import require_runtime
from fp4graph.model.weight import Weight
from fp4graph.numerics.formats import E2M1, E4M3
from fp4graph.ops.observe import ObservedOperand, OperandObserver
from fp4graph.technique.operands import Operand


class _Largest:
    """A recording of the largest magnitude of the activations that each weight is multiplied with."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        self.found: dict[str, Tensor] = {}
        self._by_place: dict[tuple[str, int], Weight] = {}
        self._alone: dict[str, list[Weight]] = {}
        for weight in weights:
            self._by_place[weight.fqn or "(root)", weight.stored.data_ptr()] = weight
            self._alone.setdefault(weight.fqn or "(root)", []).append(weight)

    def operands(self, site: str) -> OperandObserver:
        """Return the observer of a site."""
        module = site.partition("#")[0]

        def observe(left: ObservedOperand, right: ObservedOperand) -> None:
            if left.operand is not Operand.FPROP_INPUT:
                return
            alone = self._alone.get(module, [])
            weight = alone[0] if len(alone) == 1 else self._by_place.get((module, right.given.data_ptr()))
            if weight is not None and left.given.numel():
                most = left.given.detach().abs().amax().to(torch.float32)
                self.found[weight.name] = torch.maximum(most, self.found.get(weight.name, most))

        return observe

    def output(self, site: str, y: Tensor) -> None:
        """Take no notice of outputs."""


def input_scales(model: nn.Module, weights: Iterable[Weight], batches: Iterable[Any]) -> dict[str, Tensor]:
    """Return γ of the activations of each weight, by its name: the largest magnitude over ``batches`` / (6·448).

    Args:
        batches: what the model is called with: a mapping of keywords, a tuple or a list of arguments, or the only
            argument; or a function that calls it. It runs in eval mode and without gradients.

    Raises:
        Error: ``batches`` is empty, or what the model makes of it is not finite.
    """
    largest = _Largest(weights)
    training = model.training
    runtime = require_runtime(model, "export")
    count = 0
    try:
        model.eval()
        runtime.observe(largest, training=False)
        with torch.no_grad():
            for batch in batches:
                if callable(batch):
                    batch()
                elif isinstance(batch, Mapping):
                    model(**batch)
                elif isinstance(batch, tuple | list):
                    model(*batch)
                else:
                    model(batch)
                count += 1
    finally:
        require_runtime(model, "export").observe(None)
        model.train(training)
    if not count:
        raise Error("calibration= holds no batch, and the tensor scales of activations are measured on some")
    if wrong := [name for name, most in largest.found.items() if not torch.isfinite(most)]:
        raise Error(f"the activations of {wrong[0]} are not finite on the calibration batches; look at these, or at it")
    full = E2M1.max * E4M3.max
    return {name: torch.where(most == 0, 1.0, most / full) for name, most in largest.found.items()}
