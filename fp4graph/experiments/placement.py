"""The blocks of a model that has no single repeated stack, such as a U-Net, for ``block: true``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fp4graph.policy import Policy, Rule


def placed(policy: Policy, blocks: Sequence[str]) -> Policy:
    """Return ``policy`` with each rule's ``block``, ``first_blocks`` and ``last_blocks`` written as module names.

    ``blocks`` names the modules that are the model's blocks, in the order in which they run.

    Raises:
        PolicyError: a rule says ``block: false``, or ``module`` besides, which a list of modules cannot express.
    """
    rules = tuple(_placed(rule, blocks) for rule in policy.rules)
    phases = tuple(dataclasses.replace(phase, policy=placed(phase.policy, blocks)) for phase in policy.phases)
    return dataclasses.replace(policy, rules=rules, phases=phases)


def _placed(rule: Rule, blocks: Sequence[str]) -> Rule:
    match = rule.match
    if match.block is None and match.first_blocks is None and match.last_blocks is None:
        return rule
    if match.block is False or match.module is not None:
        raise rule.error(
            "this task's model has blocks of several kinds, for which a rule can say block: true, first_blocks and "
            "last_blocks, but not block: false or module besides; name its modules instead"
        )
    chosen = list(blocks)
    if match.first_blocks is not None:
        chosen = [name for name in chosen if name in blocks[: match.first_blocks]]
    if match.last_blocks is not None:
        chosen = [name for name in chosen if name in blocks[len(blocks) - match.last_blocks :]]
    names = tuple(f"{name}.*" for name in chosen)
    placed = match.model_copy(update={"module": names, "block": None, "first_blocks": None, "last_blocks": None})
    return dataclasses.replace(rule, match=placed)
