"""The kinds of forwards behave as the table DUTIES says: their counts, steps and warnings."""

from __future__ import annotations

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.model.forward import Kind
from fp4graph.model.hooks import mark_hooks
from fp4graph.model.runtime import runtime_of
from tests.helpers import training
from tests.helpers.breaks import Looping
from tests.helpers.models import module_of
from tests.helpers.policies import one_rule
from tests.helpers.training import stances, uncompiled

pytestmark = pytest.mark.slow


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(32, 32)

    def encode(self, x):
        return self.head(x)

    def forward(self, x):
        return self.head(self.body(x))


X = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


def applied(body=None, policy=None, kind=Model):
    torch.manual_seed(0)
    model = training.applied(kind(body or nn.Linear(32, 32)), policy or one_rule(), methods=["encode"])
    return model, runtime_of(model)


def counts(runtime, run):
    """Yield the count of finished forwards after each of three runs."""
    for _ in range(3):
        run()
        yield runtime.root_state.count


def run_in_checkpoint(run, reentrant=False):
    """Run within a checkpoint, which runs again in the backward; return the gradient of the input."""
    x = X.clone().requires_grad_()
    checkpoint(lambda x: run(x).sin(), x, use_reentrant=reentrant).sum().backward()
    return x.grad


RUNS = {
    Kind.CALL: lambda model: model(X),
    Kind.METHOD: lambda model: model.encode(X),
    Kind.REPEATED: run_in_checkpoint,
    Kind.PART: lambda model: model.body(X),
    Kind.RECOMPUTED: lambda model: run_in_checkpoint(model.body),
    Kind.UNCAPTURED: lambda model: model(X),
}


@uncompiled
@pytest.mark.parametrize("kind", list(Kind), ids=str)
def test_which_forwards_count_and_warn_that_they_run_uncompiled(kind):
    """A repetition does not count beside the call that it repeats, nor an uncaptured module beside its model's call. A
    forward of parts is over when a part runs again; recomputations of parts do not count."""
    if kind in (Kind.CALL, Kind.METHOD, Kind.PART):
        model, runtime = applied()
        with torch.no_grad():
            assert list(counts(runtime, partial(RUNS[kind], model))) == [0, 0, 0]
    model, runtime = applied(Looping() if kind is Kind.UNCAPTURED else None)
    told = []

    def run():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            RUNS[kind](model)
        told.append([w.category for w in caught if "runs uncompiled" in str(w.message)])

    of_parts = kind in (Kind.PART, Kind.RECOMPUTED)
    assert list(counts(runtime, run)) == ([0, 1, 2] if of_parts else [1, 2, 3])
    assert told == [[PolicyWarning] if of_parts or kind is Kind.UNCAPTURED else [], [], []]


def test_a_method_whose_result_has_no_gradients_does_not_count():
    model, runtime = applied()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert list(counts(runtime, lambda: model.encode(X))) == [0, 0, 0]
    assert list(counts(runtime, lambda: model(X))) == [1, 2, 3]


@uncompiled
def test_a_call_ends_a_forward_of_parts():
    model, runtime = applied()
    for _ in range(3):
        model.head(model.body(X)).mean().backward()
    assert (runtime.root_state.count, runtime.count) == (2, 3)  # the third has begun and is not over
    assert runtime_of(copy.deepcopy(model)).count == 3
    model(X)
    assert runtime.root_state.count == 4
    with torch.no_grad():
        model.body(X)
    assert runtime.root_state.count == 4


@uncompiled
@pytest.mark.parametrize(("kind", "met", "unmet"), [(Kind.PART, "body", "head"), (Kind.METHOD, "head", "body")])
def test_training_without_the_call_warns_of_a_rule_that_matches_no_site_that_ran(kind, met, unmet):
    policy = one_rule(match={"module": met})
    model, _ = applied(policy=policy)
    for _ in range(3):
        RUNS[kind](model)
    other = {**policy["rules"][0], "name": "other", "match": {"module": unmet}}
    model, _ = applied(policy={**policy, "rules": [other, *policy["rules"]]})
    RUNS[kind](model)
    with pytest.warns(PolicyWarning, match="called only parts or methods of the model, but .*rule 'other' matches no"):
        RUNS[kind](model)
    RUNS[kind](model)


EARLY = pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])


def checkpointed(*modules):
    return [checkpoint(module, X.clone().requires_grad_(), use_reentrant=False) for module in modules]


@uncompiled
def test_a_recomputation_has_the_step_of_its_forward():
    model, runtime = applied()
    seen = []
    model.body.register_forward_pre_hook(lambda *_: seen.append(runtime.step.clone()))
    checkpointed(model.body, model.body)[0].sum().backward()
    forward, other, again = seen
    assert not torch.equal(forward, other)
    assert torch.equal(again, forward)


