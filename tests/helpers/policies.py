"""Policies of one rule, which most tests need, as data or loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import fp4graph
from fp4graph.policy import Policy

Data = dict[str, Any]


def quantizer(block: int | str = 32, scale: str = "e8m0", rounding: str = "ceil", **more: Any) -> Data:
    """Return a ``quantize:`` of E2M1 whose block scales have this format and rounding; ``more`` are further keys."""
    return {"element": "e2m1", "block": block, "scale": {"format": scale, "rounding": rounding}, **more}


#: Shipped policies for the short runs of tests of all: one for each family, each form of state and of backward.
FEW = {"bf16", "microscaling", "mxfp4-rl", "nvfp4-te", "quartet", "tetrajet", "tetrajet-qema", "ue5m3-best"}


def without_experts(policies: Iterable[str]) -> list[str]:
    """Return the shipped policies under which a model without experts trains."""
    return [name for name in policies if not name.endswith("-experts")]


def depth_of(policy: str, blocks: int = 2) -> int:
    """Return ``blocks``, or the fewest blocks of which a shipped policy quantizes one, if that is more: three where the
    policy keeps the first and the last."""
    kept = [rule.match for rule in fp4graph.load_policy(policy).rules if not rule.quantizes]
    ends = sum((match.first_blocks is not None) + (match.last_blocks is not None) for match in kept)
    return max(blocks, ends + 1)


MXFP4 = quantizer()
#: TetraJet's quantizer of the forward: ties go up.
TIES_UP = quantizer(ties="up")
NVFP4 = quantizer(16, "e4m3", "nearest_even")


def one_rule(
    *techniques: Any,
    quantize: Mapping[str, Any] = MXFP4,
    op: str = "linear",
    match: Mapping[str, Any] | None = None,
    operands: Mapping[str, Any] | None = None,
    **policy: Any,
) -> Data:
    """Return a policy that quantizes every site of ``op`` (or ``match``).

    Args:
        techniques: the rule's techniques; ``techniques=`` are the policy's.
        operands: exceptions by operand.
        policy: further keys of the policy, such as ``phases``.
    """
    rule: Data = {"name": "all", "match": {"op": op} if match is None else match, "quantize": quantize}
    if techniques:
        rule["techniques"] = list(techniques)
    if operands:
        rule["operands"] = operands
    return {"version": 1, "name": "p", "rules": [rule], **policy}


def with_technique(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    more: Sequence[Any] = (),
    after: Sequence[Any] = (),
    **rest: Any,
) -> Data:
    """Return :func:`one_rule` of ``rest`` with technique ``name`` between the techniques ``more`` and ``after``."""
    return one_rule(*more, {name: options} if options else name, *after, **rest)


def loaded(name: str, options: Mapping[str, Any] | None = None, **rest: Any) -> Policy:
    """Return :func:`with_technique`, loaded."""
    return fp4graph.load_policy(with_technique(name, options, **rest))
