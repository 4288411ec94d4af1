"""The kinds of forwards: what the table says of each, seen from outside."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.model.forward import DUTIES, Kind
from fp4graph.model.hooks import mark_hooks
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


def run_in_checkpoint(run: Callable[[Tensor], Tensor]) -> Tensor:
    """Run within a checkpoint, with the backward, which runs it again; return the gradient of the input."""
    x = X.clone().requires_grad_()
    checkpoint(lambda x: run(x).sin(), x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    return x.grad


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
        Kind.REPEATED: lambda: run_in_checkpoint(model),
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
        (Kind.REPEATED, [1, 2, 3]),  # by the forward that is repeated
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


@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
def test_a_recomputation_is_not_part_of_the_forward_that_has_begun_since(early: bool) -> None:
    model, runtime = applied()
    assert runtime.root_state is not None
    with set_checkpoint_early_stop(early):
        body, head = (checkpoint(m, X.clone().requires_grad_(), use_reentrant=False) for m in (model.body, model.head))
    model.body(X)
    assert runtime.root_state.count == 1
    (body.sum() + head.sum()).backward()
    model.head(X)
    assert runtime.root_state.count == 1


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


@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize("stance", ["default", "force_eager"])
@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("method", ["__call__", "encode"])
def test_a_checkpoint_around_a_model_repeats_the_noise_of_its_calls(method: str, early: bool, stance: str) -> None:
    (model, runtime), (plain, other) = applied(), applied()

    def twice(model: Model) -> Callable[[Tensor], Tensor]:
        call = getattr(model, method)
        return lambda x: call(call(x) * 2)

    for _ in range(3):
        x = X.clone().requires_grad_()
        with torch.compiler.set_stance(stance):
            twice(plain)(x).sin().sum().backward()
            with set_checkpoint_early_stop(early):
                assert torch.equal(run_in_checkpoint(twice(model)), x.grad)
        assert runtime.count == other.count
    assert model.head.weight.grad is not None
    assert torch.equal(model.head.weight.grad, plain.head.weight.grad)


class Streaming(Model):
    def encode(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        for _ in range(2):
            x = self.head(x)
            yield x


def test_a_method_that_yields_counts() -> None:
    model = fp4graph.apply(Streaming(nn.Linear(32, 32)), one_rule(), backend="eager", methods=["encode"])
    runtime = runtime_of(model)
    assert runtime is not None
    assert list(counts(runtime, lambda: list(model.encode(X)))) == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
def test_a_part_that_raises_is_no_forward() -> None:
    model, runtime = applied()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.body(X[:, 1:])
        assert runtime.count == 0
    model.body(X)
    assert runtime.count == 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.head(X[:, 1:])
    assert runtime.count == 1


@pytest.mark.filterwarnings("error")
def test_threads_may_evaluate_one_model_at_the_same_time() -> None:
    model, _ = applied()
    model.eval()
    with torch.no_grad():
        expected = model(X)

    def evaluate(_: int) -> bool:
        with torch.no_grad():
            return torch.equal(model(X), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(evaluate, range(100)))


@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
def test_removing_a_model_leaves_modules_that_another_has_taken_over() -> None:
    former, _ = applied()
    former(X)
    model = fp4graph.apply(nn.Sequential(former.body, nn.Linear(32, 8)), one_rule(), backend="eager")
    expected = copy.deepcopy(model)
    assert torch.equal(model(X), expected(X))
    fp4graph.remove(former)
    assert torch.equal(model(X), expected(X))
    assert torch.equal(model[0](X), expected[0](X))
    assert isinstance(former.head(X).grad_fn, type(nn.Linear(32, 32)(X).grad_fn))  # in high precision
    fp4graph.remove(model)
    assert not [hook for each in (former, model) for hook in mark_hooks(each)]


def test_a_model_takes_its_modules_back_when_another_is_removed() -> None:
    (former, runtime), (plain, _) = applied(), applied()
    other = fp4graph.apply(nn.Sequential(former.body, nn.Linear(32, 8)), one_rule(), backend="eager")
    fp4graph.remove(other)
    assert torch.equal(former(X), plain(X))
    assert runtime_of(former) is not runtime


class Distilled(nn.Module):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher, self.layer = [teacher], nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher[0](x)
        return self.layer(x) - target  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_a_part_that_runs_uncompiled_calls_another_applied_model(stance: str) -> None:
    (teacher, runtime), (plain, _) = applied(), applied()
    student = fp4graph.apply(nn.Sequential(Distilled(teacher), nn.GELU()), one_rule(), backend="eager")
    with torch.compiler.set_stance(stance):
        y = student[0](X)
    with torch.no_grad():
        target = plain(X)
    assert torch.equal(y, copy.deepcopy(student)[0].layer(X) - target)
    assert {site.module for site in runtime.sites} == {"body", "head"}
