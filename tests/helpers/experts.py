"""A mixture of experts in each form in which models write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.models import grouped_mm

EXPERTS, WIDTH, HIDDEN = 4, 32, 48


class Experts(nn.Module):
    """Experts ``w2ᵀ silu(w1 x + bias)``, with ``w1 [E, N, K]`` and ``w2 [E, N, K]``, in one of :data:`FORMS`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 6)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 7)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.form, self.scale = form, None
        if form in ("grouped", "gathered"):  # a parameter of three axes that is not a weight
            self.scale = nn.Parameter(torch.randn(3, 2, WIDTH))

    def activation(self, hidden: Tensor) -> Tensor:
        """Return the input of the second product."""
        return F.silu(hidden if self.scale is None else hidden * self.scale.sum((0, 1)).mean())

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        """Return the outputs for tokens ``x [T, K]`` of the experts ``choice [T]``; a token without expert gets 0."""
        return FORMS[self.form](self, x, choice)


def grouped(layer: Experts, x: Tensor, choice: Tensor) -> Tensor:
    """Sort rows by expert and take two grouped products, as torchtitan does."""
    order = torch.argsort(choice, stable=True)
    ends = torch.cumsum((choice[:, None] == torch.arange(EXPERTS)).sum(0), 0, dtype=torch.int32)
    # torch's product leaves these rows unwritten, in forward and backward, so they are masked after and before it.
    dropped = (choice[order] == EXPERTS)[:, None]
    hidden = grouped_mm(x[order].masked_fill(dropped, 0), layer.w1.transpose(-2, -1), offs=ends)
    # Tokens are in their own order here, as in the other forms, so that gradients of bias and scale are equal sums.
    hidden = hidden.masked_fill(dropped, 0)[torch.argsort(order)] + layer.bias[choice.clamp(max=EXPERTS - 1)]
    hidden = layer.activation(hidden)[order]
    y = grouped_mm(hidden.masked_fill(dropped, 0), layer.w2, offs=ends).masked_fill(dropped, 0)
    return torch.zeros_like(x).index_copy(0, order, y)


def gathered(layer: Experts, x: Tensor, choice: Tensor) -> Tensor:
    """Copy the matrices of its expert for each token; every token must have an expert."""
    hidden = torch.bmm(layer.w1[choice], x.unsqueeze(-1)).squeeze(-1) + layer.bias[choice]
    return torch.bmm(layer.activation(hidden).unsqueeze(1), layer.w2[choice]).squeeze(1)


def loop(layer: Experts, x: Tensor, choice: Tensor) -> Tensor:
    """Loop over the experts that have tokens, as transformers' ``eager`` form; Dynamo does not capture this loop."""
    y = torch.zeros_like(x)
    for expert in torch.bincount(choice, minlength=EXPERTS)[:EXPERTS].nonzero():
        tokens = torch.where(choice == expert[0])[0]
        hidden = layer.activation(F.linear(x[tokens], layer.w1[expert[0]]) + layer.bias[expert[0]])
        y.index_add_(0, tokens, hidden @ layer.w2[expert[0]])
    return y


def unrolled(layer: Experts, x: Tensor, choice: Tensor) -> Tensor:
    """Loop over a fixed list of experts, which Dynamo captures."""
    y = torch.zeros_like(x)
    for expert in (0, 2, 3):
        hidden = layer.activation(F.linear(x, layer.w1[expert]) + layer.bias[expert])
        y = y + hidden @ layer.w2[expert] * (choice == expert)[:, None]
    return y


FORMS: Mapping[str, Callable[[Experts, Tensor, Tensor], Tensor]] = {
    "grouped": grouped, "gathered": gathered, "loop": loop, "unrolled": unrolled
}  # fmt: skip


class Block(nn.Module):
    """Experts between two linears."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.proj, self.experts, self.out = nn.Linear(WIDTH, WIDTH), Experts(form), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        """Return ``x + out(experts(proj(x)))``."""
        result: Tensor = x + self.out(self.experts(self.proj(x), choice))
        return result


class Mixture(nn.Module):
    """Blocks with experts.

    Args:
        checkpointed: the modules that the backward recomputes: "experts", "block", or None for no module.
        repeats: how often the blocks are called.
    """

    def __init__(
        self, form: str, depth: int = 2, checkpointed: str | None = None, *, repeats: int = 1, reentrant: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(form) for _ in range(depth))
        self.checkpointed, self.repeats, self.reentrant = checkpointed, repeats, reentrant

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        """Return the outputs of the last block."""
        for block in [*self.layers] * self.repeats:
            if self.checkpointed == "block":
                x = checkpoint(block, x, choice, use_reentrant=self.reentrant)
            elif self.checkpointed == "experts":
                x = x + block.out(checkpoint(block.experts, block.proj(x), choice, use_reentrant=self.reentrant))
            else:
                x = block(x, choice)
        return x


def tokens(seed: int = 0, *, dropped: bool = False) -> tuple[Tensor, Tensor]:
    """Return 70 tokens and their experts. Expert 1 has no token; with ``dropped``, a quarter has no expert."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.tensor([0, 2, 3, EXPERTS])[torch.randint(0, 3 + dropped, (70,), generator=generator)]
    return torch.randn(70, WIDTH, generator=generator, requires_grad=True), choice


def by_hand(plain: Any, x: Tensor, choice: Tensor, linear: Callable[..., Tensor]) -> Tensor:
    """Return the outputs of a plain mixture, expert by expert, each product by ``linear(x, weight, bias)``."""
    for block in plain.layers:
        inner, layer = linear(x, block.proj.weight, block.proj.bias), block.experts
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows = torch.where(choice == expert)[0]
            if len(rows):
                hidden = layer.activation(linear(inner[rows], layer.w1[expert], None) + layer.bias[expert])
                y.index_add_(0, rows, linear(hidden, layer.w2[expert].T, None))
        x = x + linear(y, block.out.weight, block.out.bias)
    return x
