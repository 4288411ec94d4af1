"""The commands of `fp4graph`."""
