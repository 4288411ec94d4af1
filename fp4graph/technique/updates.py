"""The data about an optimizer step that the stages around it get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

from fp4graph.technique.context import Quantization


@dataclass(frozen=True)
class WeightUpdate:
    """One quantized weight at an optimizer step. A parameter that several sites use is one weight.

    Attributes:
        name: fully qualified name of the parameter; the first, where the parameter has several.
        parameter: the parameter as stored. It has a gradient.
        state: the technique's entries for the weight in the model, as stored; written in place. The key is the name,
            after the operand's unless that is ``fprop.weight``: ``fprop_input_norms``. If several modules hold the
            parameter, these are the first module's entries; the other modules' get the same values.
        memory: the tensors that the technique keeps for the weight in the optimizer's state, by name.
        optimizer, group: the user's optimizer, and the parameter group that holds the weight.
        quantize: the operand program of ``fprop.weight`` outside the graph: returns the dequantized values of a tensor
            of the weight's shape, which is cast first if autocast casts the weight in the forward.
        quantization: returns fprop's quantization of the weight, gathered if the weight is sharded; its ``values`` are
            the blocked layout of ``canonical(parameter)``, cast by autocast as in the forward, divided by γ.
        canonical: returns a tensor of the weight's layout and sharding as ``[..., N, K]``, gathered.
        stored: the inverse of ``canonical``.
        scratch: the technique's own dict, kept from before the step until after it.
        over_ranks: returns the sum of a tensor over the ranks of the weight's ``fully_shard``, or of the
            DistributedDataParallel that last ran the model; without either, the tensor. All ranks must call it.
        apart: returns which elements of the weight, as stored, are in input channels that a technique has multiplied
            apart, bool and sharded as the weight is; None if no channels are multiplied apart.
    """

    name: str
    parameter: Tensor
    state: Mapping[str, Tensor]
    memory: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    quantize: Callable[[Tensor], Tensor]
    quantization: Callable[[], Quantization]
    canonical: Callable[[Tensor], Tensor]
    stored: Callable[[Tensor], Tensor]
    scratch: dict[Any, Any]
    over_ranks: Callable[[Tensor], Tensor]
    apart: Callable[[], Tensor | None]

    def count_progress(self, total_steps: int, start: float) -> Tensor:
        """Count one more step, in ``memory["steps"]``, and return the progress (t - s·T)/(T - s·T) of a schedule.

        t is the count, T ``total_steps`` and s ``start``. The result is 0-d, so that nothing waits for an accelerator.
        """
        steps = self.memory.setdefault("steps", torch.zeros((), dtype=torch.int64, device=self.parameter.device))
        steps += 1
        return (steps - start * total_steps) / (total_steps - start * total_steps)


@dataclass(frozen=True)
class OptimizerStep:
    """One step of the user's optimizer, for a technique that acts on all parameters together.

    ``optimizer`` and ``scratch`` are as in a :class:`WeightUpdate`. ``memory`` returns the dict of tensors that the
    technique keeps for a parameter in the optimizer's state, by name; the technique may add and delete entries.
    """

    optimizer: torch.optim.Optimizer
    scratch: dict[Any, Any]
    memory: Callable[[Tensor], dict[str, Tensor]]

    def parameters(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield every parameter with a gradient, once, and its group."""
        seen: set[int] = set()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter, group
