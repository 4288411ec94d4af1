"""Frozen weights that lie in memory as FP4 bytes: the same training to the last bit, and what cannot be packed."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4graph
from fp4graph.errors import Error, PolicyError
from fp4graph.model.runtime import runtime_of
from tests.helpers.policies import NVFP4
from tests.model.test_adapters import Lora

TETRAJET = {"element": "e2m1", "block": 32, "scale": {"format": "e8m0", "rounding": "ceil"}}
FROM_FPROP = {
    "backward": {"rounding": "stochastic"},
    "dgrad.weight": {"source": "fprop"},
    "wgrad.input": {"source": "fprop"},
}
SQUARE = {"weights": {"block": [16, 16]}}
X = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))


def policy(quantize, *techniques, **rule):
    given = {"name": "the rule", "match": {"op": "linear"}, "quantize": quantize, **rule}
    return {"version": 1, "name": "p", "rules": [given], "techniques": list(techniques)}


#: Policies whose frozen weights can be packed.
SOUND = {
    "tetrajet": policy(TETRAJET, operands=FROM_FPROP),
    "encode scales": policy(
        {"element": "e2m1", "block": 16, "scale": {"format": "e4m3", "convention": "encode"}}, operands=FROM_FPROP
    ),
    "int4": policy({"element": "int4", "block": 32, "scale": {"format": "bf16"}}, operands=FROM_FPROP),
    "e3m0": policy({"element": "e3m0", "block": 32, "scale": {"format": "ue5m3"}}, operands=FROM_FPROP),
    "square": policy(NVFP4, operands=SQUARE),
    "nvfp4-te": policy(
        NVFP4,
        {"stochastic_rounding": {"operands": ["gradients"]}},
        {"hadamard": {"scope": ["wgrad"], "block": 16, "kind": "random", "resample": "never"}},
        "tensor_scaling",
        operands=SQUARE,
    ),
    "scaled and from fprop": policy(NVFP4, "tensor_scaling", operands=FROM_FPROP),
}


def model():
    torch.manual_seed(0)
    layers = nn.Sequential(Lora(nn.Linear(64, 96)), nn.GELU(), Lora(nn.Linear(96, 64)), nn.GELU(), nn.Linear(64, 32))
    for name, parameter in layers.named_parameters():
        nn.init.normal_(parameter, std=0.1)
        parameter.requires_grad_("lora_" in name)
    return layers


def train(net, steps=2):
    """Return losses, and the gradients of the adapters in the last step."""
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in trainable]


def same(one, other):
    (losses, gradients), (others, more) = one, other
    return losses == others and all(torch.equal(a, b) for a, b in zip(gradients, more, strict=True))


def at_rest(net):
    """Return the bytes of all tensors that a model holds."""
    tensors = [t for t in (*net.parameters(), *net.buffers()) if not t.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


LINEARS = ("0.base_layer", "2.base_layer", "4")


def cases():
    """Return every policy packed before and after its first forward; all but two are for the long run."""
    for name in SOUND:
        for called in (False, True):
            quick = (name, called) in {("tetrajet", True), ("nvfp4-te", False)}
            yield pytest.param(name, called, marks=pytest.mark.slow if quick else pytest.mark.long)


@pytest.mark.parametrize(("name", "called"), list(cases()))
def test_a_packed_model_trains_to_the_same_bits(name, called):
    plain, packed = (fp4graph.apply(model(), SOUND[name], backend="eager") for _ in range(2))
    if called:
        assert same(train(plain), train(packed))
    freed = [weakref.ref(packed.get_submodule(linear).weight) for linear in LINEARS]
    assert fp4graph.pack_frozen(packed) is packed
    gc.collect()
    assert [each() for each in freed] == [None] * 3
    assert not any(
        name.endswith(tuple(f"{linear}.weight" for linear in LINEARS)) for name, _ in packed.named_parameters()
    )
    assert same(train(plain), train(packed))
    assert [(s.module, s.quantized) for s in runtime_of(packed).sites[:3]] == [
        (s.module, s.quantized) for s in runtime_of(plain).sites[:3]
    ]
    with torch.no_grad():
        assert torch.equal(packed.eval()(X), plain.eval()(X))
    assert not any("weight" in packed.get_submodule(linear).__dict__ for linear in LINEARS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [("tetrajet", 4 + 8 / 32), ("nvfp4-te", 4 + 8 / 16)])
def test_the_bytes_at_rest_are_those_of_the_format(name, bits):
    net = fp4graph.apply(model(), SOUND[name], backend="eager")
    before = at_rest(net)
    fp4graph.pack_frozen(net)
    elements = 64 * 96 + 96 * 64 + 64 * 32
    freed = before - at_rest(net)
    # γ, and where it is taken from the largest weight perhaps that with its place
    beside = elements * 4 - elements * bits / 8 - freed
    assert beside in ([0] if name == "tetrajet" else [3 * 4 + 12 * largest for largest in range(4)])
    train(net)
    assert before - at_rest(net) == freed


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_and_autocast(dtype):
    data = SOUND["tetrajet"]
    plain, packed = (fp4graph.apply(model().to(dtype), data, backend="eager") for _ in range(2))
    fp4graph.pack_frozen(packed)
    with torch.no_grad():
        assert torch.equal(packed(X.to(dtype)), plain(X.to(dtype)))
    plain, packed = (fp4graph.apply(model(), data, backend="eager") for _ in range(2))
    with torch.autocast("cpu", dtype):
        fp4graph.pack_frozen(packed)
        assert same(train(plain), train(packed))


@pytest.mark.slow
def test_parts_run_uncompiled_from_bytes_too():
    plain, packed = (fp4graph.apply(model(), SOUND["tetrajet"], backend="eager") for _ in range(2))
    fp4graph.pack_frozen(packed)
    with pytest.warns(fp4graph.PolicyWarning, match="called by itself"):
        y, z = (net[0](X) for net in (plain, packed))
    assert torch.equal(y, z)
    y.sum().backward()
    z.sum().backward()
    a, b = ([p.grad for p in net[0].parameters() if p.grad is not None] for net in (plain, packed))
    assert len(a) == 2
    assert all(torch.equal(*pair) for pair in zip(a, b, strict=True))


@pytest.mark.long
@pytest.mark.inductor
def test_inductor_reads_the_bytes():
    plain, packed = (fp4graph.apply(model(), SOUND["tetrajet"]) for _ in range(2))
    fp4graph.pack_frozen(packed)
    assert same(train(plain), train(packed))


@pytest.mark.slow
def test_a_packed_model_saves_the_values_of_fprop_under_plain_names():
    net = fp4graph.apply(model(), SOUND["tetrajet"], backend="eager")
    weights = {f"{name}.weight": net.get_submodule(name).weight.detach().clone() for name in LINEARS}
    names = fp4graph.strip(net.state_dict()).keys()
    fp4graph.pack_frozen(net)
    train(net)
    saved = io.BytesIO()
    torch.save(net.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    assert fp4graph.strip(loaded).keys() == names
    spec = fp4graph.QuantSpec("e2m1", 32, fp4graph.ScaleSpec("e8m0", "ceil"))
    for name, weight in weights.items():
        assert torch.equal(loaded[name], fp4graph.fake_quantize(weight, spec)), name
    again = model()
    again.load_state_dict(fp4graph.strip(loaded), strict=True)
    fp4graph.apply(again, SOUND["tetrajet"], backend="eager")
    with torch.no_grad():
        assert torch.equal(again.eval()(X), net.eval()(X))
    with pytest.raises(
        Error, match=r"0\.base_layer\.weight is packed and cannot be loaded; call fp4graph\.unpack_frozen"
    ):
        net.load_state_dict(loaded)
    fp4graph.unpack_frozen(net).load_state_dict(loaded)
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in model().named_parameters()]
    fp4graph.pack_frozen(net)


@pytest.mark.slow
def test_packed_models_are_copied_adapted_removed_and_applied_again():
    data = SOUND["tetrajet"]
    plain, packed = (fp4graph.apply(model(), data, backend="eager") for _ in range(2))
    fp4graph.pack_frozen(packed)
    size = at_rest(packed)
    twins = copy.deepcopy(plain), copy.deepcopy(packed)
    assert at_rest(twins[1]) == size
    assert same(*map(train, twins))
    for net in (plain, packed):
        torch.manual_seed(2)
        net[4] = Lora(net[4])
        net[4].base_layer.requires_grad_(False)
    fp4graph.apply(plain, data, backend="eager")
    assert same(train(plain), train(packed))
    assert "weight" not in packed[4].base_layer._parameters  # packed again
    explained = [(site.module, site.quantized) for site in fp4graph.explain(packed, data, (X,)).sites]
    assert explained == [(site.module, site.quantized) for site in fp4graph.explain(plain, data, (X,)).sites]
    fp4graph.remove(packed)
    expected = fp4graph.QuantSpec("e2m1", 32, fp4graph.ScaleSpec("e8m0", "ceil"))
    weight = fp4graph.fake_quantize(plain[4].base_layer.weight.detach(), expected)
    assert torch.equal(packed[4].base_layer.weight, weight)
    fp4graph.apply(packed, data, backend="eager")
    with torch.no_grad():
        assert torch.equal(packed(X), plain(X))


REFUSED = {
    "original": (policy(TETRAJET), {}, r"dgrad quantizes it from the original, along the other axis.*source: fprop"),
    "kept": (policy(TETRAJET, operands={"dgrad": "keep"}), {}, r"dgrad reads the original.*source: fprop"),
    "stochastic dgrad": (policy(TETRAJET, operands={"dgrad": {"rounding": "stochastic"}}), {}, "anew at every step"),
    "stochastic fprop": (
        policy(TETRAJET, operands={**FROM_FPROP, "fprop": {"rounding": "stochastic"}}),
        {},
        r"anew at every forward.*[Rr]ound fprop\.weight to nearest",
    ),
    "rotated": (policy(TETRAJET, "hadamard", operands=FROM_FPROP), {}, r"hadamard transforms it in fprop.*backward"),
    "state": (policy(TETRAJET, "q_ema", operands=FROM_FPROP), {}, "q_ema acts on the weight itself or keeps state"),
    "split": (
        policy(TETRAJET, {"outlier_clamp": {"operands": ["fprop.weight"]}}, operands=FROM_FPROP),
        {},
        "outlier_clamp makes no FP4 of it",
    ),
    "8 bits": (
        policy({**TETRAJET, "element": "e4m3"}, operands=FROM_FPROP),
        {},
        "e4m3 in blocks of 32 does not divide",
    ),
    "one block": (policy({**TETRAJET, "block": "tensor"}, operands=FROM_FPROP), {}, "in blocks of tensor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_named_and_left(name, tmp_path):
    data, _, message = REFUSED[name]
    file = tmp_path / "p.yaml"
    file.write_text(fp4graph.load_policy(data).to_yaml())
    net = fp4graph.apply(model(), file, backend="eager")
    size = at_rest(net)
    with pytest.raises(
        PolicyError, match=rf"(?s)p\.yaml:\d+: rule 'the rule': 0\.base_layer\.weight cannot be .*{message}"
    ):
        fp4graph.pack_frozen(net)
    assert at_rest(net) == size


def test_weights_that_others_read_are_named():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    data = policy(TETRAJET, operands=FROM_FPROP, match={"module": "head", "role": "head"})
    net = fp4graph.apply(Tied().requires_grad_(False), data, backend="eager")
    with pytest.raises(
        PolicyError, match=r"head\.weight cannot be packed: embed\.weight is the same parameter\. Untie"
    ):
        fp4graph.pack_frozen(net)

    attention = nn.MultiheadAttention(64, 2).requires_grad_(False)
    fp4graph.apply(attention, policy(TETRAJET, operands=FROM_FPROP), backend="eager")
    with pytest.raises(PolicyError, match=r"MultiheadAttention may read it outside a call of its own"):
        fp4graph.pack_frozen(attention)
    with pytest.raises(Error, match=r"pack_frozen\(\) takes a model that fp4graph\.apply has prepared"):
        fp4graph.pack_frozen(nn.Linear(64, 64))


@pytest.mark.slow
def test_what_trains_stays_as_it_is():
    net = model().requires_grad_(True)
    fp4graph.apply(net, SOUND["tetrajet"], backend="eager")
    net[4].requires_grad_(False)
    fp4graph.pack_frozen(net)
    assert isinstance(net[0].base_layer.weight, nn.Parameter)
    assert "weight" not in net[4]._parameters
    train(net)
    y = F.linear(torch.eye(64), fp4graph.unpack_frozen(net)[4].weight)
    assert y.shape == (64, 32)
