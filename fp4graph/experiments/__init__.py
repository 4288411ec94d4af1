"""Comparing policies: what a run's loss is worth, given what its policy costs."""

from fp4graph.experiments.score import Rule, gain, score

__all__ = ["Rule", "gain", "score"]
