"""Measurements of what quantization does to a training: statistics, error decomposition, pictures."""

from fp4graph.analysis.collect import Statistics
from fp4graph.analysis.decomposition import Decomposition, decompose
from fp4graph.analysis.metrics import METRICS
from fp4graph.analysis.reconstruction import reconstruction_error
from fp4graph.analysis.storage import Recorded, read

__all__ = ["METRICS", "Decomposition", "Recorded", "Statistics", "decompose", "read", "reconstruction_error"]
