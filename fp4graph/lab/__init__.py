"""Measurements of quantized trainings: statistics, error decomposition, diagnoses."""

from fp4graph.lab.diagnose import Diagnosis, Finding, diagnose
from fp4graph.lab.statistics.collect import Statistics
from fp4graph.lab.statistics.decomposition import Decomposition, decompose, reconstruction_error
from fp4graph.lab.statistics.metrics import METRICS
from fp4graph.lab.statistics.storage import Recorded, read

__all__ = [
    "METRICS", "Decomposition", "Diagnosis", "Finding", "Recorded", "Statistics", "decompose", "diagnose", "read",
    "reconstruction_error",
]  # fmt: skip
