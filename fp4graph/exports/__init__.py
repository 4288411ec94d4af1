"""Checkpoints of real FP4 weights, in the layouts that servers read."""

from __future__ import annotations

from fp4graph.exports.api import LAYOUTS, export
from fp4graph.exports.loading import load_quantized
from fp4graph.exports.weights import ExportError

__all__ = ["LAYOUTS", "ExportError", "export", "load_quantized"]
