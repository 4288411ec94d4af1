"""Finds the adapters of a model, and remembers the modules that it had when a policy was applied, to notice adapters
that come and go."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fp4graph.errors import CaptureError
from fp4graph.model import state
from fp4graph.model.prepare import computes_weight
from fp4graph.model.weight import Weight
from fp4graph.policy.adapters import is_of_adapters

#: Every module that has children, with its children.
_Children = list[tuple[nn.Module, tuple[nn.Module | None, ...]]]


class Tree:
    """The modules of a model at one moment; if nothing is quantized, any module may come and go."""

    def __init__(self, root: nn.Module, weights: Sequence[Weight], *, quantizes: bool) -> None:
        self._root, self._weights, self._quantizes = root, weights, quantizes
        self._computing = [module for module in root.modules() if computes_weight(module)]
        self._children, self._names = _children(root), _named(root)

    def adapted(self) -> bool:
        """Return whether the policy must be applied again.

        The policy must be applied again if modules joined or left and all of them are adapters or their wrappers, if a
        weight became computed (weight_norm, pruning) or ceased to be computed, or if another applied model that shared
        modules was removed. Every forward calls this. The first graph that shows any other new module raises an error.

        Raises:
            CaptureError: other modules have joined or left together with adapters.
        """
        prepared = all(weight.is_held and state.KEY in weight.module._buffers for weight in self._weights)
        if not prepared or not all(map(computes_weight, self._computing)):
            return True
        if all(tuple(module._modules.values()) == children for module, children in self._children):
            return False
        names = _named(self._root)
        earlier, present = set(map(id, self._names.values())), set(map(id, names.values()))
        joined = [name for name, module in names.items() if id(module) not in earlier]
        left = [name for name, module in self._names.items() if id(module) not in present]
        foreign = [name for name in joined if not is_of_adapters(name, names)]
        foreign += [name for name in left if not is_of_adapters(name, self._names)]
        if (joined or left) and not foreign:
            return True
        if len(foreign) < len(joined) + len(left) and self._quantizes:
            more = ", ..." if foreign[3:] else ""
            raise CaptureError(
                f"adapters and {', '.join(foreign[:3])}{more} were added to the model after fp4graph.apply(), or taken "
                "from it, but only adapters may come and go; call fp4graph.apply(model, policy) again, which keeps "
                "state where it fits, and prepare_optimizer again",
                site=foreign[0],
            )
        self._children = _children(self._root)  # compare again only after the next change
        return False


def adapter_modules(root: nn.Module) -> list[str]:
    """Return the names of a model's modules that belong to adapters, or that PEFT trains beside adapters."""
    names = _named(root)
    return [name for name in names if is_of_adapters(name, names)]


def _children(root: nn.Module) -> _Children:
    return [(module, tuple(module._modules.values())) for module in root.modules() if module._modules]


def _named(root: nn.Module) -> dict[str, nn.Module]:
    return dict(root.named_modules(remove_duplicate=False))
