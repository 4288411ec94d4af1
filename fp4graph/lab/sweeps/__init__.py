"""Trainings, sweeps and comparisons of policies, and the score of a policy's loss against its cost."""

from fp4graph.lab.sweeps.score import Rule, gain, score

__all__ = ["Rule", "gain", "score"]
