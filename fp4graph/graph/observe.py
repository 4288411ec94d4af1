"""Passes quantized sites to a recording as they run, or calls a substitute in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor
from torch.fx import GraphModule, Node

from fp4graph import torch_internals
from fp4graph.ops.observe import OperandObserver, observed


class Recording(Protocol):
    """Receives the quantized sites of forwards as they run.

    A site has the name of its module, "(root)" for the root; "#1", "#2", ... follow the name at the module's second,
    third, ... site. A site that runs several times in a step is passed each time.
    """

    def operands(self, site: str) -> OperandObserver | None:
        """Return the observer of the GEMMs of ``site`` in this forward and its backward; None for no observer.

        Called before every forward of the site. The observer reads the training's tensors and must not change them.
        """

    def output(self, site: str, y: Tensor) -> None:
        """Take the output ``y`` of ``site``; called after every forward of the site."""


#: A product as a function of its two factors.
OfFactors = Callable[[Tensor, Tensor], Tensor]


class Substitute(Protocol):
    """A function that is called instead of each quantized site of an uncompiled forward."""

    def __call__(self, site: str, a: Tensor, b: Tensor, quantized: OfFactors, exact: OfFactors) -> Tensor:
        """Return the output of ``site``.

        Args:
            a, b: the factors, as the operation of the model takes them.
            quantized, exact: return the product of two factors under the policy, and by the model's operation itself.
        """


_substitute: ContextVar[Substitute | None] = ContextVar("fp4graph_substitute", default=None)


def current_substitute() -> Substitute | None:
    """Return the substitute of this context, or None."""
    return _substitute.get()


@contextmanager
def substituted(substitute: Substitute) -> Iterator[None]:
    """In this context, call ``substitute`` instead of each quantized site of an uncompiled forward."""
    token = _substitute.set(substitute)
    try:
        yield
    finally:
        _substitute.reset(token)


def numbered(site: str, earlier: int) -> str:
    """Return the name of ``site`` in a recording, after ``earlier`` sites of the same module."""
    return f"{site}#{earlier}" if earlier else site


class Observation:
    """A model's graphs, captured anew to be observed.

    Attributes:
        recording: receives the sites; may be replaced at any time.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._named: dict[Any, tuple[Counter[str], Counter[str]]] = {}  # per frame: counts of sites before it and in it

    def backend(self, gm: GraphModule, example_inputs: list[Any]) -> GraphModule:
        """Put the recording around every site of a captured graph: the torch.compile backend."""
        frame = torch_internals.compiled_frame()
        before = sum((names for _, names in self._named.values()), Counter[str]())
        before = self._named.get(frame, (before,))[0]  # a graph captured again for other shapes has the same names
        here: Counter[str] = Counter()
        self._named[frame] = before, here
        for part in gm.modules():
            if isinstance(part, GraphModule):
                for node in part.graph.nodes:
                    if "site" in node.kwargs:
                        node.target = self._shown(node, before + here)
                        here[str(node.kwargs["site"])] += 1
                part.recompile()
        return gm

    def _shown(self, node: Node, taken: Counter[str]) -> Callable[..., Tensor]:
        name = str(node.kwargs["site"])
        name = numbered(name, taken[name])
        function: Any = node.target

        def fp4graph_observed(*args: Any, **kwargs: Any) -> Tensor:
            with observed(self.recording.operands(name)):
                y: Tensor = function(*args, **kwargs)
            self.recording.output(name, y)
            return y

        # FX generates calls by function name, so no two functions may share a name.
        fp4graph_observed.__name__ = fp4graph_observed.__qualname__ = f"fp4graph_observed_{id(node):x}"
        return fp4graph_observed
