"""Optimizers that can be used by themselves."""

from fp4graph.training.stable_spam import StableSPAM

__all__ = ["StableSPAM"]
