"""The commands of `fp4graph`, one per module."""
