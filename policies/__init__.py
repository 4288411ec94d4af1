"""Shipped policies: YAML files, reachable by name."""
