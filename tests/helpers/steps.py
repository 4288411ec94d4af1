"""Optimizer steps on prescribed gradients, small models to train, and comparisons of their states, to the bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Stream = list[list[Tensor | None]]


def spiky(
    shapes: Sequence[Sequence[int]], steps: int, dtype: torch.dtype = torch.float32, missing: bool = True
) -> Stream:
    """Return gradients whose norms change, with spikes, some zero gradients and, if ``missing``, some None."""
    generator = torch.Generator().manual_seed(1)

    def draw(step: int, i: int, shape: Sequence[int]) -> Tensor | None:
        g = torch.randn(tuple(shape), generator=generator) * torch.randn((), generator=generator).exp()
        if step % 7 == 3:
            g.view(-1)[0] *= 50
        if (step + i) % 13 == 5:
            g.zero_()
        return None if missing and (step, i) in {(0, 1), (9, 0), (20, 3)} else g.to(dtype)

    return [[draw(step, i, shape) for i, shape in enumerate(shapes)] for step in range(steps)]


def push(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], stream: Iterable[Iterable[Any]]) -> None:
    """Step once with copies of each set of gradients, in the order of ``parameters``."""
    parameters = list(parameters)
    for gradients in stream:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()


def descend(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Take ``steps`` optimizer steps on the gradients of ``loss()``, and return the losses."""
    losses = []
    for _ in range(steps):
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def through_file(value: Any) -> Any:
    """Return ``value`` after torch has saved and loaded it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def differences(left: Any, right: Any, place: str = "") -> list[str]:
    """Return the paths at which two nested states differ in structure, dtype or a bit."""
    if isinstance(left, Tensor):
        same = isinstance(right, Tensor) and left.dtype == right.dtype and left.shape == right.shape
        same = same and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
        return [] if same else [place]
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return [f"{place}: {sorted(map(str, left.keys() ^ right.keys()))}"]
        return [path for key in left for path in differences(left[key], right[key], f"{place}/{key}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return [f"{place}: {len(left)} and {len(right)} items"]
        return [
            path for i, pair in enumerate(zip(left, right, strict=True)) for path in differences(*pair, f"{place}/{i}")
        ]
    return [] if left == right else [f"{place}: {left!r} and {right!r}"]


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Return whether two sequences of tensors are equal to the bit."""
    return not differences([t.detach() for t in left], [t.detach() for t in right])


class Block(nn.Module):
    """A residual block of two linears with dropout between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.rise, self.fall, self.dropout = nn.Linear(64, 96), nn.Linear(96, 64), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + fall(dropout(relu(rise(x))))."""
        y: Tensor = self.fall(self.dropout(self.rise(x).relu()))
        return x + y


class Blocks(nn.Module):
    """Two blocks of width 64, the same weights every time."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks in turn."""
        for block in self.blocks:
            x = block(x)
        return x


Made = tuple[nn.Module, torch.optim.Optimizer]


def assert_resumes(make: Callable[[], Made], stream: Stream, at: int) -> tuple[Made, Made]:
    """Compare a run over ``stream`` with a run that resumes at step ``at`` from a file: they must agree to the bit.

    Returns:
        The model and optimizer of the whole run, and those of the resumed run.
    """
    (model, optimizer), (other, loaded) = whole, resumed = make(), make()
    push(optimizer, model.parameters(), stream[:at])
    weights, state = through_file((model.state_dict(), optimizer.state_dict()))
    other.load_state_dict(weights)
    loaded.load_state_dict(state)
    assert not differences(dict(model.state_dict()), dict(other.state_dict()))
    push(optimizer, model.parameters(), stream[at:])
    push(loaded, other.parameters(), stream[at:])
    assert not differences(dict(model.state_dict()), dict(other.state_dict()))
    assert not differences(optimizer.state_dict()["state"], loaded.state_dict()["state"])
    return whole, resumed
