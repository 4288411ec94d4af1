"""``apply(..., methods=[...])``: methods of a model that are compiled like its call."""

from __future__ import annotations

import copy
import inspect
import io
import warnings

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.errors import Error, PolicyWarning
from fp4graph.model.runtime import runtime_of

pytestmark = pytest.mark.slow


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Clip(nn.Module):
    """Two towers, as open_clip has them; one ends in a product that is in no module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = Tower(), Tower()
        self.projection = nn.Parameter(torch.randn(32, 32) / 6)

    def encode_image(self, image, scale: float = 1.0):
        return self.visual(image) * scale

    def encode_text(self, text):
        return self.text(text) @ self.projection

    def encode_both(self, x):
        return self(x, x)

    def forward(self, image, text):
        return self.encode_image(image) @ self.encode_text(text).mT


X = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
TEXT = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
METHODS = ["encode_image", "encode_text"]
EVERY_LINEAR = {
    **fp4graph.load_policy("tetrajet").to_data(),
    "name": "all",
    "rules": [{**fp4graph.load_policy("tetrajet").to_data()["rules"][0], "match": {"op": "linear"}}],
}


def applied(policy="tetrajet", methods=METHODS, **settings):
    torch.manual_seed(0)
    return fp4graph.apply(Clip(), policy, methods=methods, **{"backend": "eager", **settings})


def gradients(model, y):
    model.zero_grad()
    y.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PolicyWarning)
        yield


@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema", "mxfp4-full-rht"])
@pytest.mark.usefixtures("no_warnings")
def test_a_method_computes_what_the_uncompiled_path_computes(policy):
    for name, x in (("encode_image", X), ("encode_text", TEXT)):
        compiled, other = applied(policy), applied(policy, methods=())
        y = getattr(compiled, name)(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PolicyWarning)
            expected = getattr(other, name)(x)
        assert torch.equal(y, expected)
        same(gradients(compiled, y), gradients(other, expected))
        assert runtime_of(compiled).capture.graphs == 1
        assert runtime_of(compiled).count == runtime_of(other).count == 1


@pytest.mark.usefixtures("no_warnings")
def test_the_body_of_a_method_is_quantized_as_in_the_models_call():
    model, reference = applied(EVERY_LINEAR), applied(EVERY_LINEAR, methods=())
    with torch.no_grad():
        images, texts = model.encode_image(X), model.encode_text(TEXT)
        assert [s.module for s in runtime_of(model).sites if s.quantized].count("") == 1
        assert torch.equal(images @ texts.mT, reference(X, TEXT))


def test_towers_that_are_called_alone_are_the_same_as_the_methods():
    model = applied()
    with torch.no_grad(), pytest.warns(PolicyWarning, match="'visual' was called by itself"):
        assert torch.equal(model.encode_image(X), model.visual(X))


@pytest.mark.usefixtures("no_warnings")
def test_every_call_of_a_method_counts_and_draws_new_noise():
    model = applied()
    counts = []
    found = []
    for _ in range(2):
        for call in (lambda: model.encode_image(X), lambda: model.encode_text(TEXT), lambda: model(X, TEXT)):
            found.append(gradients(model, call()))
            counts.append(runtime_of(model).count)
    assert counts == [1, 2, 3, 4, 5, 6]
    assert not torch.equal(found[0]["visual.blocks.0.1.weight"], found[3]["visual.blocks.0.1.weight"])
    with torch.no_grad():
        model.encode_image(X)
    assert runtime_of(model).count == 6
    again = applied()
    same(gradients(again, again.encode_image(X)), found[0])


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("first", [(), METHODS], ids=["call first", "methods first"])
def test_coverage_counts_the_sites_of_methods_as_the_models_own(first):
    data = {**EVERY_LINEAR, "expect": {"quantized": 9, "kept": 1}}  # 8 linears and the projection; the similarity
    model = applied(data)
    for name in first:
        getattr(model, name)(X)
    model(X, TEXT)
    for name in METHODS:
        getattr(model, name)(X)
    assert len(runtime_of(model).sites) == 10


def test_training_by_methods_alone_warns_of_a_rule_that_they_do_not_meet():
    model = applied(EVERY_LINEAR, methods=["encode_image"])
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            model.encode_image(X)
    rule = {**EVERY_LINEAR["rules"][0], "name": "text", "match": {"module": "text.*"}}
    model = applied({**EVERY_LINEAR, "rules": [rule, *EVERY_LINEAR["rules"]]}, methods=["encode_image"])
    model.encode_image(X)
    with pytest.warns(PolicyWarning, match="methods of the model .*rule 'text' matches no site"):
        model.encode_image(X)
    with warnings.catch_warnings(action="error"):
        model.encode_image(X)


@pytest.mark.usefixtures("no_warnings")
def test_a_method_that_calls_the_model_is_one_graph():
    model, reference = applied(methods=["encode_both"]), applied()
    y = model.encode_both(X)
    expected = reference(X, X)
    assert torch.equal(y, expected)
    same(gradients(model, y), gradients(reference, expected))
    assert runtime_of(model).capture.graphs == 1
    assert torch.equal(model(X, X).detach(), y.detach())  # fprop draws no noise


@pytest.mark.usefixtures("no_warnings")
def test_copies_phases_removal_and_bypass():
    phased = {"version": 1, "extends": "tetrajet", "phases": [{"at": 1, "default": "keep", "rules": []}]}
    model = applied(phased)
    plain = Clip()
    plain.load_state_dict(model.state_dict(), strict=True)
    twin = copy.deepcopy(model)
    quantized = twin.encode_image(X)
    assert torch.equal(model.encode_image(X), quantized)
    assert not torch.equal(quantized, plain.encode_image(X))
    with fp4graph.bypass(model):
        assert torch.equal(model.encode_image(X), plain.encode_image(X))
    assert torch.equal(model.encode_image(X), plain.encode_image(X))  # the second phase quantizes nothing
    assert runtime_of(twin).count == 1
    assert twin.encode_image.module is twin
    fp4graph.remove(twin)
    assert torch.equal(twin.encode_image(X), plain.encode_image(X))
    assert not any(name in twin.__dict__ for name in METHODS)


def test_what_is_saved_whole_has_its_methods_refuse_until_it_is_applied():
    model = applied()
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    with pytest.raises(fp4graph.UncompiledError, match=r"was pickled \(by torch\.save"):
        loaded.encode_image(X)
    fp4graph.apply(loaded, "tetrajet", backend="eager", methods=METHODS)
    assert torch.equal(loaded.encode_image(X), model.encode_image(X))


@pytest.mark.usefixtures("no_warnings")
def test_signatures_stay_and_strict_and_outer_compilation_work():
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
        ("visual.forward", "is one of a submodule"),
        ("forward", "the model's call is compiled anyway"),
        ("eval", "that Clip adds to nn.Module"),
    ],
)
def test_names_that_are_no_methods_are_refused_at_apply(name, message):
    model = Clip()
    with pytest.raises(Error) as error:
        fp4graph.apply(model, "tetrajet", methods=[name])
    assert message in str(error.value)
    assert runtime_of(model) is None
    with pytest.raises(TypeError, match="a list of names"):
        fp4graph.apply(model, "tetrajet", methods="encode_image")


def test_a_method_without_gradients_is_no_training_forward():
    class Encoder(Clip):
        @torch.no_grad()
        def encode(self, x):
            return self.encode_image(x)

    model = fp4graph.apply(Encoder(), "tetrajet", backend="eager", methods=["encode"])
    model.encode(X)
    assert runtime_of(model).count == 0


def test_a_method_that_was_replaced_on_the_model_is_refused():
    model = Clip()
    model.encode_image = lambda x: x
    with pytest.raises(fp4graph.Error, match="'encode_image' was replaced on this model itself"):
        fp4graph.apply(model, "tetrajet", backend="eager", methods=["encode_image"])
