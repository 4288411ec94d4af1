"""An applied model is freed when its user lets go of it, whatever was done with it; memory stays flat."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fp4graph
from fp4graph.model.runtime import Runtime, runtime_of
from tests.helpers import processes
from tests.helpers.models import Mlp
from tests.helpers.policies import MXFP4, one_rule

POLICY = one_rule()
X = torch.ones(4, 32)


def train(model, x=X):
    model(x).sum().backward()


def reapplied(model, backend):
    # By type: isinstance asks a weak proxy of another package for its class, and what it stands for may be gone.
    before = [each for each in gc.get_objects() if type(each) is Runtime]  # of other tests
    for _ in range(9):
        fp4graph.apply(model, POLICY, backend=backend)
        model(X)
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is Runtime and each not in before]
    assert alive == [runtime_of(model)]


def removed(model, backend):
    train(fp4graph.apply(model, POLICY, backend=backend))
    fp4graph.remove(model)


def copied(model, backend):
    train(fp4graph.apply(model, POLICY, backend=backend))
    train(copy.deepcopy(model))


def in_phases(model, backend):
    fp4graph.apply(model, one_rule(phases=[{"at": 1, "rules": POLICY["rules"]}]), backend=backend)
    for _ in range(2):
        train(model)


def by_methods(model, backend):
    fp4graph.apply(model, POLICY, backend=backend, methods=["encode"]).encode(X).sum().backward()
    train(model)


def by_parts(model, backend):
    train(fp4graph.apply(model, POLICY, backend=backend).first)


def failed(model, backend):
    fp4graph.apply(model, POLICY, backend=backend)
    for wrong in ("text", torch.ones(3, 7)):
        with contextlib.suppress(Exception):
            model(wrong)


def refused(model, backend):
    rules = [{"name": "wide", "match": {"in_features": 12345}, "quantize": MXFP4}]
    fp4graph.apply(model, {"version": 1, "name": "p", "rules": rules}, backend=backend)
    with contextlib.suppress(fp4graph.PolicyError):
        model(X)


def explained(model, backend):
    fp4graph.explain(model, POLICY, (X,))
    fp4graph.apply(model, POLICY, backend=backend, example_inputs=X)


def with_state(model, backend):
    fp4graph.apply(model, one_rule({"q_ema": {"beta": 0.9}}), backend=backend)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        train(model)
        optimizer.step()


def recompiled(model, backend):
    fp4graph.apply(model, POLICY, backend=backend)
    train(model)
    train(model, X[None])


def watched(model, backend):
    train(fp4graph.apply(model, POLICY, backend=backend))
    with fp4graph.detect_nonfinite(model):
        train(model)


def around_a_break(model, backend):
    model.activation = lambda x: torch._dynamo.graph_break() or x.relu()
    train(fp4graph.apply(model, POLICY, backend=backend))


def checkpointed(model, backend):
    first = model.first
    model.activation = lambda x: checkpoint(first, x, use_reentrant=False)
    train(fp4graph.apply(model, POLICY, backend=backend))


FURTHER = [reapplied, copied, in_phases, by_methods, refused, explained, recompiled, watched]
WAYS = [
    removed, by_parts, failed, with_state, around_a_break, checkpointed,
    *(pytest.param(way, marks=pytest.mark.long) for way in FURTHER),
]  # fmt: skip


class Encoder(Mlp):
    def encode(self, x):
        return self.first(x)


def freed(way, backend):
    model = Encoder(32, 32, 32)
    way(model, backend)
    reference = weakref.ref(model)
    del model
    gc.collect()
    return reference() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs uncompiled", "ignore:.*was called by itself")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_a_model_is_freed(way, backend):
    assert freed(way, backend)


@pytest.mark.inductor
def test_a_model_is_freed_under_inductor():
    assert freed(with_state, "inductor")


MODELS = 50
PROGRAM = f"""
import gc, sys, weakref
import torch
import fp4graph

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

sizes, models = [], []
for _ in range(int(sys.argv[2])):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    fp4graph.apply(model, {POLICY!r}, backend=sys.argv[1])
    model(torch.randn(4, 1024)).sum().backward()
    models.append(weakref.ref(model))
    del model
    gc.collect()
    sizes.append(resident())
print(sum(model() is not None for model in models), sizes[-1] - sizes[4])
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_memory_stays_flat(backend):
    """A model has 8 MB of weights and 8 MB of gradients; what Dynamo keeps of a compilation, by finalizers on torch's
    own functions, is 0.3 to 0.8 MB. The allocator moves by a model or two. With glibc's defaults freed weights fragment
    its heap, by 3 MB a model on some machines; with fixed thresholds it returns them."""
    thresholds = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    alive, grown = processes.run([sys.executable, "-c", PROGRAM, backend, str(MODELS)], env=thresholds).split()
    assert int(alive) == 0
    assert float(grown) < 32 + MODELS
