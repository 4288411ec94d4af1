"""Lets a command read policies without waiting for torch."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

#: torch, and the modules of fp4graph that need torch while they are imported: to declare operators or classes.
#: Other modules import a module of this list as a whole, because ``from module import name`` reads an attribute.
DEFERRED = (
    "torch", "fp4graph.kernels.measures", "fp4graph.kernels.operators", "fp4graph.kernels.rotation",
    "fp4graph.kernels.statistics", "fp4graph.numerics.noise", "fp4graph.numerics.sharding",
    "fp4graph.numerics.symbolic", "fp4graph.training.stable_spam",
)  # fmt: skip


def defer_torch() -> None:
    """Import the modules of :data:`DEFERRED` when an attribute of theirs is first read, if torch is not imported yet.

    ``import torch`` takes two seconds, and plugins import it to act on tensors. A command that only reads policies
    calls this function first. A plugin that reads an attribute of torch at import is slower and behaves the same.
    Only one thread may read the modules until they are executed; commands that compute do not call this function.
    """
    if "torch" in sys.modules:
        return
    sys.meta_path.insert(0, _SubmoduleFinder())
    for name in DEFERRED:
        spec = find_spec(name)
        assert spec is not None
        module = module_from_spec(spec)
        module.__class__ = _Deferred
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


class _Deferred(ModuleType):
    """A module that is executed when an attribute that it does not have yet is first read.

    importlib.util.LazyLoader would execute the module at the second ``import`` statement, which reads ``__spec__``.
    """

    def __getattr__(self, name: str) -> object:
        spec: Any = self.__spec__
        self.__class__ = ModuleType  # type: ignore[assignment]
        try:
            spec.loader.exec_module(self)
        except BaseException:
            self.__class__ = _Deferred  # the next reader gets the same error, not one about a missing attribute
            raise
        return getattr(self, name)


class _SubmoduleFinder(MetaPathFinder):
    """Executes torch when a submodule of a deferred torch is imported first."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, child = name.partition(".")
        if type(sys.modules.get(package)) is not _Deferred:
            return None
        hasattr(sys.modules[package], child)  # executes torch, which imports most of its submodules
        module = sys.modules.get(name)
        if module is None:
            return None
        module.__spec__ = ModuleSpec(name, _Present(module))  # the import machinery takes the spec from the module
        return module.__spec__


class _Present(Loader):
    """Gives an import a module that is loaded already. Under its own spec, the import would execute it again."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
