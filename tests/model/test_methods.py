"""``apply(..., methods=[...])``: methods of a model that are compiled like its call.

``test_uncompiled.py`` compares training by a method with training by the call.
"""

from __future__ import annotations

import copy
import inspect
import types

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.errors import Error, PolicyWarning
from fp4graph.model.runtime import runtime_of
from tests.helpers import training
from tests.helpers.policies import one_rule
from tests.helpers.training import saved_whole

pytestmark = pytest.mark.slow


def tower():
    blocks = (nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
    return nn.Sequential(*blocks)


class Clip(nn.Module):
    """Two towers, as in open_clip; one ends in a product that only a method of the model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = tower(), tower()
        self.projection = nn.Parameter(torch.randn(32, 32) / 6)

    def encode_image(self, image, scale: float = 1.0):
        return self.visual(image) * scale

    def encode_text(self, text):
        return self.text(text) @ self.projection

    def forward(self, image, text):
        return self.encode_image(image) @ self.encode_text(text).mT


X, TEXT = (torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
METHODS = ["encode_image", "encode_text"]
RULE = fp4graph.load_policy("tetrajet").to_data()["rules"][0] | {"match": {"op": "linear"}}
EVERY_LINEAR = fp4graph.load_policy("tetrajet").to_data() | {"name": "all", "rules": [RULE]}


def applied(policy="tetrajet", methods=METHODS, **settings):
    torch.manual_seed(0)
    return training.applied(Clip(), policy, methods=methods, **settings)


@pytest.mark.parametrize("first", ["the call", "the methods"])
def test_methods_and_the_call_have_the_same_sites_and_values(first):
    # The similarity is kept; 8 linears and the projection are quantized.
    model = applied({**EVERY_LINEAR, "expect": {"quantized": 9, "kept": 1}})
    reference = applied(EVERY_LINEAR, methods=())
    with torch.no_grad():
        calls = [lambda: model(X, TEXT), lambda: model.encode_image(X) @ model.encode_text(TEXT).mT]
        for number, call in enumerate(calls if first == "the call" else reversed(calls)):
            assert torch.equal(call(), reference(X, TEXT))
            assert [s.module for s in runtime_of(model).sites if s.quantized].count("") == 1
            assert number or runtime_of(model).capture.graphs == 1
    assert len(runtime_of(model).sites) == 10


def test_methods_follow_copies_phases_removal_and_bypass():
    model = applied({"version": 1, "extends": "tetrajet", "phases": [{"at": 1, "default": "keep", "rules": []}]})
    plain, twin = Clip(), copy.deepcopy(model)
    plain.load_state_dict(model.state_dict(), strict=True)
    exact, quantized = (each.encode_image(X) for each in (plain, twin))
    assert torch.equal(model.encode_image(X), quantized)
    assert not torch.equal(quantized, exact)
    with fp4graph.bypass(model):
        assert torch.equal(model.encode_image(X), exact)
    assert torch.equal(model.encode_image(X), exact)  # the second phase quantizes nothing
    assert runtime_of(twin).count == 1
    assert twin.encode_image.module is twin
    fp4graph.remove(twin)
    assert torch.equal(twin.encode_image(X), exact)
    assert not any(name in twin.__dict__ for name in METHODS)


@pytest.mark.parametrize("detaches", [False, True])
def test_a_method_that_returns_an_object_counts_if_a_tensor_of_the_object_has_gradients(detaches):
    class Encoder(nn.Linear):
        def encode(self, x):
            mean = self(x)
            result = torch.distributions.Normal(mean.detach() if detaches else mean, 1.0, validate_args=False)
            library = types.ModuleType("library")
            library.weight = self.weight  # no part of the result
            result.origin, result.library = result, library
            return result

    model = training.applied(Encoder(32, 32), one_rule(), methods=["encode"])
    model.encode(torch.randn(4, 32))
    with torch.no_grad():
        model.encode(torch.randn(4, 32))
    assert runtime_of(model).count == (0 if detaches else 1)


def test_methods_of_a_model_that_was_saved_whole_refuse_to_run_until_apply():
    model = applied()
    loaded = saved_whole(model)
    with pytest.raises(fp4graph.UncompiledError, match=r"was pickled \(by torch\.save"):
        loaded.encode_image(X)
    training.applied(loaded, "tetrajet", methods=METHODS)
    assert torch.equal(loaded.encode_image(X), model.encode_image(X))


def test_methods_keep_their_signatures_and_run_under_strict_and_in_an_outer_compilation():
    model = applied(strict=True)
    assert list(inspect.signature(model.encode_image).parameters) == ["image", "scale"]
    assert model.encode_image.__name__ == "encode_image"
    y = model.encode_image(X, scale=2.0)
    assert torch.equal(y, 2 * applied().encode_image(X))
    outer = torch.compile(lambda x: model.encode_image(x, scale=2.0) + 1, backend="eager")
    assert torch.equal(outer(X), y + 1)
    explanation = fp4graph.explain(model, "tetrajet", (X, TEXT))
    assert (explanation.quantized, explanation.problem) == (8, None)


def test_beyond_the_limit_a_method_runs_uncompiled():
    model = applied(recompile_limit=1, dynamic=False)
    model.encode_image(X)
    with pytest.warns(PolicyWarning, match=r"encode_image\(\) runs uncompiled"):
        y = model.encode_image(X[:3])
    assert torch.equal(y, applied().encode_image(X[:3]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("encode_imag", "Clip has no method 'encode_imag'; did you mean 'encode_image'?"),
        ("visual", "Clip has no method 'visual'"),
        ("visual.forward", "is a submodule's method"),
        ("forward", "the model's call is compiled anyway"),
        ("eval", "that Clip adds to nn.Module"),
        ("encode_text", "'encode_text' was replaced on this model object"),
    ],
)
def test_names_that_cannot_be_compiled_as_methods_are_refused_at_apply(name, message):
    model = Clip()
    model.encode_text = lambda x: x
    with pytest.raises(Error) as error:
        fp4graph.apply(model, "tetrajet", methods=[name])
    assert message in str(error.value)
    assert runtime_of(model) is None
    with pytest.raises(TypeError, match="a list of names"):
        fp4graph.apply(model, "tetrajet", methods="encode_image")
