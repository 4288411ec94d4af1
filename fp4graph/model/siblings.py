"""Weights that share a number, such as the tensor scale of the matrix into which servers fuse q, k and v.

A technique declares the number as a :class:`~fp4graph.technique.StateEntry` whose writer is ``siblings``. Its value is
the maximum of the entry's ``init(weight)`` over the weights of a group and their shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp4graph.errors import PolicyWarning
from fp4graph.graph.siblings import SIBLINGS, layer_of
from fp4graph.model.weight import Weight
from fp4graph.numerics.sharding import is_sharded, whole
from fp4graph.ops.state import StateSlot, in_each_dtype


@dataclass(frozen=True, eq=False)
class Group:
    """Weights that share numbers: siblings, or a weight without siblings.

    Attributes:
        owner: the fully qualified name of the module that holds the siblings.
        weights: maps the name of each sibling inside the owner to its weight, in the order of the family.
    """

    owner: str
    weights: Mapping[str, Weight]

    @torch.no_grad()
    def value(self, slot: StateSlot) -> Tensor:
        """Return the number that the group shares now, in the shape that the entry's ``init`` returns."""
        values = [_maximum(slot.entry.init, weight.stored.detach()) for weight in self.weights.values()]
        return torch.stack(values).amax(0)

    def refresh(self) -> None:
        """Write the present numbers into the buffers that graphs read."""
        for slot in _shared(next(iter(self.weights.values()))):
            value = in_each_dtype(self.value(slot))
            for weight in self.weights.values():
                # Autograd ignores writes to ``data``. If no weight changes, a pending backward reads equal values.
                weight.module.get_buffer(weight.buffer(slot)).data.copy_(value)


def groups_of(root: nn.Module, weights: Iterable[Weight]) -> list[Group]:
    """Return the groups of the weights that share numbers.

    Raises:
        PolicyError: a sibling of such a weight is kept, is quantized in another way, or belongs to two groups.
    """
    sharing = {layer_of(weight.name): weight for weight in weights if _shared(weight)}
    if not sharing:
        return []
    by_place = {(weight.module, weight.parameter_name): weight for weight in sharing.values()}
    of_any_name = {
        layer_of(f"{fqn}.{name}".removeprefix(".")): weight
        for fqn, module in root.named_modules(remove_duplicate=False)
        for name in module._parameters
        if (weight := by_place.get((module, name))) is not None
    }
    present = {layer_of(name) for name, p in root.named_parameters(remove_duplicate=False) if p.dim() > 1}
    found: dict[tuple[str, tuple[str, ...]], Group] = {}
    claimed: dict[tuple[int, str], tuple[str, tuple[str, ...]]] = {}
    for name, weight in sharing.items():
        owner, _, last = name.rpartition(".")
        families = *_shared(weight)[0].entry.families, *SIBLINGS
        family = next((each for each in families if last in each), (last,))
        paths = {each: f"{owner}.{each}".removeprefix(".") for each in family}
        members = {each: of_any_name.get(path) for each, path in paths.items() if path in present}
        for each, sibling in members.items():
            _require_equal(weight, sibling, paths[each])
        for sibling in filter(None, members.values()):
            holder = claimed.setdefault((id(sibling.module), sibling.parameter_name), (owner, family))
            if holder != (owner, family):
                two_groups = " and ".join(
                    f"{', '.join(names)} of {where or '(root)'}" for where, names in (holder, (owner, family))
                )
                raise weight.rule.error(
                    f"{sibling.name} belongs to two groups of siblings, {two_groups}; let the option groups name a "
                    "whole family, or leave share out"
                )
        group = Group(owner, {each: sibling for each, sibling in members.items() if sibling is not None})
        weight.shared = found.setdefault((owner, family), group).value
    for names in dict.fromkeys(names for weight in sharing.values() for names in _shared(weight)[0].entry.families):
        if not any(family == names and len(group.weights) > 1 for (_, family), group in found.items()):
            warnings.warn(
                f"the option groups has {list(names)}, but no module holds two quantized layers of these names, so no "
                "layers share a scale; give the last names of siblings, such as wq, without dots and globs",
                PolicyWarning,
                stacklevel=2,
            )
    return list(found.values())


def _shared(weight: Weight) -> list[StateSlot]:
    return [slot for slot in weight.slots if slot.shared]


def _require_equal(weight: Weight, sibling: Weight | None, path: str) -> None:
    """Raise PolicyError where ``sibling``, at ``path``, has another quantizer in fprop, or does not share its scale."""
    quantizers, of_sibling = (
        None if each is None else {p and p.fprop.right for p in (choice.plan.program for choice in each.choices)}
        for each in (weight, sibling)
    )
    if sibling is None or quantizers != of_sibling:
        raise weight.rule.error(
            f"{weight.name} shares its tensor scale with {path}, because servers fuse the two, and {path} is not "
            "quantized in the same way; let one rule with one tensor_scaling decide both, or leave share out"
        )


def _maximum(init: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """Return the maximum of ``init`` over the shards of ``weight``."""
    if not is_sharded(weight):
        return init(weight)
    if weight.dim() > 2:  # a shard holds some of the experts
        return init(whole(weight))
    local = weight.to_local()
    value = init(local if local.numel() else local.new_zeros(1, 1))
    for dimension in range(weight.device_mesh.ndim):
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, weight.device_mesh.get_group(dimension))
    return value
