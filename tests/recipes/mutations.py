"""Changes each key of each shipped policy once, and counts the changes that no reference notices.

``python -m pytest tests/recipes`` compares the policies with the references; this script says how many mistakes the
comparison would miss. Run it by hand, with ``python -m tests.recipes.mutations``; it takes minutes. A change that the
loader refuses counts as noticed.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fp4graph_policies
import torch
import yaml

import fp4graph
from tests.recipes.shipped import POLICIES, data_for, differences, expected, forms

_OTHER: dict[str, dict[Any, Any]] = {
    "element": {"e2m1": "e3m0", "e3m0": "e2m1", "int4": "e2m1", "e4m3": "e5m2"},
    "block": {32: 16, 16: 32, 64: 32, 128: 64, "row": 32, "tensor": "row"},
    "format": {
        "e8m0": "e4m3",
        "e4m3": "ue5m3",
        "ue5m3": "e4m3",
        "e8m3": "e4m3",
        "ue5m3_61440": "ue5m3",
        "fp32": "bf16",
    },
    "rounding": {"nearest": "stochastic", "stochastic": "nearest"},
    "scale rounding": {
        "floor": "ceil",
        "ceil": "floor",
        "nearest_even": "toward_positive",
        "toward_positive": "nearest_even",
    },
    "convention": {"decode": "encode", "encode": "decode"},
    "zero": {"nearest_subnormal": "to_one", "to_one": "nearest_subnormal"},
    "ties": {"even": "up", "up": "even"},
    "source": {"fprop": "original", "original": "fprop"},
    "kind": {
        "random": "deterministic",
        "random_backward": "random",
        "deterministic": "random",
        "dge": "sigmoid",
        "clip": "dge",
    },
    "scope": {"all": "backward", "backward": "all"},
    "resample": {"never": "step"},
    "operands": {"backward": "all_activation"},
    "default": {"keep": {"element": "e2m1", "block": 32, "scale": {"format": "e8m0"}}},
}  # fmt: skip
#: Keys that change no values.
_NAMES = ("version", "name", "description", "extends", "expect", "match", "keep", "at")


def mutants(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Yield (path of a key, the change in words, the new value); the value None leaves the key out."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        here = (*path, key)
        if key in _NAMES:
            continue
        table = _OTHER.get("scale rounding" if path and path[-1] == "scale" and key == "rounding" else str(key), {})
        if "operands" in path[-1:] or path[-1:] == ("techniques",) or isinstance(value, list):
            yield here, "left out", None
        if isinstance(value, dict | list) and str(key) != "block":
            yield from mutants(value, here)
        elif isinstance(value, list):
            yield here, f"{value} -> {value[0]}", value[0]
        elif isinstance(value, bool):
            yield here, f"{value} -> {not value}", not value
        elif value in table:
            yield here, f"{value} -> {table[value]}", table[value]
        elif isinstance(value, int | float):
            other = value / 2 if isinstance(value, float) else value * 2
            yield here, f"{value} -> {other}", other


def changed(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return ``document`` with ``value`` at ``path``, or without the key if ``value`` is None."""
    document = copy.deepcopy(document)
    node: Any = document
    for step in path[:-1]:
        node = node[step]
    if value is None:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return document


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    total, survivors = 0, []
    for name in names or POLICIES:
        document = yaml.safe_load((Path(fp4graph_policies.__path__[0]) / f"{name}.yaml").read_text())
        known = forms(fp4graph.load_policy(name))
        cases = [(form, data, expected(form, data)) for form in known for data in data_for(name).values()]
        for path, what, value in mutants(document):
            total += 1
            torch._dynamo.reset()
            try:
                mutant = forms(fp4graph.load_policy(changed(document, path, value)))
                noticed = mutant.keys() != known.keys() or any(
                    differences(form, mutant[form], data, references) for form, data, references in cases
                )
            except fp4graph.Error:
                noticed = True
            if not noticed:
                survivors.append(f"{name}: {'.'.join(map(str, path))}: {what}")
                print(survivors[-1], flush=True)
    print(f"{total} changes, {total - len(survivors)} noticed, {len(survivors)} not")


if __name__ == "__main__":
    main(sys.argv[1:])
