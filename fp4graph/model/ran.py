"""The record of one forward: the sites it has run, in graphs and outside of them, and the noise they have drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from fp4graph import torch_internals
from fp4graph.graph.plan import Planner
from fp4graph.graph.rewrite import Rewritten
from fp4graph.graph.site import Site
from fp4graph.model import state
from fp4graph.numerics import noise

#: The name of a call, and Dynamo's number for a frame of it.
Frame = tuple[str, Any]
#: The name of a site's module relative to another module, the site's operation and its occurrence.
_Place = tuple[str, str, int]


class Drawing(NamedTuple):
    """The inputs of a graph from which its sites draw noise: step tensors and keys.

    Attributes:
        steps: the positions of the inputs that are step tensors.
        sites: maps the position of a key to the sites in the key's module and below. Names of sites are relative to
            that module, because similar modules may share the graph, each with its own key.
    """

    steps: Collection[int]
    sites: Mapping[int, frozenset[_Place]]

    @staticmethod
    def of(rewritten: Rewritten) -> Drawing:
        """Return the inputs from which the sites of a graph draw noise; if none draws, ``sites`` is empty."""
        quantized = [(site.module or "", site.op, site.occurrence) for site in rewritten.sites if site.quantized]
        sites = {
            place: frozenset(
                (module.removeprefix(owner), op, occurrence)
                for module, op, occurrence in quantized
                if f"{module}.".startswith(f"{owner}.") or not owner
            )
            for place, owner in rewritten.keys.items()
        }
        return Drawing(rewritten.steps, sites if rewritten.draws else {})


@dataclass
class Ran:
    """The record of one forward.

    Attributes:
        apart: whether no two runs may draw the same noise.
        sites: maps the frame of each graph that has run to the graph's sites.
    """

    apart: bool = False
    sites: dict[Frame, list[Site]] = field(default_factory=dict)
    _uncaptured: dict[str, int] = field(default_factory=dict)  # number of sites each module ran outside of graphs
    _drawn: set[tuple[int, _Place]] = field(default_factory=set)  # sites that have drawn, each under the id of its key
    _repeats: int = 0  # number of graph runs that would have drawn the same noise again

    def occurrences(self) -> dict[str, int]:
        """Return the number of sites of each module that this forward has run.

        Graphs that ran only in other forwards do not count, so the noise of a training step does not depend on graphs
        that an earlier generation captured.
        """
        counts = dict(self._uncaptured)
        for site in chain.from_iterable(self.sites.values()):
            counts[str(site.module)] = max(counts.get(str(site.module), 0), site.occurrence + 1)
        return counts

    def drawing(self, drawing: Drawing, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the ``inputs`` of a graph, with another step tensor if its sites have already drawn in this forward.

        A graph holds the occurrences of its sites as counted at its capture. That count is too low if the capturing
        forward skipped an earlier graph of this forward, or if one graph runs several times in a forward. A
        checkpointed forward keeps the step tensor, because its recomputation cannot tell which of the runs it repeats.
        """
        if not drawing.sites or not self.apart or _recomputable():
            return inputs
        drawn = {(id(inputs[place]), site) for place, sites in drawing.sites.items() for site in sites}
        if self._drawn.isdisjoint(drawn):
            self._drawn |= drawn
            return inputs
        self._repeats += 1
        step = inputs[min(drawing.steps)].clone()
        step[:2] = noise.derive(step[:2], self._repeats)  # keeps the key of draws made once, and the count
        return tuple(step if place in drawing.steps else value for place, value in enumerate(inputs))

    def note(self, planner: Planner, root: nn.Module) -> None:
        """Record the sites that a module of ``root`` has run outside of graphs, and their draws."""
        for name, count in planner.occurrences.items():
            self._uncaptured[name] = max(count, self._uncaptured.get(name, 0))
        if not self.apart or _recomputable():
            return
        for site in planner.sites:
            if site.quantized and site.module is not None:
                module_state = state.State.of(root.get_submodule(site.module))
                if module_state is not None and module_state.has_sites:
                    self._drawn.add((id(module_state.key), ("", site.op, site.occurrence)))


def _recomputable() -> bool:
    """Return whether a checkpoint recomputes the running operations now or may do so later: in a backward, without
    gradients (a reentrant checkpoint's forward) or under hooks for saved tensors (any other checkpoint's forward)."""
    in_backward = torch_internals.backward_id() != -1
    return in_backward or not torch.is_grad_enabled() or torch_internals.saved_tensor_hooks() is not None
