"""Names of modules and parameters in a captured graph."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn
from torch.fx import Node

from fp4graph.graph.blocks import ModuleInfo, block_of, describe_modules, find_blocks
from fp4graph.graph.marker import module_stack
from fp4graph.technique.site import BlockPosition

_SOURCE_STEP = re.compile(r"\._modules\['([^']+)'\]|\._(parameters|buffers)\['([^']+)'\]")


class Names:
    """Resolves modules and parameters to fully qualified names: by identity, else by Dynamo's source text.

    Args:
        root: the model, or None where only a graph is at hand (the ``torch.compile`` entry point); names then come
            from the graph alone.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self._modules: dict[int, str] = {}
        self._owners: dict[int, list[tuple[str, str]]] = {}
        self._infos: dict[str, ModuleInfo] = {}
        self._by_name: dict[str, nn.Module] = {}
        self._root = root
        if root is not None:
            self._infos = describe_modules(root)
            for name, module in root.named_modules(remove_duplicate=False):
                self._modules.setdefault(id(module), name)
                self._by_name[name] = module
                for parameter_name, parameter in module._parameters.items():
                    if parameter is not None:
                        self._owners.setdefault(id(parameter), []).append((name, parameter_name))
        self.blocks: Mapping[str, BlockPosition] = find_blocks(self._infos) if root is not None else {}

    def learn(self, nodes: list[Node]) -> None:
        """Without a root: take modules, their classes and their weights from what ``nodes`` were called in."""
        if self._by_name:
            return
        weights: dict[str, int] = {}
        for node in nodes:
            if node.op == "placeholder" and (found := _parse(node)) is not None and found[1]:
                value = node.meta.get("example_value")
                weights[found[0]] = weights.get(found[0], 0) + (value is not None and value.dim() == 2)
            for _, source, cls in module_stack(node):
                name = _path(source)
                parents = name.split(".")
                for depth in range(1, len(parents)):
                    self._infos.setdefault(".".join(parents[:depth]), ModuleInfo(nn.Module, 0))
                self._infos[name] = ModuleInfo(cls, 0)
        for name, count in weights.items():
            self._infos[name] = ModuleInfo(self._infos[name].cls if name in self._infos else nn.Module, count)
        self.blocks = find_blocks(self._infos)

    def block(self, name: str | None) -> BlockPosition | None:
        """The position of the block that module ``name`` is in, or None."""
        return block_of(name, self.blocks)

    def module(self, node: Node) -> str | None:
        """The innermost module that ``node`` was called in."""
        for identity, source, _ in reversed(module_stack(node)):
            if identity in self._modules:
                return self._modules[identity]
            if not self._by_name:
                return _path(source)
        return None

    def newcomer(self, node: Node) -> str | None:
        """The innermost module that ``node`` was called in, if that joined the model after these names were taken.

        A module that is in no ``named_modules()`` (one kept in a list, out of the model's sight) is no newcomer.
        """
        stack = module_stack(node)
        if self._root is None or not stack or stack[-1][0] in self._modules:
            return None
        return next((name for name, module in self._root.named_modules() if id(module) == stack[-1][0]), None)

    def owner(self, weight: Node, user: Node) -> tuple[str, str] | None:
        """(module, parameter name) of the parameter at placeholder ``weight``.

        A parameter that several modules share belongs to the one that ``user`` was called in, else to the first.
        """
        example = getattr(weight.meta.get("grapharg"), "example", None)
        # An id may have been that of a parameter which fully_shard replaced: whether it still is one is looked up.
        known = self._owners.get(id(example), [])
        owners = [(module, name) for module, name in known if self._by_name[module]._parameters.get(name) is example]
        if owners:
            calling = self.module(user)
            return next((owner for owner in owners if owner[0] == calling), owners[0])
        found = _parse(weight)
        if found is None or not found[1] or not self._by_name:
            return found if found is not None and found[1] else None
        path, parameter = found
        calling = self.module(user)
        # A source is relative to the frame it was captured in, some module around the one that called. Trust it as it
        # stands only where it leads nowhere inside that one: "0" of a sharded block is not "0" of the root.
        if calling is not None:
            around = calling.split(".") if calling else []
            for depth in range(len(around), -1, -1):
                name = ".".join([*around[:depth], path]).strip(".")
                inside = not calling or f"{name}.".startswith(f"{calling}.")
                if inside and self._owns(name, parameter):
                    return name, parameter
        if self._owns(path, parameter):
            return found
        return (calling, parameter) if calling is not None else None

    def owners(self, node: Node) -> list[tuple[str, str]]:
        """(module, parameter name) of all modules that hold the parameter at placeholder ``node``, as far as its
        identity or its source tells."""
        example = getattr(node.meta.get("grapharg"), "example", None)
        found = _parse(node)
        return [*self._owners.get(id(example), ()), *([found] if found is not None and found[1] else ())]

    def _owns(self, module: str, parameter: str) -> bool:
        return module in self._by_name and parameter in self._by_name[module]._parameters

    def is_parameter(self, node: Node) -> bool:
        """Whether placeholder ``node`` is a parameter."""
        example = getattr(node.meta.get("grapharg"), "example", None)
        found = _parse(node)
        return isinstance(example, nn.Parameter) or (found is not None and bool(found[1]))


def _parse(node: Node) -> tuple[str, str] | None:
    """(module path, parameter name or "") from the source of a placeholder."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return None
    text = source.name if isinstance(source.name, str) else source.name()
    modules, parameter = [], ""
    for match in _SOURCE_STEP.finditer(text):
        if match.group(1):
            modules.append(match.group(1))
        elif match.group(2) == "parameters":
            parameter = match.group(3)
    return ".".join(modules), parameter


def _path(source: str) -> str:
    """``L['self'].blocks.0.attn`` or ``L['self']._modules['blocks']...`` as ``blocks.0.attn``."""
    if "._modules[" in source:
        return ".".join(re.findall(r"\._modules\['([^']+)'\]", source))
    return re.sub(r"^[LG]\['[^']+'\]\.?", "", source).replace("['", ".").replace("']", "").strip(".")