@uncompiled
@EARLY
def test_a_recomputation_is_not_part_of_the_forward_that_has_begun_since(early):
    model, runtime = applied()
    with set_checkpoint_early_stop(early):
        body, head = checkpointed(model.body, model.head)
    model.body(X)
    assert runtime.root_state.count == 1
    (body.sum() + head.sum()).backward()
    model.head(X)
    assert runtime.root_state.count == 1


@uncompiled
@stances
@pytest.mark.parametrize("early", [True, False, None], ids=["early stop", "to the end", "reentrant"])
@pytest.mark.parametrize("method", ["__call__", "encode"])
def test_a_checkpoint_around_a_model_repeats_the_noise_of_its_calls(method, early, stance):
    (model, runtime), (plain, other) = applied(), applied()

    def twice(model):
        call = getattr(model, method)
        return lambda x: call(call(x) * 2)

    for _ in range(3):
        x = X.clone().requires_grad_()
        with torch.compiler.set_stance(stance):
            twice(plain)(x).sin().sum().backward()
            with set_checkpoint_early_stop(early is not False):
                assert torch.equal(run_in_checkpoint(twice(model), reentrant=early is None), x.grad)
        assert runtime.count == other.count
    assert torch.equal(model.head.weight.grad, plain.head.weight.grad)


def test_a_method_that_yields_counts():
    class Streaming(Model):
        def encode(self, x):
            for _ in range(2):
                yield self.head(x)

    model, runtime = applied(kind=Streaming)
    assert list(counts(runtime, lambda: list(model.encode(X)))) == [1, 2, 3]


@uncompiled
def test_a_part_that_raises_does_not_count_as_a_forward():
    model, runtime = applied()
    for part, count in ((model.body, 0), (model.body, 0), (model.head, 1)):
        if count:
            model.body(X)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            part(X[:, 1:])
        assert runtime.count == count


@pytest.mark.filterwarnings("error")
def test_threads_may_evaluate_one_model_at_the_same_time():
    model, _ = applied()
    model.eval()
    with torch.no_grad():
        expected = model(X)

    def evaluate(_):
        with torch.no_grad():
            return torch.equal(model(X), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(evaluate, range(100)))


class InAnotherThread(nn.Module):
    """Runs ``call`` in another thread, in the middle of a forward, and stores the error."""

    call = error = None

    @torch.compiler.disable
    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            self.error = pool.submit(self.call).exception()
        return x


@uncompiled
@stances
def test_a_second_thread_in_the_middle_of_a_forward_is_refused(stance):
    other = InAnotherThread()
    model, _ = applied(nn.Sequential(nn.Linear(32, 32), other))
    other.call = partial(model, X) if stance == "default" else partial(model.head, X)
    with torch.compiler.set_stance(stance):
        model(X)
    assert isinstance(other.error, fp4graph.Error)
    assert "threads" in str(other.error)


@uncompiled
def test_removing_a_model_leaves_modules_that_another_model_has_taken_over():
    former, _ = applied()
    former(X)
    model = training.applied(nn.Sequential(former.body, nn.Linear(32, 8)), one_rule())
    expected = copy.deepcopy(model)
    assert torch.equal(model(X), expected(X))
    fp4graph.remove(former)
    assert torch.equal(model(X), expected(X))
    assert torch.equal(model[0](X), expected[0](X))
    assert isinstance(former.head(X).grad_fn, type(nn.Linear(32, 32)(X).grad_fn))  # in high precision
    fp4graph.remove(model)
    assert not [hook for each in (former, model) for hook in mark_hooks(each)]


def test_a_model_takes_its_modules_back_when_another_is_removed():
    (former, runtime), (plain, _) = applied(), applied()
    fp4graph.remove(training.applied(nn.Sequential(former.body, nn.Linear(32, 8)), one_rule()))
    assert torch.equal(former(X), plain(X))
    assert runtime_of(former) is not runtime


@uncompiled
@stances
def test_a_part_that_runs_uncompiled_calls_another_applied_model(stance):
    (teacher, runtime), (plain, _) = applied(), applied()

    def forward(self, x):
        with torch.no_grad():
            target = teacher(x)
        return self.layer(x) - target

    distilled = module_of(forward, layer=nn.Linear(32, 32))
    student = training.applied(nn.Sequential(distilled, nn.GELU()), one_rule())
    with torch.compiler.set_stance(stance):
        y = student[0](X)
    assert torch.equal(y, copy.deepcopy(student)[0].layer(X) - plain(X))
    assert {site.module for site in runtime.sites} == {"body", "head"}
