"""Names of modules and parameters in a captured graph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.fx import Node

from fp4graph import torch_internals
from fp4graph.graph.blocks import ModuleInfo, block_of, describe_modules, find_blocks
from fp4graph.graph.marker import module_stack
from fp4graph.graph.roles import find_heads, role_of
from fp4graph.technique.site import BlockPosition, SiteView

_SOURCE_STEP = re.compile(r"\._modules\['([^']+)'\]|\._(parameters|buffers)\['([^']+)'\]")


class Owner(NamedTuple):
    """The place of a parameter: the fully qualified name of its module, and its name there."""

    module: str
    parameter: str


class Names:
    """Resolves modules and parameters to fully qualified names: by identity, else by Dynamo's source text.

    Args:
        root: the model, or None where only a graph is at hand (the ``torch.compile`` entry point); names then come
            from the graph alone.

    Attributes:
        blocks: position of every block of the model, by the block's name.
        within: name of the module of ``fully_shard`` whose forward begins the captured graph, or None. The graph does
            not say that its nodes were called in this module.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self._modules: dict[int, list[str]] = {}
        self._owners: dict[int, list[Owner]] = {}
        self._buffers: dict[int, Owner] = {}
        self._infos: dict[str, ModuleInfo] = {}
        self._by_name: dict[str, nn.Module] = {}
        self._root = root
        self.within: str | None = None
        self._heads = set[str]() if root is None else find_heads(root)
        if root is not None:
            self._infos = describe_modules(root)
            for name, module in root.named_modules(remove_duplicate=False):
                self._modules.setdefault(id(module), []).append(name)
                self._by_name[name] = module
                for parameter_name, parameter in module._parameters.items():
                    if parameter is not None:
                        self._owners.setdefault(id(parameter), []).append(Owner(name, parameter_name))
                self._buffers |= {id(buffer): Owner(name, key) for key, buffer in module._buffers.items()}
        self.blocks: Mapping[str, BlockPosition] = find_blocks(self._infos) if root is not None else {}

    def learn(self, nodes: list[Node]) -> None:
        """Without a root, learn modules, their classes and their weights from the sources of ``nodes``."""
        if self._by_name:
            return
        weights: dict[str, int] = {}
        for node in nodes:
            if node.op == "placeholder" and (source := _source(node)) is not None:
                value = node.meta.get("example_value")
                weights[source.module] = weights.get(source.module, 0) + (value is not None and value.dim() == 2)
            for caller in module_stack(node):
                name = _path(caller.source)
                parents = name.split(".")
                for depth in range(1, len(parents)):
                    self._infos.setdefault(".".join(parents[:depth]), ModuleInfo(nn.Module, 0))
                self._infos[name] = ModuleInfo(caller.cls, 0)
        for name, count in weights.items():
            self._infos[name] = ModuleInfo(self._infos[name].cls if name in self._infos else nn.Module, count)
        self.blocks = find_blocks(self._infos)

    def block(self, name: str | None) -> BlockPosition | None:
        """Return the position of the block that module ``name`` is in, or None."""
        return block_of(name, self.blocks)

    def view(
        self,
        module: str | None,
        op: str,
        sizes: tuple[int | None, int | None, int | None] = (None, None, None),
        producer: str | None = None,
        parameter: str | None = None,
    ) -> SiteView:
        """Return a site of ``module`` as a policy sees it; ``parameter`` names its second factor in ``module``."""
        role = None if module is None else role_of(f"{module}.{parameter or ''}".strip("."), self._infos, self._heads)
        role = None if role == "router" and op == "grouped" else role  # experts in a module that is called a router
        block = None if role == "head" and "" in self.blocks else self.block(module)  # a head is not in the one block
        names = () if module is None else self._modules.get(id(self._by_name.get(module)), ())
        return SiteView(module, op, *sizes, block, producer, role, tuple(name for name in names if name != module))

    def name(self, module: nn.Module) -> str | None:
        """Return the fully qualified name of a module of the model; None for any other."""
        return self._first(id(module))

    def _first(self, module: int) -> str | None:
        """Return the first name of the module with this id, or None."""
        return next(iter(self._modules.get(module, ())), None)

    def counterpart(self, key: str, old: str, new: str) -> str:
        """Return the id of the module whose place in module ``new`` is that of module ``key`` in module ``old``."""
        name, outer, other = (self._first(int(each.partition("@")[0])) or "" for each in (key, old, new))
        module = self._by_name.get(f"{other}.{name.removeprefix(f'{outer}.')}")
        return key if module is None else str(id(module))

    def module(self, node: Node) -> str | None:
        """Return the innermost module that ``node`` was called in, or None."""
        for caller in reversed(module_stack(node)):
            if caller.id in self._modules:
                return self._first(caller.id)
            if not self._by_name:
                return _path(caller.source)
        return None

    def caller(self, node: Node) -> str | None:
        """Return the innermost module that ``node`` was called in, perhaps that of :attr:`within`, or None."""
        module = self.module(node)
        return self.within if module is None else module

    def newcomer(self, node: Node, unowned: Node | None) -> str | None:
        """Return the innermost module that ``node`` was called in, or that holds the parameter ``unowned``, if that
        joined the model after the names were taken: without a graph the calls of such a module are not seen.

        A module that no ``named_modules()`` lists, such as one in a plain list, does not count.
        """
        stack = module_stack(node)
        if self._root is None or not stack or (stack[-1].id in self._modules and unowned is None):
            return None
        weight = None if unowned is None else _example(unowned)
        for name, module in self._root.named_modules():
            holds = weight is not None and any(p is weight for p in module._parameters.values())
            if id(module) not in self._modules and (id(module) == stack[-1].id or holds):
                return str(name)
        return None

    def owner(self, weight: Node, user: Node) -> Owner | None:
        """Return the owner of the parameter at placeholder ``weight``, or None.

        A parameter that several modules share belongs to the one that ``user`` was called in, else to the first.
        """
        example, calling = _example(weight), self.caller(user)
        # fully_shard may have replaced the parameter that had this id.
        candidates = self._owners.get(id(example), [])
        owners = [o for o in candidates if self._by_name[o.module]._parameters.get(o.parameter) is example]
        if owners:
            return next((owner for owner in owners if owner.module == calling), owners[0])
        holders = () if example is None else sorted(self._by_name, key=lambda name: name != calling)
        for module in holders:  # a parameter may be assigned after the names were taken
            for name, value in self._by_name[module]._parameters.items():
                if value is example:
                    return Owner(module, name)
        source = _source(weight)
        if source is None or not self._by_name:
            return source
        path, parameter = source
        # A source is relative to the captured frame, whose module contains the calling module. Try the source
        # inside the calling module first: "0" of a sharded block is not "0" of the root.
        if calling is not None:
            parents = calling.split(".") if calling else []
            for depth in range(len(parents), -1, -1):
                name = ".".join([*parents[:depth], path]).strip(".")
                inside = not calling or f"{name}.".startswith(f"{calling}.")
                if inside and self._owns(name, parameter):
                    return Owner(name, parameter)
        if self._owns(path, parameter):
            return source
        return Owner(calling, parameter) if calling is not None else None

    def tied_to(self, owner: Owner, weight: Node, user: Node) -> Owner | None:
        """Return the owner of the parameter at ``weight`` that ``user`` was called in, if that is another module than
        ``owner``'s, else None."""
        example, calling = _example(weight), self.module(user)
        for other in self._owners.get(id(example), ()):
            module = self._by_name[other.module]
            if other.module == calling and module is not self._by_name.get(owner.module):
                return other if module._parameters.get(other.parameter) is example else None
        return None

    def owners(self, node: Node) -> list[Owner]:
        """Return all owners of the parameter at placeholder ``node``, by its identity and by its source."""
        source = _source(node)
        return [*self._owners.get(id(_example(node)), ()), *(() if source is None else (source,))]

    def _owns(self, module: str, parameter: str) -> bool:
        return module in self._by_name and parameter in self._by_name[module]._parameters

    def is_parameter(self, node: Node) -> bool:
        """Return whether placeholder ``node`` is a parameter."""
        return isinstance(_example(node), nn.Parameter) or _source(node) is not None

    def is_buffer(self, example: object) -> bool:
        """Return whether an input tensor of a graph is a buffer of the model."""
        owner = self._buffers.get(id(example))
        return owner is not None and self._by_name[owner.module]._buffers.get(owner.parameter) is example

    def detached_from(self, x: Tensor) -> nn.Parameter | None:
        """Return the parameter of the model whose memory and layout ``x`` has, or None."""
        parameters = (p for module in self._by_name.values() for p in module._parameters.values() if p is not None)
        memory = _memory(x)  # not is_set_to: a selective checkpoint would count it among the operations of its region
        return None if memory is None else next((p for p in parameters if _memory(p) == memory), None)

    def is_of_model(self, node: Node) -> bool:
        """Return whether placeholder ``node`` is a parameter or a buffer of the model."""
        return self.is_parameter(node) or self.is_buffer(_example(node))


