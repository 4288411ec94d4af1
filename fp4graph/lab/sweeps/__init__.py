"""Sweeps: train many configurations of a policy, and score each configuration's loss against its cost."""

from fp4graph.lab.sweeps.results import Rule, gain, score

__all__ = ["Rule", "gain", "score"]
