"""Sweeps: many configurations of a policy trained, and the score of a policy's loss against its cost."""

from fp4graph.lab.sweeps.results import Rule, gain, score

__all__ = ["Rule", "gain", "score"]
