"""The modules of an applied model as they were when the policy was applied, to notice adapters that come and go."""

from __future__ import annotations

from torch import nn

from fp4graph.model import state
from fp4graph.policy.adapters import is_of_adapters

#: The children of every module that has some.
_Children = list[tuple[nn.Module, tuple[nn.Module | None, ...]]]


class Tree:
    """The modules of a model at one moment."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._children, self._names = _children(root), _named(root)

    def adapted(self) -> bool:
        """Return whether modules have joined or left since, all of them adapters or their wrappers.

        Every forward asks. Other modules that join are an error of the first graph that shows them.
        """
        if all(tuple(module._modules.values()) == children for module, children in self._children):
            return False
        names = _named(self._root)
        former, present = set(map(id, self._names.values())), set(map(id, names.values()))
        joined = [name for name, module in names.items() if id(module) not in former]
        left = [name for name, module in self._names.items() if id(module) not in present]
        ours = all(is_of_adapters(name, names) for name in joined)
        if (joined or left) and ours and all(is_of_adapters(name, self._names) for name in left):
            return True
        self._children = _children(self._root)  # not asked again until the next change
        return False


def _children(root: nn.Module) -> _Children:
    return [(module, tuple(module._modules.values())) for module in root.modules() if module._modules]


def _named(root: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in root.named_modules(remove_duplicate=False) if not state.is_ours(name)}
