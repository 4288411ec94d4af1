"""Warns of weights that train in high precision although the policy may quantize them."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter

from torch import Tensor

from fp4graph.errors import PolicyWarning
from fp4graph.graph.refusals import rule_that_keeps
from fp4graph.model.prepare import PhasePlan
from fp4graph.model.weight import Weight
from fp4graph.numerics.sharding import is_sharded


def watch(plan: PhasePlan) -> None:
    """Warn, once for each weight, if a weight gets a gradient but none of its products was seen.

    Nothing sees the operations of a frame that Dynamo skips, such as a loop with a graph break, and a module there may
    multiply with the weight of a layer that it does not call. A parameter of several modules is left out, because its
    gradient may come from an embedding.
    """
    modules = plan.root.modules()
    owners = Counter(id(p) for module in modules for p in module._parameters.values() if p is not None)
    for weight in plan.weights:
        parameter = weight.parameter
        if weight.is_captured or not weight.is_used or owners[id(parameter)] != 1 or is_sharded(parameter):
            continue
        if parameter.is_leaf and parameter.requires_grad:
            _watch(weight)


def _watch(watched: Weight) -> None:
    reference = weakref.ref(watched)  # the hook must not keep the model alive

    def check(parameter: Tensor) -> None:
        handle.remove()
        weight = reference()
        if weight is not None and not weight.is_captured:
            warnings.warn(
                f"{weight.name} has a gradient, but no product with it was seen, so that it trains in high precision. "
                "A function that Dynamo skips (a loop with a graph break, a disabled function) may multiply with it in "
                "a module that does not call the layer: call the layer there, remove the break, or "
                f"{rule_that_keeps(weight.view.op, weight.fqn)}",
                PolicyWarning,
                stacklevel=2,
            )

    handle = watched.parameter.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]
