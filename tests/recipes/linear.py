"""The linear layer in the middle of three blocks under a policy: its inputs and results, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import fp4graph
from fp4graph.model.runtime import runtime_of
from tests.helpers.models import grouped_mm

TOKENS, IN, OUT = 128, 256, 128
SITE = "blocks.1.fc"


class Expert(nn.Module):
    """The only expert of a mixture, which gets all tokens."""

    def __init__(self, weight: np.ndarray) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, *weight.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return grouped_mm(x, self.weight.mT, offs=torch.tensor([len(x)], dtype=torch.int32))


class Block(nn.Module):
    """A linear or an expert, and other linears, so that the module counts as a block of the model."""

    def __init__(self, weight: np.ndarray, expert: bool = False) -> None:
        super().__init__()
        self.fc = Expert(weight) if expert else nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.more = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():
            self.fc.weight.copy_(torch.from_numpy(weight))  # the expert's [1, N, K] too


class Blocks(nn.Module):
    """Three blocks and a head side by side, each with the same input.

    The first and the last block serve policies that treat them differently. No rule matches the head.

    Args:
        experts: the block that has an expert in place of its linear, if any.
    """

    def __init__(self, weight: np.ndarray, experts: int | None = None) -> None:
        super().__init__()
        self.experts = experts
        self.blocks = nn.ModuleList(Block(weight, index == experts) for index in range(3))
        self.head = Block(weight).fc

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        first, middle, last = (block.fc(x if index == 1 else x.detach()) for index, block in enumerate(self.blocks))
        return middle, self.head(x.detach()), [first, last]


@dataclass(frozen=True)
class Data:
    """x [T, K], w [N, K] and dy [T, N], of fp32 values."""

    x: np.ndarray
    w: np.ndarray
    dy: np.ndarray

    @staticmethod
    def wide(seed: int) -> Data:
        """Gaussian numbers, with some rows and columns far larger or far smaller than the others, and blocks of zeros.

        The small rows and columns underflow in block scales with few exponents.
        """
        generator = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            values = generator.standard_normal((rows, columns))
            for axis, size in ((0, rows), (1, columns)):
                factors = np.ones(size)
                places = generator.permutation(size)
                factors[places[:6]], factors[places[6:12]] = 2.0**-21, 2.0**7
                factors[places[12:24]] = np.exp2(generator.integers(-6, 4, 12))
                values = values * np.expand_dims(factors, 1 - axis)
            values[:32, :32] = 0.0
            return values.astype(np.float32).astype(np.float64)

        return Data(matrix(TOKENS, IN), matrix(OUT, IN), matrix(TOKENS, OUT))

    @staticmethod
    def large(seed: int) -> Data:
        """Gaussian numbers times 2^22, whose encode scales underflow in formats with five exponent bits."""
        generator = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            return np.ldexp(generator.standard_normal((rows, columns)), 22).astype(np.float32).astype(np.float64)

        return Data(matrix(TOKENS, IN), matrix(OUT, IN), matrix(TOKENS, OUT))

    @staticmethod
    def grid(
        seed: int,
        largest: float,
        peaks: tuple[float, float, float] | None = (10.5, 10.5, 10.5),
        every: int | None = None,
    ) -> Data:
        """Multiples of a quarter up to ``largest``, with all ties of the elements; every block of 16 holds ``largest``.

        ``peaks``, unless None, are the first elements of x, w and dy. They make γ = peak/(Qmax·target) a power of two:
        dividing by it breaks no tie. With E2M1 they are 10.5 for a target of 448·headroom, 12 for a target of 256. With
        ``every``, each run of that many elements of a row or a column holds the peak.
        """
        generator = np.random.default_rng(seed)
        steps = int(4 * largest)

        def matrix(rows: int, columns: int, peak: float | None) -> np.ndarray:
            values = generator.integers(-steps, steps + 1, (rows, columns)) / 4.0
            row, column = np.indices((rows, columns))
            values[(row % 16) == (column % 16)] = largest
            if peak is not None:
                values[(row % every == column % every) if every else (row + column == 0)] = peak
            return values

        x, w, dy = peaks or (None, None, None)
        return Data(matrix(TOKENS, IN, x), matrix(OUT, IN, w), matrix(TOKENS, OUT, dy))


def applied(policy: Any, data: Data, experts: int | None = None) -> Blocks:
    """Return the model of ``data`` under ``policy``, without a compiler."""
    return fp4graph.apply(Blocks(data.w, experts), policy, backend="eager", total_forwards=1_000_000)


def begin_anew(model: Blocks, data: Data) -> None:
    """Return a trained model to its first step, with the weights of ``data``, without another capture."""
    model.zero_grad()
    fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters()))  # needed from the second step on
    model.load_state_dict(Blocks(data.w, model.experts).state_dict())  # a checkpoint without state resets the state
    runtime_of(model).count_from(0)


def run(policy: Any, data: Data, experts: int | None = None) -> tuple[np.ndarray, ...]:
    """Return (y, dx, dw) of the middle block and y of the head, at the first step under ``policy``."""
    return step(applied(policy, data, experts), data)


def step(model: Blocks, data: Data) -> tuple[np.ndarray, ...]:
    """Return (y, dx, dw) of the middle block and y of the head."""
    x = torch.from_numpy(data.x).float().requires_grad_()
    y, head, _ = model(x)
    y.backward(torch.from_numpy(data.dy).float())
    weight = model.blocks[1].fc.weight
    assert x.grad is not None
    assert weight.grad is not None
    return tuple(t.detach().double().numpy() for t in (y, x.grad, weight.grad.reshape(OUT, IN), head))


def tolerances(data: Data, added: float = 0.0, rotated: int = 1) -> tuple[np.ndarray, ...]:
    """Return bounds on the error of an fp32 product of given operands, for every element of y, dx and dw.

    A sum of n products in fp32, in any order, errs by at most n·2^-24·Σ|aᵢbᵢ| and a term for the rounding of each
    operand to fp32; Σ|aᵢbᵢ| is at most the product of the two vectors' lengths. Dequantized vectors are at most twice
    as long as the originals, because no recipe's rounding more than doubles a scale.

    Args:
        added: the largest number that a recipe adds to a weight of fprop.
        rotated: the number of elements in a block in which results are rotated back, which spreads their errors.
    """

    def bound(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
        lengths = np.linalg.norm(b, axis=1).reshape(-1, rotated).max(1).repeat(rotated)
        return 4 * (n + 4) * 2.0**-24 * np.outer(np.linalg.norm(a, axis=1), lengths)

    return bound(data.x, np.abs(data.w) + added, IN), bound(data.dy, data.w.T, OUT), bound(data.dy.T, data.x.T, TOKENS)


def mismatches(
    got: tuple[np.ndarray, ...],
    expected: Sequence[tuple[np.ndarray, ...]],
    data: Data,
    added: float = 0.0,
    rotated: int = 1,
    parts: Data | None = None,
) -> list[str]:
    """Return the results that differ by more than fp32 sums explain, such as ``["dw: 12 of 32768, ..."]``.

    Args:
        got: the result of :func:`run`; the head must be the exact product.
        expected: (y, dx, dw) of a reference, in several versions if they depend on how numbers next to a threshold are
            rounded. Each element must lie between the least and the greatest version.
        parts: data as large as the parts of the operands, for a recipe that quantizes operands in parts.
    """
    found = []
    y, dx, dw = tolerances(parts or data, added, rotated)
    for index, (name, bound) in enumerate({"y": y, "dx": dx, "dw": dw, "head": y}.items()):
        references = np.stack([each[index] for each in expected] if name != "head" else [data.x @ data.w.T])
        beyond = np.maximum(references.min(0) - got[index], got[index] - references.max(0))
        wrong = ~(beyond <= bound)
        if wrong.any():
            found.append(f"{name}: {wrong.sum()} of {wrong.size}, the worst by {beyond[wrong].max():.3g}")
    return found