def _memory(x: Tensor) -> tuple[Any, ...] | None:
    """Return what tensors of the same values in the same memory have in common; None for a subclass of tensors, and for
    a tensor that has no memory of its own: a sparse or nested one, or one inside of ``vmap``."""
    if type(x) not in (Tensor, nn.Parameter) or not x.numel():
        return None
    try:
        return x.data_ptr(), x.dtype, x.shape, x.stride()
    except RuntimeError:
        return None


def _example(node: Node) -> object:
    """Return the object that Dynamo saw at placeholder ``node``."""
    return getattr(node.meta.get("grapharg"), "example", None)


def _source(node: Node) -> Owner | None:
    """Return the parameter that the source of a placeholder names, or None."""
    steps = _SOURCE_STEP.findall(torch_internals.source_of(node) or "")
    parameters = [name for _, kind, name in steps if kind == "parameters"]
    return Owner(".".join(module for module, _, _ in steps if module), parameters[-1]) if parameters else None


def _path(source: str) -> str:
    """Return ``blocks.0.attn`` for ``L['self'].blocks.0.attn`` and ``L['self']._modules['blocks']...``."""
    if "._modules[" in source:
        return ".".join(re.findall(r"\._modules\['([^']+)'\]", source))
    return re.sub(r"^[LG]\['[^']+'\]\.?", "", source).replace("['", ".").replace("']", "").strip(".")
