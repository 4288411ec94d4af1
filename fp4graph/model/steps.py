"""The count of an applied model's training forwards, and the state and step tensor that each forward begins with."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4graph import torch_internals
from fp4graph.model import distributed, state
from fp4graph.model.current import CurrentForward
from fp4graph.model.prepare import PhasePlan, device_of
from fp4graph.numerics import noise


class Steps:
    """Counts the training forwards of a model, and makes state and the step tensor for each forward.

    Attributes:
        root_state: holds the count; None where no phase quantizes anything, and until the model is prepared.
        trained: number of training forwards in this phase. A call of the model counts when it ends; calls of single
            modules count, as one forward, when the first of them begins.
        from_rank_zero: what the model has taken from rank 0 of a DDP. The next phase goes on with this object.
    """

    def __init__(self, plan: PhasePlan, seed: int, current: CurrentForward) -> None:
        self._plan, self._seed, self._current = plan, seed, current
        self.root_state: state.RootState | None = None
        self.trained = 0
        self.from_rank_zero = distributed.FromRankZero()

    @property
    def count(self) -> int | None:
        """The number of forwards with gradients that have begun; None where no phase quantizes anything."""
        return None if self.root_state is None else self.root_state.count + bool(self._current.ran)

    def count_from(self, count: int) -> None:
        """Set the count of forwards, as for a resumed training."""
        self._current.ran.clear()
        if self.root_state is not None:
            self.root_state.count_from(count)

    def advance(self) -> None:
        """Count one more forward with gradients."""
        self._current.ran.clear()
        if self.root_state is not None:
            self.root_state.advance()

    def meet(self, *, training: bool) -> None:
        """Take over the count of rank 0 at the first training forward of a DDP, before the phase is chosen."""
        wrapper = torch_internals.active_ddp()
        if training and wrapper is not None and self.root_state is not None:
            if not self.trained:
                distributed.leave_to_ranks(wrapper)
            self.from_rank_zero.take_count(wrapper, self.root_state)

    def begin(self, *, training: bool) -> None:
        """Make state and the step tensor ready for a forward.

        While the count is 0, state is computed anew from the weights: they may have been initialized after apply(),
        sharded, or received from another rank. After :meth:`meet` has taken a count, entries of techniques follow it.
        """
        if self.root_state is None:
            return
        if not self.trained:
            with torch.inference_mode(False):  # training cannot use tensors made in inference mode
                for module_state in state.states(self._plan.root):
                    if self.root_state.count == 0:
                        module_state.restart()
                    if training:
                        module_state.waiting = {}
                    module_state.settle(device_of(module_state.module, device_of(self._plan.root)))
        if training:
            self.from_rank_zero.take_entries(self._plan.weights)
        rank, device = distributed.rank(), self.root_state.forwards.device
        self._current.step = noise.make_step(self._seed, rank, self.root_state.count, device=device)

    def over_ranks(self, x: Tensor, parameter: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks that train ``parameter``."""
        return distributed.over_ranks(x, parameter, self.from_rank_zero.wrapper)
