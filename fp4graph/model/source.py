"""Weights that are not parameters: a hook computes the weight for each call, from data that its module keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.ops.gemm import MatmulProgram


class Source(ABC):
    """Forward pre-hook that gives its module a weight.

    Attributes:
        name: the name that the weight had as a parameter. path: the fully qualified name.
        stand_in: the former parameter without data, on the meta device.
        programs: the programs under which the weight gives the same operands as the former parameter.
        before_training: warns about weights that training would leave frozen; the same function for all weights that
            were packed together.
    """

    name: str
    path: str
    stand_in: nn.Parameter
    programs: set[MatmulProgram]
    before_training: Callable[[], None]

    @abstractmethod
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Set the weight as an attribute of ``module``."""

    @abstractmethod
    def values(self, module: nn.Module) -> Tensor:
        """Return the weight of ``module``."""

    @abstractmethod
    def require_dtype(self, dtype: torch.dtype) -> None:
        """Raise Error if the weight cannot follow its module's conversion to ``dtype``."""

    @abstractmethod
    def require_absent(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise Error if ``state_dict``, in which the module's keys begin with ``prefix``, has the weight."""

    @abstractmethod
    def release(self, module: nn.Module) -> Callable[[], None]:
        """Give ``module`` the parameter back, with the weight's values; return a function that undoes this."""


def sources_of(module: nn.Module) -> list[Source]:
    """Return the sources of the weights of ``module`` itself."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Source)]


def sources_below(root: nn.Module) -> list[tuple[nn.Module, Source]]:
    """Return every source of a model with its module."""
    return [(module, source) for module in root.modules() for source in sources_of(module)]


def require_loadable(root: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Raise Error if a source of a model cannot load its weight, which ``state_dict`` has."""
    for fqn, module in root.named_modules():
        for source in sources_of(module):
            source.require_absent(state_dict, f"{fqn}." if fqn else "")


def release_all(root: nn.Module) -> list[Callable[[], None]]:
    """Turn the weights of all sources back into parameters; return functions that undo this."""
    return [source.release(module) for module, source in sources_below(root)]


@contextmanager
def released(root: nn.Module) -> Iterator[None]:
    """Turn the weights of all sources back into parameters; undo this if the context ends in an error."""
    undos = release_all(root)
    try:
        yield
    except BaseException:
        for undo in undos:
            undo()
        raise


@contextmanager
def as_parameters(root: nn.Module) -> Iterator[None]:
    """Show the weight of each source as a parameter without data, because policies are planned from parameters."""
    sources = sources_below(root)
    for module, source in sources:
        module._parameters[source.name] = source.stand_in
    try:
        yield
    finally:
        for module, source in sources:
            del module._parameters[source.name]
