"""The tensors that techniques keep for parameters between steps, beside the optimizer's own state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fp4graph.errors import Error

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "fp4graph."


class Memory:
    """Tensors that techniques keep for parameters, mirrored into the optimizer's state.

    The optimizer's state alone cannot hold them: Adam assumes that a parameter with any state has moments, so nothing
    can be put there before the parameter's first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._entries: dict[Tensor, dict[str, dict[str, Tensor]]] = {}
        for parameter, state in optimizer.state.items():
            self._adopt(parameter, state)
            for name, value in self._flat(parameter):
                if value.dtype in (torch.bfloat16, torch.float16):
                    raise Error(
                        f"the optimizer's state was loaded before prepare_optimizer(), and torch rounded {name!r} to "
                        f"{value.dtype}; prepare the optimizer first, then load its state"
                    )

    def of(self, parameter: Tensor, technique: str) -> dict[str, Tensor]:
        """Return the entries of a technique for ``parameter``, by name, as a dict that the technique may change."""
        return self._entries.setdefault(parameter, {}).setdefault(technique, {})

    def mirror(self, *, stepping: bool = False) -> None:
        """Write the entries into the optimizer's state.

        Inside a step (``stepping``), parameters without state of the optimizer are left out: the optimizer would assume
        that their moments exist.
        """
        for parameter in self._entries:
            flat = dict(self._flat(parameter))
            state = self._optimizer.state[parameter] if flat else self._optimizer.state.get(parameter, {})
            if stepping and all(is_ours(name) for name in state):
                flat = {}
            for name in [name for name in state if is_ours(name) and name not in flat]:
                del state[name]
            state.update(flat)

    def forget(self, which: Callable[[Tensor, str], bool]) -> None:
        """Drop the entries for which ``which(parameter, name of the technique)`` is true."""
        for parameter, entries in self._entries.items():
            for name in [name for name in entries if which(parameter, name)]:
                del entries[name]
        self.mirror()

    def reload(self, saved: dict[str, Any]) -> None:
        """Take the entries from ``saved`` after ``load_state_dict(saved)``, which may have changed their dtype."""
        self._entries.clear()
        keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        for key, parameter in zip(keys, parameters, strict=True):
            state = saved["state"].get(key, {})
            ours = {n: _brought(v, parameter) for n, v in state.items() if is_ours(n)}
            self._adopt(parameter, ours)
        self.mirror()

    def _adopt(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            if is_ours(name):
                technique, entry = name.removeprefix(_PREFIX).split(".", 1)
                self.of(parameter, technique)[entry] = value

    def _flat(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        for technique, entries in self._entries.get(parameter, {}).items():
            for name, value in entries.items():
                yield f"{_PREFIX}{technique}.{name}", value


def is_ours(name: object) -> bool:
    """Return whether an entry of an optimizer's state belongs to a technique."""
    return str(name).startswith(_PREFIX)


def _brought(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy on the parameter's device; a counter is copied to the CPU, where reading it waits for no device."""
    counter = value.dim() == 0 and not value.is_floating_point()
    return value.to("cpu" if counter else parameter.device, copy=True)
