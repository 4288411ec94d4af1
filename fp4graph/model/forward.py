"""One forward of an applied model as data, and the table of the duties around each kind of forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from fp4graph.graph.nested import nested

#: The name under which the model's own call is compiled, beside those of its methods.
CALL = "__call__"


class Kind(Enum):
    """The kinds of forward of an applied model.

    ``CALL``: the caller calls the model. ``METHOD``: the caller calls one of ``apply(methods=...)``. ``REPEATED``:
    activation checkpointing runs such a call or method again, in the backward. ``PART``: the caller calls a module of
    the model by itself. ``RECOMPUTED``: activation checkpointing calls such a module again. ``UNCAPTURED``: the
    compiled call calls a module outside of its graphs.
    """

    CALL = "call"
    METHOD = "method"
    REPEATED = "repeated"
    PART = "part"
    RECOMPUTED = "recomputed"
    UNCAPTURED = "uncaptured"


class Duties(NamedTuple):
    """The duties around the forwards of one kind.

    Attributes:
        compiled: whether the forward runs in graphs, unless Dynamo gives up, or operation by operation. A search for
            NaN watches only graphs; a recording sees both.
        begins: whether the forward enters the phase in force, checks optimizers, packed weights and the loaded count,
            and makes the step tensor; if not, it belongs to a forward that has begun.
        counts: which training forwards advance the count: ``each``, those ``with gradients`` in their result (an
            iterator may have some), those that call a module ``again`` that ran since the last change, or ``never``.
        covers: what the first forward must cover: ``all`` rules, the ``captured`` modules only, or nothing. If other
            calls may match the remaining rules, the second forward warns about them.
        listed: number of training forwards after which sites are no longer listed, even if the model's call was never
            checked.
        warns: whether the forward warns, once for similar modules, that it runs uncompiled.
    """

    compiled: bool
    begins: bool
    counts: Literal["each", "with gradients", "again", "never"]
    covers: Literal["all", "captured", "none"]
    listed: float
    warns: bool


_ALWAYS = float("inf")
DUTIES: Mapping[Kind, Duties] = {
    #                        compiled begins counts            covers      listed   warns
    Kind.CALL: Duties(           True, True, "each",           "all",      _ALWAYS, False),
    Kind.METHOD: Duties(         True, True, "with gradients", "captured", 1,       False),
    Kind.REPEATED: Duties(      True, False, "never",          "none",     _ALWAYS, False),
    Kind.PART: Duties(          False, True, "again",          "none",     2,       True),
    Kind.RECOMPUTED: Duties(   False, False, "never",          "none",     2,       False),
    Kind.UNCAPTURED: Duties(   False, False, "never",          "none",     _ALWAYS, True),
}  # fmt: skip


@dataclass(frozen=True)
class Forward:
    """One forward.

    Attributes:
        module: the module that runs: the model or a part.
        call: runs the module without a compiler, on ``args`` and ``kwargs``.
        name: the name of the method that is called; :data:`CALL` for any other forward.
        training: whether gradients are recorded, or will be when a reentrant checkpoint repeats the call.
        step: the step tensor of the forward that is repeated, else None.
    """

    kind: Kind
    module: nn.Module
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = CALL
    training: bool = field(default_factory=torch.is_grad_enabled)
    step: Tensor | None = None

    @staticmethod
    def of(
        root: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], step: Tensor | None = None
    ) -> Forward:
        """Return the forward of ``root``'s call or method ``name``; a repeated one if its ``step`` is given."""
        call: Any = root._call_impl if name == CALL else getattr(type(root), name).__get__(root)
        kind = Kind.REPEATED if step is not None else Kind.CALL if name == CALL else Kind.METHOD
        # A checkpoint that is itself called without gradients has no functions before it, and is never repeated.
        training = torch.is_grad_enabled() or any(region.next_functions for region in reentrant_regions())
        return Forward(kind, root, call, args, kwargs, name, training, step)

    @property
    def duties(self) -> Duties:
        """The duties of the forward's kind."""
        return DUTIES[self.kind]

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments that are tensors."""
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]

    @property
    def all_tensors(self) -> list[Tensor]:
        """The tensors among the arguments, also in tuples, lists and mappings."""
        return [*nested((self.args, self.kwargs), Tensor)]

    def run(self) -> Any:
        """Run the forward without a compiler."""
        return self.call(*self.args, **self.kwargs)


def reentrant_regions() -> list[Any]:
    """Return torch's objects for the regions of reentrant checkpointing that run now, for the first time or again, the
    innermost first. Only the frames of torch's functions hold them."""
    codes = CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__
    regions, frame = [], inspect.currentframe()
    while frame is not None:
        if any(frame.f_code is code for code in codes):
            regions.append(frame.f_locals["ctx"])
        frame = frame.f_back
    return regions
