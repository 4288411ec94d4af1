"""Trains under Inductor in a process of its own, for tests of torch's caches: ``cached.py CASE...``.

Prints JSON: for each case the hits and misses of AOTAutograd's cache, how far the weights lie from those of eager mode,
and the weights.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from torch._dynamo.utils import counters

import fp4graph
from fp4graph.policy import Policy
from fp4graph.technique.registry import Registry
from tests.helpers.policies import one_rule, quantizer
from tests.kernels.models import train


def policy(case: str) -> Policy:
    """``up`` and ``even``: MXFP4 with ties so, drawing no noise. ``louder``: the former with a stranger's technique,
    imported from wherever the test has put it, whose options follow as JSON."""
    name, _, options = case.partition(" ")
    match = {"op": "linear", "block": True}
    data = one_rule(quantize=quantizer(ties="even" if name == "even" else "up"), match=match)
    plugins = []
    if name == "louder":
        plugins = [(name, importlib.import_module(name))]
        data["techniques"] = [{name: json.loads(options or "{}")}]
    return fp4graph.load_policy(data, Registry(plugins))


def trained(case: str) -> dict[str, Any]:
    """See above."""
    counters.clear()
    weights = train(policy(case), backend="inductor", width=32, blocks=1)
    found = counters["aot_autograd"]
    hits, misses = found["autograd_cache_hit"], found["autograd_cache_miss"]
    off = (weights - train(policy(case), width=32, blocks=1)).abs().max().item()
    return {"hits": hits, "misses": misses, "off": off, "weights": weights.tolist()}


if __name__ == "__main__":
    print(json.dumps({case: trained(case) for case in sys.argv[1:]}))
