"""A product operation for fp4graph: y = scale·x·Wᵀ + b as a single operator, like a library's fused kernel."""

import torch
from torch import Tensor

import fp4graph
from fp4graph.technique import Factors, ProductOperation


@torch.library.custom_op("fp4graph_example::scaled_linear", mutates_args=())
def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Compute ``scale·x [..., K] @ weight [N, K]ᵀ + bias [N]``."""
    return torch.nn.functional.linear(x * scale, weight, bias)


@scaled_linear.register_fake
def _(x, weight, bias, scale):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def read(x, weight, bias, scale):
    """Return the factors of a call; fp4graph makes the quantized product and its backward."""
    return Factors(x, weight, "linear", addend=bias, alpha=scale)


@fp4graph.hookimpl
def fp4graph_products():
    return [ProductOperation("fp4graph_example::scaled_linear", read)]
