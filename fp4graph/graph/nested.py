"""Iterates over nested tuples, lists and mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from fp4graph.torch_internals import pytree

_T = TypeVar("_T")


def nested(value: Any, kind: type[_T]) -> Iterator[_T]:
    """Yield the instances of ``kind`` among the leaves of ``value``, or ``value`` itself."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Mapping):  # pytree knows dictionaries, but not the batches of Hugging Face's tokenizers
            yield from nested(list(leaf.values()), kind)
        elif isinstance(leaf, kind):
            yield leaf
