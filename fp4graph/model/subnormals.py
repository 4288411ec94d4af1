"""Refuses policies whose scales a CPU that flushes subnormal numbers reads as 0."""

from __future__ import annotations

import sys

from fp4graph.policy import Policy


def refuse_flushed(policy: Policy) -> None:
    """Raise a PolicyError if this thread reads subnormal numbers as 0 and a rule would give zeros a scale that is one:
    0/0 makes every block of zeros NaN."""
    if sys.float_info.min / 2 > 0:  # Python's numbers are flushed as torch's are
        return
    for rule in (*policy.rules, policy.default):
        for spec in rule.specs.values():
            if spec is not None and spec.scale.zero_is_subnormal:
                raise rule.error(
                    f"torch.set_flush_denormal(True) is in force, and under it the {spec.scale.format.name} scale of a "
                    f"block of zeros, {spec.scale.format.min:.4g}, reads as 0, so that the block becomes NaN; call "
                    "torch.set_flush_denormal(False), or give the scale zero: to_one"
                )
