"""The kinds of forwards: what the table says of each, seen from outside."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.model.forward import DUTIES, Kind
from fp4graph.model.runtime import Runtime, runtime_of
from tests.helpers.policies import one_rule

pytestmark = pytest.mark.slow


class Looping(nn.Module):
    """A module whose loop over the values of a tensor, with a weight of its own, is in no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        for index in (x[:, 0] > 0).nonzero():
            x = x + F.linear(x, self.weight) * float(index)
        return x


class Model(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(32, 32)

    def encode(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


X = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


def applied(body: nn.Module | None = None) -> tuple[Model, Runtime]:
    torch.manual_seed(0)
    model = Model(body or nn.Linear(32, 32))
    fp4graph.apply(model, one_rule(), backend="eager", methods=["encode"])
    runtime = runtime_of(model)
    assert runtime is not None
    return model, runtime


def counts(runtime: Runtime, run: Callable[[], object]) -> Iterator[int]:
    """Yield the count of finished forwards after each of three runs."""
    for _ in range(3):
        run()
        assert runtime.root_state is not None
        yield runtime.root_state.count


def run_of(kind: Kind, model: Model) -> Callable[[], Tensor]:
    def recomputed() -> Tensor:
        y: Tensor = checkpoint(model.body, X.clone().requires_grad_(), use_reentrant=False)
        y.sum().backward()
        return y

    def part() -> Tensor:
        return model.body(X)  # type: ignore[no-any-return]

    runs: dict[Kind, Callable[[], Tensor]] = {
        Kind.CALL: lambda: model(X),
        Kind.METHOD: lambda: model.encode(X),
        Kind.PART: part,
        Kind.RECOMPUTED: recomputed,
        Kind.UNCAPTURED: lambda: model(X),
    }
    return runs[kind]


def test_the_table_has_a_row_for_each_kind() -> None:
    assert set(DUTIES) == set(Kind)


@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Kind.CALL, [1, 2, 3]),
        (Kind.METHOD, [1, 2, 3]),
        (Kind.PART, [0, 1, 2]),  # a forward of parts is over when a part runs again
        (Kind.RECOMPUTED, [0, 1, 2]),  # the forwards of the part count, not their recomputations
        (Kind.UNCAPTURED, [1, 2, 3]),  # the call that runs it counts, once
    ],
    ids=str,
)
def test_which_forwards_count(kind: Kind, expected: list[int]) -> None:
    model, runtime = applied(Looping() if kind is Kind.UNCAPTURED else None)
    assert list(counts(runtime, run_of(kind, model))) == expected


@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize("kind", [Kind.CALL, Kind.METHOD, Kind.PART], ids=str)
def test_no_forward_counts_without_gradients(kind: Kind) -> None:
    model, runtime = applied()
    with torch.no_grad():
        assert list(counts(runtime, run_of(kind, model))) == [0, 0, 0]


def test_a_method_whose_result_has_no_gradients_does_not_count() -> None:
    model, runtime = applied()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert list(counts(runtime, lambda: model.encode(X))) == [0, 0, 0]
    assert list(counts(runtime, lambda: model(X))) == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
def test_a_recomputation_has_the_step_of_its_forward() -> None:
    model, runtime = applied()
    seen: list[Tensor] = []
    model.body.register_forward_pre_hook(lambda *_: seen.append(runtime.step.clone()))
    first = checkpoint(model.body, X.clone().requires_grad_(), use_reentrant=False)
    checkpoint(model.body, X.clone().requires_grad_(), use_reentrant=False)
    first.sum().backward()
    forward, other, again = seen
    assert not torch.equal(forward, other)
    assert torch.equal(again, forward)


@pytest.mark.parametrize("kind", list(Kind), ids=str)
def test_which_forwards_warn_that_they_run_uncompiled(kind: Kind) -> None:
    model, _ = applied(Looping() if kind is Kind.UNCAPTURED else None)
    run = run_of(kind, model)
    told = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        told.append([w.category for w in caught if "runs uncompiled" in str(w.message)])
    once = kind in (Kind.PART, Kind.RECOMPUTED, Kind.UNCAPTURED)  # a recomputation by its forward, which is a part's
    assert told == [[PolicyWarning] if once else [], [], []]
