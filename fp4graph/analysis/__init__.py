"""Seeing what quantization does to a training: statistics, error decomposition, ablations, reports."""

from fp4graph.analysis.decomposition import Decomposition, decompose

__all__ = ["Decomposition", "decompose"]
