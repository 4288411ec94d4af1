"""Frozen weights that lie in memory as FP4 bytes: the same training to the last bit, and what cannot be packed."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch
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


def values_of(weight):
    """Return the values of MXFP4, by the definition: blocks of 32 along a row share the smallest power of two that
    brings them into the range of E2M1, and each takes the nearest value, one of two equally near with an even code."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = weight.double().numpy().reshape(-1, 32)
    scales = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(1, keepdims=True) / 6))
    distances = np.abs(np.abs(blocks / scales)[..., None] - grid)
    nearest = distances == distances.min(-1, keepdims=True)
    code = np.where(nearest.sum(-1) == 1, nearest.argmax(-1), (nearest * (np.arange(8) % 2 == 0)).argmax(-1))
    return torch.from_numpy(np.copysign(grid[code] * scales, blocks).reshape(weight.shape)).to(weight.dtype)


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
    assert not any(isinstance(packed.get_submodule(linear).weight, torch.Tensor) for linear in LINEARS)


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


#: Policies whose frozen weights cannot be packed, with the reason that is given.
REFUSED = {
    "original": (policy(TETRAJET), r"dgrad quantizes it from the original, along the other axis.*source: fprop"),
    "kept": (policy(TETRAJET, operands={"dgrad": "keep"}), r"dgrad reads the original.*source: fprop"),
    "stochastic dgrad": (policy(TETRAJET, operands={"dgrad": {"rounding": "stochastic"}}), "original stochastically"),
    "stochastic fprop": (
        policy(TETRAJET, operands={**FROM_FPROP, "fprop": {"rounding": "stochastic"}}),
        r"stochastically at every forward.*[Rr]ound fprop\.weight to nearest",
    ),
    "rotated": (policy(TETRAJET, "hadamard", operands=FROM_FPROP), r"hadamard transforms it in fprop.*backward"),
    "state": (policy(TETRAJET, "q_ema", operands=FROM_FPROP), "q_ema changes the weight itself or keeps state"),
    "split": (
        policy(TETRAJET, {"outlier_clamp": {"operands": ["fprop.weight"]}}, operands=FROM_FPROP),
        "outlier_clamp gives it values that are not FP4",
    ),
    "8 bits": (policy({**TETRAJET, "element": "e4m3"}, operands=FROM_FPROP), "bytes of e4m3 in blocks of 32"),
    "one block": (policy({**TETRAJET, "block": "tensor"}, operands=FROM_FPROP), "in blocks of tensor"),
    "two elements": (
        policy({"element": ["e2m1", "int4"], "block": 16, "scale": {"format": "e4m3"}}, operands=FROM_FPROP),
        r"each of its blocks chooses one of the elements e2m1, int4.*with one element",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_named_and_left(name, tmp_path):
    data, message = REFUSED[name]
    file = tmp_path / "p.yaml"
    file.write_text(fp4graph.load_policy(data).to_yaml())
    net = fp4graph.apply(model(), file, backend="eager")
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(
        PolicyError, match=rf"(?s)p\.yaml:\d+: rule 'the rule': 0\.base_layer\.weight cannot be .*{message}"
    ):
        fp4graph.pack_frozen(net)
    assert all(isinstance(net.get_submodule(name).weight, nn.Parameter) for name in LINEARS)
    after = net.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_weight_that_is_not_finite_is_named():
    net = model()
    with torch.no_grad():
        net[4].weight[3, 5] = torch.nan
    fp4graph.apply(net, SOUND["tetrajet"], backend="eager")
    with pytest.raises(PolicyError, match=r"4\.weight cannot be packed: it holds NaN or Inf\. Load finite values"):
        fp4graph.pack_frozen(net)


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
    with pytest.raises(PolicyError, match=r"a MultiheadAttention, may be bypassed"):
        fp4graph.pack_frozen(attention)
    with pytest.raises(Error, match=r"pack_frozen\(\) takes a model that fp4graph\.apply has prepared"):
        fp4graph.pack_frozen(nn.Linear(64, 64))


@pytest.mark.slow
def test_what_trains_stays_as_it_is():
    net = model().requires_grad_(True)
    fp4graph.apply(net, SOUND["tetrajet"], backend="eager")
    frozen = net[4].requires_grad_(False).weight.detach().clone()
    fp4graph.pack_frozen(net)
    assert isinstance(net[0].base_layer.weight, nn.Parameter)
    assert "weight" not in net[4]._parameters
    kept = copy.deepcopy(net.state_dict())["4.weight"]
    moving = net[0].base_layer.weight.detach().clone()
    train(net)
    assert not torch.equal(net[0].base_layer.weight, moving)
    assert torch.equal(fp4graph.unpack_frozen(net)[4].weight, kept)
    assert torch.equal(kept, values_of(frozen))


def phases(*later):
    """Return the policy of ``tetrajet`` with phases after 2, 4, ... forwards."""
    return SOUND["tetrajet"] | {"phases": [{"at": 2 + 2 * index, **each} for index, each in enumerate(later)]}


FROM_NEAREST = FROM_FPROP | {"backward": {"rounding": "nearest"}}
#: Phases under which packed weights would go wrong.
UNSOUND = {
    "nothing quantized": ({"rules": [], "default": "keep"}, r"rule 'default'.*keeps it in high precision"),
    "the rule keeps": (
        {"rules": [{"name": "off", "match": {"op": "linear"}, "keep": "the end is exact"}], "default": "keep"},
        r"rule 'off'.*keeps it in high precision",
    ),
    "other scales": (
        {"rules": [{"name": "floor", "match": {"op": "linear"}, "operands": FROM_FPROP, "quantize": {
            **TETRAJET, "scale": {"format": "e8m0", "rounding": "floor"}}}]},
        r"rule 'floor'.*its quantizer changes values",
    ),
    "fprop is stochastic": (
        {"techniques": [{"stochastic_rounding": {"operands": ["fprop"]}}]},
        r"rule 'the rule'.*stochastically at every forward",
    ),
    "dgrad of the original": (
        {"rules": [{"name": "late", "match": {"op": "linear"}, "quantize": TETRAJET}]},
        r"rule 'late'.*dgrad quantizes it from the original",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSOUND)
def test_every_later_phase_is_checked(name, tmp_path):
    later, message = UNSOUND[name]
    same_again = {"rules": [{"name": "nearest", "match": {"op": "linear"}, "quantize": TETRAJET,
                             "operands": FROM_NEAREST}]}  # fmt: skip
    file = tmp_path / "p.yaml"
    file.write_text(fp4graph.load_policy(phases(same_again, later)).to_yaml())
    net = fp4graph.apply(model(), file, backend="eager")
    with pytest.raises(PolicyError, match=rf"(?s)p\.yaml:\d+: {message}") as caught:
        fp4graph.pack_frozen(net)
    assert "0.base_layer.weight cannot be packed: in the phase that begins at 4, " in str(caught.value)
    assert all(isinstance(net.get_submodule(name).weight, nn.Parameter) for name in LINEARS)


@pytest.mark.slow
def test_weights_stay_packed_through_phases_that_ask_the_same_values():
    same_again = {"rules": [{"name": "nearest", "match": {"op": "linear"}, "quantize": TETRAJET,
                             "operands": FROM_NEAREST}]}  # fmt: skip
    plain, packed = (fp4graph.apply(model(), phases(same_again), backend="eager") for _ in range(2))
    fp4graph.pack_frozen(packed)
    size = at_rest(packed)
    assert same(train(plain, 4), train(packed, 4))
    assert runtime_of(packed).phase == 1
    assert at_rest(packed) == size


#: Changes of the rule of ``tetrajet`` after which packed bytes are wrong for layer 4.
CHANGED = {
    "kept": {"match": {"module": "0"}},
    "other scales": {"quantize": {**TETRAJET, "scale": {"format": "e8m0", "rounding": "floor"}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_a_plan_that_the_bytes_are_wrong_for_is_an_error_at_every_call(name):
    net = fp4graph.apply(model(), SOUND["tetrajet"], backend="eager")
    fp4graph.pack_frozen(net)
    train(net, 1)
    rule = SOUND["tetrajet"]["rules"][0] | CHANGED[name]
    runtime_of(net).policy = fp4graph.load_policy(SOUND["tetrajet"] | {"rules": [rule]})
    net[4] = Lora(net[4])  # the next call plans the model anew
    for _ in range(3):
        with pytest.raises(PolicyError, match=r"\w+ was packed.*gone.*load the original weights and apply"):
            net(X)
    fp4graph.apply(net.requires_grad_(True), SOUND["tetrajet"], backend="eager")
    train(net, 1)


def test_a_policy_that_cannot_be_applied_leaves_a_model_packed():
    net = fp4graph.apply(model(), SOUND["tetrajet"], backend="eager")
    fp4graph.pack_frozen(net)
    size, expected = at_rest(net), net(X)
    unused = policy(TETRAJET, match={"module": "4"}) | {"expect": {"quantized": 3}}
    with pytest.raises(Error):
        fp4graph.apply(net, unused, backend="eager", example_inputs=(X,))
    assert at_rest(net) == size
    assert torch.equal(net(X), expected)


@pytest.mark.parametrize("module", [nn.Linear(64, 32), Lora(nn.Linear(64, 32))])
def test_a_call_in_another_context_of_autocast_is_an_error(module):
    net = fp4graph.apply(nn.Sequential(module.requires_grad_(False)), SOUND["tetrajet"], backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        fp4graph.pack_frozen(net)
        expected = net(X)
    for _ in range(2):
        with pytest.raises(Error, match=r"weight was packed from torch\.bfloat16, and this .* torch\.float32; call"):
            net(X)
        with (
            torch.autocast("cpu", torch.float16),
            pytest.raises(Error, match=r"was packed from torch\.bfloat16, and .* torch\.float16"),
        ):
            net(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(X), expected)


class Reads(nn.Module):
    """Reads a layer's weight as T5 does (its dtype) or as DoRA does (its values)."""

    def __init__(self, values):
        super().__init__()
        self.wo, self.values = nn.Linear(64, 32), values

    def forward(self, x):
        y = self.wo(x.to(self.wo.weight.dtype))
        return self.values(y, self.wo.weight) if self.values else y


@pytest.mark.parametrize("strict", [False, True])
def test_a_packed_weight_has_a_dtype_and_no_values(strict):
    plain, net = (Reads(None).requires_grad_(False) for _ in range(2))
    net.load_state_dict(plain.state_dict())
    for each in (plain, net):
        fp4graph.apply(each, SOUND["tetrajet"], backend="eager", strict=strict)
    fp4graph.pack_frozen(net)
    assert torch.equal(net(X), plain(X))
    assert (net.wo.weight.dtype, net.wo.weight.device.type, *net.wo.weight.shape) == (torch.float32, "cpu", 32, 64)
    message = r"wo\.weight is packed, but was read outside a call of its module; call fp4graph\.unpack_frozen"
    assert not hasattr(net.wo.weight, "quant_state")
    x = torch.ones(3, 64)
    for read in (
        *(lambda w: w.data, lambda w: w.norm(), lambda w: w.requires_grad_(True), lambda w: w.mT, lambda w: w[:8]),
        *(lambda w: nn.functional.linear(x, w), lambda w: x @ w, lambda w: w @ x, lambda w: torch.cat([w])),
        *(lambda w: w * 2, lambda w: 2 * w, lambda w: torch.addmm(torch.ones(64), x, w)),
    ):
        with pytest.raises(Error, match=message):
            read(net.wo.weight)
    with pytest.raises(Error, match=message):
        net.wo.weight.requires_grad = True

    for values in (lambda y, w: y / w.norm(), lambda y, w: nn.functional.linear(y, w.mT), lambda y, w: y @ w):
        reading = Reads(values).requires_grad_(False)
        fp4graph.apply(reading, SOUND["tetrajet"], backend="eager", strict=strict)
        fp4graph.pack_frozen(reading)
        for _ in range(2):
            with pytest.raises(Error, match=message):
                reading(X)


def test_layers_with_a_dora_adapter_are_refused():
    net = model()
    net[2].lora_magnitude_vector = nn.ModuleDict({"default": nn.Linear(1, 1)})
    fp4graph.apply(net, SOUND["tetrajet"], backend="eager")
    with pytest.raises(PolicyError, match=r"2\.base_layer\.weight cannot be packed: 2 has a DoRA adapter.*use_dora"):
        fp4graph.pack_frozen(net)


@pytest.mark.slow
def test_unfreezing_beside_packed_weights_warns_once():
    net = fp4graph.apply(model(), SOUND["tetrajet"], backend="eager")
    fp4graph.pack_frozen(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    fp4graph.prepare_optimizer(net, optimizer)
    train(net)
    net.requires_grad_(True)
    message = r"3 parameters that were frozen .* now require gradients; packed weights .* fp4graph\.unpack_frozen"
    with pytest.warns(fp4graph.PolicyWarning, match=message):
        fp4graph.prepare_optimizer(net, optimizer)
    train(net)
    assert "weight" not in net[4]._parameters

    net = fp4graph.apply(model(), SOUND["tetrajet"], backend="eager")
    fp4graph.pack_frozen(net)
    for unfrozen in (copy.deepcopy(net), net):  # a copy has parameters of its own
        unfrozen.requires_grad_(True)
        with pytest.warns(fp4graph.PolicyWarning, match=message):
            train(unfrozen)


def test_a_packed_model_is_pickled_with_its_bytes():
    net = fp4graph.apply(model(), SOUND["tetrajet"], backend="eager")
    fp4graph.pack_frozen(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert at_rest(loaded) == at_rest(net)
    fp4graph.apply(loaded, SOUND["tetrajet"], backend="eager")
    with torch.no_grad():
        assert torch.equal(loaded(X), net(X))
    assert isinstance(loaded[4].weight, nn.Parameter)


@pytest.mark.parametrize(
    "convert", [nn.Module.half, nn.Module.bfloat16, lambda net: net.to(torch.float64)], ids=["half", "bfloat16", "to"]
)
def test_converting_a_packed_model_names_the_way(convert):
    net = fp4graph.apply(model().requires_grad_(False), SOUND["tetrajet"], backend="eager")
    fp4graph.pack_frozen(net)
    with pytest.raises(
        Error, match=r"0\.base_layer\.weight is packed as bytes of torch\.float32 and cannot become torch\.\w+; call "
        r"fp4graph\.unpack_frozen\(model\), convert the model, and call fp4graph\.pack_frozen"
    ):  # fmt: skip
        convert(net)
    convert(fp4graph.unpack_frozen(net))
    fp4graph.pack_frozen(net)
    assert net(X.to(net[4].bias.dtype)).dtype == net[4].bias.dtype
