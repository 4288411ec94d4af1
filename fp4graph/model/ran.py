"""What one forward has run so far: sites in graphs and outside of them, and the noise that they have drawn."""

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

#: The name of a call, and the number that Dynamo has for a frame of it.
Frame = tuple[str, Any]
#: A site's module as another module sees it, its operation and its occurrence.
_Place = tuple[str, str, int]


class Drawing(NamedTuple):
    """The inputs of a graph that its sites draw noise with.

    Attributes:
        steps: the inputs that are the step.
        sites: the sites whose module each key belongs to, or a module in it, by the key's input. They are named as seen
            from that module, because alike modules may share the graph, each with its own key.
    """

    steps: Collection[int]
    sites: Mapping[int, frozenset[_Place]]

    @staticmethod
    def of(rewritten: Rewritten) -> Drawing:
        """Return those of a graph; one that draws nothing has no sites."""
        quantized = [(site.module or "", site.op, site.occurrence) for site in rewritten.sites if site.quantized]
        sites = {
            place: frozenset(
                (module.removeprefix(of), op, occurrence)
                for module, op, occurrence in quantized
                if f"{module}.".startswith(f"{of}.") or not of
            )
            for place, of in rewritten.keys.items()
        }
        return Drawing(rewritten.steps, sites if rewritten.draws else {})


@dataclass
class Ran:
    """What a forward has run so far.

    Attributes:
        apart: whether no two runs may draw the same noise.
        sites: of the graphs that have run, by frame.
    """

    apart: bool = False
    sites: dict[Frame, list[Site]] = field(default_factory=dict)
    _uncaptured: dict[str, int] = field(default_factory=dict)  # sites of each module outside of graphs
    _drawn: set[tuple[int, _Place]] = field(default_factory=set)  # sites that have drawn, each under the id of its key
    _repeats: int = 0  # runs of graphs that would have drawn the same again

    def occurrences(self) -> dict[str, int]:
        """Count the sites of each module over what has run.

        Graphs of other calls do not count: a forward that Dynamo breaks has the noise of one that it does not break,
        such as a training step after a generation.
        """
        counts = dict(self._uncaptured)
        for site in chain.from_iterable(self.sites.values()):
            counts[str(site.module)] = max(counts.get(str(site.module), 0), site.occurrence + 1)
        return counts

    def drawing(self, drawing: Drawing, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the ``inputs`` of a graph, with another step if its sites have drawn noise in this forward before.

        The occurrence of a site is in its graph, counted when the graph was captured. It was counted too low where
        that forward left out an earlier graph of this one, and where one graph runs several times in a forward. What
        a checkpoint recomputes keeps the step: its backward cannot tell which of the runs it repeats.
        """
        if not drawing.sites or not self.apart or _recomputable():
            return inputs
        drawn = {(id(inputs[place]), site) for place, sites in drawing.sites.items() for site in sites}
        if self._drawn.isdisjoint(drawn):
            self._drawn |= drawn
            return inputs
        self._repeats += 1
        step = inputs[min(drawing.steps)].clone()
        step[:2] = noise.derive(step[:2], self._repeats)  # the rest is what is drawn once and kept, and the count
        return tuple(step if place in drawing.steps else each for place, each in enumerate(inputs))

    def note(self, planner: Planner, root: nn.Module) -> None:
        """Count the sites that a module of ``root`` has run outside of graphs, and what they have drawn."""
        for name, count in planner.occurrences.items():
            self._uncaptured[name] = max(count, self._uncaptured.get(name, 0))
        if not self.apart or _recomputable():
            return
        for site in planner.sites:
            if site.quantized and site.module is not None:
                own = state.State.of(root.get_submodule(site.module))
                if own is not None and own.has_sites:
                    self._drawn.add((id(own.key), ("", site.op, site.occurrence)))


def _recomputable() -> bool:
    """Return whether a checkpoint recomputes what runs now, or will: in a backward, without gradients (a reentrant one
    runs its forward so), or under hooks for saved tensors (one that is not)."""
    again = torch_internals.backward_id() != -1
    return again or not torch.is_grad_enabled() or torch_internals.has_saved_tensor_hooks()
