"""Finds the repeated stacks of blocks of a model, to which ``block: true`` and ``first_blocks`` refer.

A *stack* is a run of modules of one class that stand under numbered names of one pattern (``blocks.*``,
``model.layers.*``, Swin's ``layers.*.blocks.*`` flattened in order), at least two of them side by side, each with
submodules of its own and at least two matrices inside. A name is numbered if it is a number, or, in a container, if it
ends in one after an underscore (torchvision's ``encoder.layers.encoder_layer_0``). Where stacks nest, the inner one
wins if its modules are themselves built of submodules that hold matrices below them (a Swin block inside a stage), and
the outer one otherwise (a decoder layer around a mixture of experts). A model without any stack (a bare ``nn.Linear``,
a single encoder layer) is one block: the root.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from fp4graph.policy.adapters import is_adapter
from fp4graph.technique.site import BlockPosition


@dataclass(frozen=True)
class ModuleInfo:
    """One module: its class, and the number of its own parameters that are matrices, or stacks of experts' matrices."""

    cls: type
    matrices: int


def describe_modules(root: nn.Module) -> dict[str, ModuleInfo]:
    """Map the name of every module below ``root`` to its :class:`ModuleInfo`, in registration order."""
    return {
        name: ModuleInfo(type(module), _matrices(module)) for name, module in root.named_modules(remove_duplicate=False)
    }


def _matrices(module: nn.Module) -> int:
    axes = (2,) if isinstance(module, nn.Conv1d) else (2, 3)
    return sum(p.ndim in axes for p in module._parameters.values() if p is not None)


def find_blocks(modules: Mapping[str, ModuleInfo]) -> dict[str, BlockPosition]:
    """Map the name of every block to its position; in a model without a stack the root is the one block."""
    modules = _without_adapters(modules)
    tree = _Tree(modules)
    stacks: dict[tuple[type, str], list[str]] = {}
    for name, info in modules.items():
        parent, _, leaf = name.rpartition(".")
        if _numbered(leaf, modules.get(parent)) and tree.children.get(name) and tree.matrices[name] >= 2:
            pattern = ".".join(filter(None, (pattern_of(parent), re.sub(r"\d+$", "*", leaf))))
            stacks.setdefault((info.cls, pattern), []).append(name)
    siblings = {key: Counter(name.rpartition(".")[0] for name in names) for key, names in stacks.items()}
    stacks = {key: names for key, names in stacks.items() if max(siblings[key].values()) >= 2}
    chosen = {key: names for key, names in stacks.items() if not _yields(key, stacks, tree)}
    if not chosen:
        return {"": BlockPosition(stack="", index=0, total=1)}
    return {
        name: BlockPosition(stack=pattern, index=index, total=len(names))
        for (_, pattern), names in chosen.items()
        for index, name in enumerate(names)
    }


def _without_adapters(modules: Mapping[str, ModuleInfo]) -> dict[str, ModuleInfo]:
    """Return ``modules`` as they were before PEFT wrapped layers, so that an adapter makes no block of its layer."""
    others = {name: info for name, info in modules.items() if not is_adapter(name, modules)}
    return {re.sub(r"\.base_layer(?=\.|$)", "", name): info for name, info in others.items()}


def block_of(name: str | None, blocks: Mapping[str, BlockPosition]) -> BlockPosition | None:
    """Return the position of the block that module ``name`` is in, or None."""
    return None if name is None else next((blocks[outer] for outer in upwards(name) if outer in blocks), None)


def upwards(name: str) -> Iterator[str]:
    """Yield ``name`` and the names of the modules around it, the root's last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


class _Tree:
    """The tree of names: the direct children of each name, and the matrices at or below it."""

    def __init__(self, modules: Mapping[str, ModuleInfo]) -> None:
        self.children: dict[str, list[str]] = {}
        self.matrices: dict[str, int] = dict.fromkeys(modules, 0)
        for name, info in modules.items():
            if name:
                self.children.setdefault(name.rpartition(".")[0], []).append(name)
            for outer in upwards(name):
                self.matrices[outer] = self.matrices.get(outer, 0) + info.matrices

    def is_composite(self, name: str) -> bool:
        """Return whether a child of ``name`` has children of its own and matrices below: attention, an MLP."""
        return any(self.children.get(child) and self.matrices[child] for child in self.children.get(name, ()))


def pattern_of(name: str) -> str:
    """Return ``name`` with stars for its numbers: ``layers.*.blocks.*``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _numbered(leaf: str, parent: ModuleInfo | None) -> bool:
    """Return whether ``leaf``, a name in ``parent``, is numbered."""
    if leaf.isdigit():
        return True
    # Outside containers the author numbered the name: `attention_1` and `attention_2` of a block do not form a stack.
    contained = parent is not None and issubclass(parent.cls, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return contained and re.fullmatch(r".+_\d+", leaf) is not None


def _yields(key: tuple[type, str], stacks: Mapping[tuple[type, str], list[str]], tree: _Tree) -> bool:
    """Return whether the stack ``key`` gives way to a stack nested in it or around it."""
    members = stacks[key]
    composite = any(map(tree.is_composite, members))
    return any(
        (_inside(names, members) and any(map(tree.is_composite, names))) or (not composite and _inside(members, names))
        for other, names in stacks.items()
        if other != key
    )


def _inside(inner: list[str], outer: list[str]) -> bool:
    return any(name.startswith(f"{parent}.") for parent in outer for name in inner)
