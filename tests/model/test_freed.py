"""An applied model is freed when its user drops it, whatever was done with it before; memory stays flat."""

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
from tests.helpers.long import LONG
from tests.helpers.models import Mlp
from tests.helpers.policies import one_rule
from tests.helpers.training import prepared

POLICY = one_rule()
X = torch.ones(4, 32)


def train(model, x=X):
    model(x).sum().backward()


def applied(model, backend, policy=POLICY, **options):
    return fp4graph.apply(model, policy, backend=backend, **options)


def trained(model, backend, **options):
    train(applied(model, backend, **options))
    return model


def reapplied(model, backend):
    # By type(): isinstance() asks a weak proxy for the class of its referent, which may be gone.
    before = [each for each in gc.get_objects() if type(each) is Runtime]  # of other tests
    for _ in range(9):
        applied(model, backend)(X)
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is Runtime and each not in before]
    assert alive == [runtime_of(model)]


def in_phases(model, backend):
    train(trained(model, backend, policy=one_rule(phases=[{"at": 1, "rules": POLICY["rules"]}])))


def by_methods(model, backend):
    applied(model, backend, methods=["encode"]).encode(X).sum().backward()
    train(model)


def fails(model, *inputs):
    for x in inputs:
        with contextlib.suppress(Exception):
            model(x)


def refused(model, backend):
    fails(applied(model, backend, one_rule(match={"in_features": 12345})), X)


def explained(model, backend):
    fp4graph.explain(model, POLICY, (X,))
    applied(model, backend, example_inputs=X)


def with_state(model, backend):
    optimizer = prepared(applied(model, backend, one_rule({"q_ema": {"beta": 0.9}})))
    for _ in range(2):
        train(model)
        optimizer.step()


def watched(model, backend):
    with fp4graph.detect_nonfinite(trained(model, backend)):
        train(model)


def around_a_break(model, backend):
    model.activation = lambda x: torch._dynamo.graph_break() or x.relu()
    trained(model, backend)


def checkpointed(model, backend):
    first = model.first
    model.activation = lambda x: checkpoint(first, x, use_reentrant=False)
    trained(model, backend)


FURTHER = ("reapplied", "copied", "in phases", "by methods", "refused", "explained", "recompiled", "watched")
#: What is done with a model before its user drops it.
WAYS = {
    "removed": lambda *args: fp4graph.remove(trained(*args)),
    "by parts": lambda *args: train(applied(*args).first),
    "failed": lambda *args: fails(applied(*args), "text", torch.ones(3, 7)),
    "with state": with_state,
    "around a break": around_a_break,
    "checkpointed": checkpointed,
    "reapplied": reapplied,
    "copied": lambda *args: train(copy.deepcopy(trained(*args))),
    "in phases": in_phases,
    "by methods": by_methods,
    "refused": refused,
    "explained": explained,
    "recompiled": lambda *args: train(trained(*args), X[None]),
    "watched": watched,
}


class Encoder(Mlp):
    def encode(self, x):
        return self.first(x)


CASES = [
    *(pytest.param(way, "eager", marks=pytest.mark.long) for way in FURTHER),
    *(pytest.param(way, "eager", marks=LONG) for way in ("removed", "by parts", "around a break")),
    *((way, "eager") for way in ("failed", "with state", "checkpointed")),
    *(pytest.param(way, "aot_eager", marks=pytest.mark.long) for way in WAYS),
    ("with state", "inductor"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs uncompiled", "ignore:.*was called by itself")
@pytest.mark.parametrize(("way", "backend"), CASES)
def test_a_model_is_freed(way, backend):
    model = Encoder(32, 32, 32)
    WAYS[way](model, backend)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


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
    """A model has 8 MB of weights and 8 MB of gradients. Dynamo keeps 0.3 to 0.8 MB of each compilation, by finalizers
    on torch's own functions. What the allocator holds varies by a model or two. With glibc's defaults freed weights
    fragment its heap, by 3 MB a model on some machines; with fixed thresholds it returns them."""
    thresholds = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    alive, grown = processes.run([sys.executable, "-c", PROGRAM, backend, str(MODELS)], env=thresholds).split()
    assert int(alive) == 0
    assert float(grown) < 32 + MODELS
