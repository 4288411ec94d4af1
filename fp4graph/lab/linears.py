"""The linears of a model: groups that must share a format, bits per weight, and the share of FLOPs in FP4."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from fp4graph.errors import Error
from fp4graph.graph.siblings import SIBLINGS
from fp4graph.graph.site import Site
from fp4graph.model.evaluation import evaluating
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.operands import GROUPS, Gemm, Operand

Loss = Callable[[nn.Module, Any], torch.Tensor]
#: Bits of a weight in high precision: models are served in 16 bits.
KEPT_BITS = 16.0


class Call(NamedTuple):
    """A loss's first call of a model: the arguments, and the first tensor that each module reads, by module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, torch.Tensor]


def call_of(model: nn.Module, loss: Loss, batch: Any) -> Call:
    """Run ``loss(model, batch)`` once, in eval mode and without gradients, and return the model's first call.

    Raises an Error if the loss does not call the model.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    inputs: dict[str, torch.Tensor] = {}

    def take(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not name:
            calls.append((args, dict(kwargs)))
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if first is not None:
            inputs.setdefault(name, first)

    with torch.no_grad(), torch.random.fork_rng(), ExitStack() as after:
        for name, module in model.named_modules():
            after.callback(module.register_forward_pre_hook(functools.partial(take, name), with_kwargs=True).remove)
        after.enter_context(evaluating(model))  # in evaluation mode no running statistic changes
        loss(model, batch)
    if not calls:
        raise Error(f"loss(model, batch) does not call the {type(model).__name__}; call model(...) in it")
    return Call(*calls[0], inputs)


def groups_of(
    model: nn.Module, names: Iterable[str], inputs: Mapping[str, torch.Tensor]
) -> tuple[tuple[str, ...], ...]:
    """Partition the modules ``names`` into groups of siblings, in the order of ``names``.

    Two modules are siblings if they share a weight; if they have the same parent, and read one tensor (``inputs``) or
    have names that servers fuse (:data:`fp4graph.graph.siblings.SIBLINGS`); or if their names differ only in the
    number of an expert. Siblings of siblings are siblings.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    group_of: dict[str, list[str]] = {}
    first_with: dict[Hashable, str] = {}
    for name in names:
        group_of[name] = [name]
        for key in _keys(name, modules[name], inputs.get(name)):
            other = group_of[first_with.setdefault(key, name)]
            if other is not group_of[name]:
                joined = [*other, *group_of[name]]
                group_of.update(dict.fromkeys(joined, joined))
    groups = {id(group): group for group in group_of.values()}
    return tuple(tuple(name for name in group_of if name in group) for group in groups.values())


def _keys(name: str, module: nn.Module, read: torch.Tensor | None) -> Iterator[Hashable]:
    """Yield the keys of a module; siblings have at least one key in common."""
    yield from (("weight", id(weight)) for weight in weights_of(module))
    parent, _, leaf = name.rpartition(".")
    if read is not None:
        yield "input", parent, id(read)
    yield from (("family", parent, family) for family in SIBLINGS if leaf in family)
    yield "experts", re.sub(r"(?<![^.])experts\.\d+(?![^.])", "experts.*", name)


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the matrices, and the stacks of experts' matrices, among a module's parameters."""
    holders = (module, *getattr(module, "parametrizations", {}).values())
    return [weight for holder in holders for weight in holder.parameters(recurse=False) if weight.ndim >= 2]


def bits_per_element(spec: QuantSpec | None, row: int) -> float:
    """Return the bits that store one element and its share of the block's scale, which takes whole bytes.

    ``row`` is the length of a line, for blocks that are lines. A tensor's scale counts as 0 bits, high precision as 16.
    """
    if spec is None:
        return KEPT_BITS
    sizes = {"row": (row,), "tensor": (math.inf,)}
    block = spec.block if isinstance(spec.block, tuple) else sizes.get(str(spec.block), (spec.block,))
    return spec.element.code_bits + 8 * math.ceil(spec.scale.format.code_bits / 8) / math.prod(map(float, block))


def in_fp4(specs: Mapping[Operand, QuantSpec | None], gemm: Gemm) -> bool:
    """Return whether both operands of a GEMM have elements of four bits (E2M1, E3M0, INT4)."""
    return all((spec := specs.get(operand)) is not None and spec.element.code_bits <= 4 for operand in GROUPS[gemm])


def fp4_flops(sites: Sequence[Site]) -> float | None:
    """Return the share of a training step's matrix FLOPs that multiply two operands of 4 bits; None if unknown.

    The share is Σ_s F_s · g_s / Σ_s 3 F_s, where site s has F_s FLOPs in each of its three GEMMs, and g_s GEMMs in FP4.
    """
    total = 3 * sum(site.flops or 0 for site in sites)
    short = sum((site.flops or 0) * sum(in_fp4(site.operands, gemm) for gemm in Gemm) for site in sites)
    return short / total if total else None


def bits_per_weight(sites: Sequence[Site]) -> float | None:
    """Return the mean bits per weight, scales included, over the weights in matrix products; None without weights."""
    weights: dict[tuple[Any, ...], tuple[int, float]] = {}  # a layer that is called twice has one weight
    for site in sites:
        if site.op in ("linear", "grouped") and all(isinstance(size, int) for size in site.shapes[1]):
            shape = [int(size) for size in site.shapes[1]]
            row = shape[-1 if site.op == "linear" else -2]
            bits = bits_per_element(site.operands.get(Operand.FPROP_WEIGHT), row)
            weights[site.module, site.weight, site.shapes[1]] = math.prod(shape), bits
    total = sum(size for size, _ in weights.values())
    return sum(size * bits for size, bits in weights.values()) / total if total else None
