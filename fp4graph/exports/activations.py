"""Measures the tensor scales of activations, which formats hold as constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.kernels import operators
from fp4graph.model.evaluation import evaluating
from fp4graph.model.runtime import require_runtime
from fp4graph.model.weight import Weight
from fp4graph.numerics.blocking import block_length
from fp4graph.ops.observe import ObservedOperand, OperandObserver
from fp4graph.technique.operands import Operand


class _Largest:
    """Records the largest magnitude, and the quantizer, of each weight's activations."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        self.magnitudes: dict[str, Tensor] = {}
        self.operands_of: dict[str, ObservedOperand] = {}
        self._by_place: dict[tuple[str, int], Weight] = {}
        self._by_module: dict[str, list[Weight]] = {}
        for weight in weights:
            self._by_place[weight.fqn or "(root)", weight.stored.data_ptr()] = weight
            self._by_module.setdefault(weight.fqn or "(root)", []).append(weight)

    def operands(self, site: str) -> OperandObserver:
        module = site.partition("#")[0]

        def observe(left: ObservedOperand, right: ObservedOperand) -> None:
            if left.operand is not Operand.FPROP_INPUT:
                return
            candidates = self._by_module.get(module, [])
            weight = candidates[0] if len(candidates) == 1 else self._by_place.get((module, right.given.data_ptr()))
            if weight is not None and left.given.numel():
                amax = left.given.detach().abs().amax().to(torch.float32)
                self.magnitudes[weight.name] = torch.maximum(amax, self.magnitudes.get(weight.name, amax))
                self.operands_of[weight.name] = left

        return observe

    def output(self, site: str, y: Tensor) -> None:
        """Ignore outputs."""


def input_scales(model: nn.Module, weights: Iterable[Weight], batches: Iterable[Any]) -> dict[str, Tensor]:
    """Return γ of each weight's activations by the weight's name, for weights whose activations have a tensor scale.

    The activations' quantizer computes γ from their largest magnitude over ``batches``. Under ``tensor_scaling`` γ is
    this magnitude divided by κ, which is 6·448 unless the policy has another element, scale format, target or headroom.

    Args:
        batches: the arguments of each call of the model: a mapping of keywords, a tuple or list of arguments, or a
            single argument; or a function that calls the model. The model runs in eval mode and without gradients.

    Raises:
        Error: ``batches`` is empty, or activations are not finite.
    """
    largest = _Largest(weights)
    runtime = require_runtime(model, "export")
    # A training may record statistics, which it goes on to do afterwards.
    recording, training, count = runtime.inspection.recording, runtime.inspection.training, 0
    try:
        runtime.observe(largest, training=False)
        with evaluating(model), torch.no_grad():
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
        require_runtime(model, "export").observe(recording, training=training)
    if not count:
        raise Error("calibration= is empty, and the tensor scales of activations are measured on it; give batches")
    if infinite := [name for name, amax in largest.magnitudes.items() if not torch.isfinite(amax)]:
        raise Error(f"the activations of {infinite[0]} are not finite on a calibration batch; check data and weights")
    scales = {name: _gamma(amax, largest.operands_of[name]) for name, amax in largest.magnitudes.items()}
    return {name: gamma for name, gamma in scales.items() if gamma is not None}


@torch.no_grad()
def _gamma(amax: Tensor, operand: ObservedOperand) -> Tensor | None:
    """Return γ, 0-d, of an operand whose largest magnitude is ``amax``; None if the operand's quantizer has no γ."""
    spec = operand.program.spec
    if spec is None or not operand.program.at("group_scale"):
        return None
    x = amax.new_zeros(1, 1 if isinstance(spec.block, str) else block_length(spec.block))
    x[0, 0] = amax
    with operators.tensor_code():  # avoids compiling a kernel
        gamma = operand.program.quantize(x, operand.draw, operand.state).group_scale
    return None if gamma is None else gamma.flatten()[0]
