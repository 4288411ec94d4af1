"""Frozen weights in memory as FP4 bytes: they train to the same bits, and some weights are refused."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.errors import Error, PolicyError
from fp4graph.model.runtime import runtime_of
from tests.exports.models import MXFP4, NVFP4, SQUARE, Tied
from tests.exports.models import by_rule as policy
from tests.helpers.steps import differences, same, through_file
from tests.helpers.training import gradients, saved_whole
from tests.model.test_adapters import Lora
from tests.recipes.arithmetic import quantize

FROM_FPROP = {
    "backward": {"rounding": "stochastic"},
    "dgrad.weight": {"source": "fprop"},
    "wgrad.input": {"source": "fprop"},
}
X = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))


def from_fprop(quantize=MXFP4, *techniques, operands=None, **rule):
    return policy(quantize, *techniques, operands=FROM_FPROP | (operands or {}), **rule)


def element(name, block, scale, **more):
    return {"element": name, "block": block, "scale": {"format": scale, **more}}


TETRAJET = from_fprop()
#: Policies whose frozen weights can be packed.
SOUND = {
    "tetrajet": TETRAJET,
    "encode scales": from_fprop(element("e2m1", 16, "e4m3", convention="encode")),
    "int4": from_fprop(element("int4", 32, "bf16")),
    "e3m0": from_fprop(element("e3m0", 32, "ue5m3")),
    "square": policy(NVFP4, operands=SQUARE),
    "nvfp4-te": policy(
        NVFP4,
        {"stochastic_rounding": {"operands": ["gradients"]}},
        {"hadamard": {"scope": ["wgrad"], "block": 16, "kind": "random", "resample": "never"}},
        "tensor_scaling",
        operands=SQUARE,
    ),
    "scaled and from fprop": from_fprop(NVFP4, "tensor_scaling"),
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
        losses.append(net(X).square().mean())
        losses[-1].backward()
        optimizer.step()
    return [*losses, *(p.grad for p in trainable)]


def evaluated(net):
    with torch.no_grad():
        return net.eval()(X)


def applied(data=None, net=None, **how):
    return fp4graph.apply(model() if net is None else net, data or TETRAJET, backend="eager", **how)


def packed(*args, **how):
    return fp4graph.pack_frozen(applied(*args, **how))


def values_of(weight):
    """Return the values of MXFP4, by the definition."""
    values = quantize(weight.double().numpy(), 1, block=32, fmt="e8m0", rule="ceil")
    return torch.from_numpy(values).to(weight.dtype)


def at_rest(net):
    """Return the bytes of all tensors that a model holds."""
    tensors = [t for t in (*net.parameters(), *net.buffers()) if not t.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


LINEARS = ("0.base_layer", "2.base_layer", "4")


QUICK = {("tetrajet", True), ("nvfp4-te", False)}
CASES = [
    pytest.param(name, called, marks=pytest.mark.slow if (name, called) in QUICK else pytest.mark.long)
    for name in SOUND
    for called in (False, True)
]


@pytest.mark.parametrize(("name", "called"), CASES)
def test_a_packed_model_trains_to_the_same_bits(name, called):
    """Packed before or after its first forward."""
    plain, net = applied(SOUND[name]), applied(SOUND[name])
    if called:
        assert same(train(plain), train(net))
    freed = [weakref.ref(net.get_submodule(linear).weight) for linear in LINEARS]
    assert fp4graph.pack_frozen(net) is net
    gc.collect()
    assert [each() for each in freed] == [None] * 3
    assert not {f"{linear}.weight" for linear in LINEARS} & dict(net.named_parameters()).keys()
    assert same(train(plain), train(net))
    assert len({tuple((s.module, s.quantized) for s in runtime_of(each).sites[:3]) for each in (plain, net)}) == 1
    assert torch.equal(evaluated(net), evaluated(plain))
    assert not any(isinstance(net.get_submodule(linear).weight, torch.Tensor) for linear in LINEARS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [("tetrajet", 4 + 8 / 32), ("nvfp4-te", 4 + 8 / 16)])
def test_the_bytes_at_rest_are_those_of_the_format(name, bits):
    net = applied(SOUND[name])
    before = at_rest(net)
    fp4graph.pack_frozen(net)
    elements = 64 * 96 + 96 * 64 + 64 * 32
    freed = before - at_rest(net)
    # Each weight has γ, 4 bytes. A weight may also keep the largest element with its place, 12 bytes.
    beside = [0] if name == "tetrajet" else [3 * 4 + 12 * largest for largest in range(4)]
    assert elements * 4 - elements * bits / 8 - freed in beside
    train(net)
    assert before - at_rest(net) == freed


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_models_give_the_same_bits_in_16_bits_and_under_autocast(dtype):
    with torch.no_grad():
        assert torch.equal(*(make(net=model().to(dtype))(X.to(dtype)) for make in (applied, packed)))
    with torch.autocast("cpu", dtype):
        assert same(train(applied()), train(packed()))


@pytest.mark.slow
def test_a_part_called_by_itself_reads_the_bytes_too():
    nets = applied(), packed()
    with pytest.warns(fp4graph.PolicyWarning, match="called by itself"):
        y, z = (net[0](X) for net in nets)
    assert torch.equal(y, z)
    (y.sum() + z.sum()).backward()
    expected, found = (gradients(net[0]) for net in nets)
    assert len(expected) == 2
    assert same(expected, found)


@pytest.mark.long
@pytest.mark.inductor
def test_inductor_reads_the_bytes():
    plain, net = (fp4graph.apply(model(), TETRAJET) for _ in range(2))
    fp4graph.pack_frozen(net)
    assert same(train(plain), train(net))


@pytest.mark.slow
def test_a_packed_model_saves_the_values_of_fprop_under_plain_names():
    net = applied()
    weights = {f"{name}.weight": net.get_submodule(name).weight.detach().clone() for name in LINEARS}
    names = fp4graph.strip(net.state_dict()).keys()
    fp4graph.pack_frozen(net)
    train(net)
    loaded = through_file(dict(net.state_dict()))
    assert fp4graph.strip(loaded).keys() == names
    for name, weight in weights.items():
        assert torch.equal(loaded[name], values_of(weight)), name
    again = model()
    again.load_state_dict(fp4graph.strip(loaded), strict=True)
    assert torch.equal(evaluated(applied(net=again)), evaluated(net))
    message = r"0\.base_layer\.weight is packed and cannot be loaded; call fp4graph\.unpack_frozen"
    with pytest.raises(Error, match=message):
        net.load_state_dict(loaded)
    fp4graph.unpack_frozen(net).load_state_dict(loaded)
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in model().named_parameters()]
    fp4graph.pack_frozen(net)


@pytest.mark.long
@pytest.mark.slow
def test_packed_models_are_copied_adapted_removed_and_applied_again():
    plain, net = applied(), packed()
    size = at_rest(net)
    twins = copy.deepcopy(plain), copy.deepcopy(net)
    assert at_rest(twins[1]) == size
    assert same(*map(train, twins))
    for each in (plain, net):
        torch.manual_seed(2)
        each[4] = Lora(each[4])
        each[4].base_layer.requires_grad_(False)
    applied(net=plain)
    assert same(train(plain), train(net))
    assert "weight" not in net[4].base_layer._parameters  # packed again
    explained = [fp4graph.explain(each, TETRAJET, (X,)).sites for each in (net, plain)]
    assert len({tuple((site.module, site.quantized) for site in sites) for sites in explained}) == 1
    fp4graph.remove(net)
    assert torch.equal(net[4].base_layer.weight, values_of(plain[4].base_layer.weight.detach()))
    assert torch.equal(evaluated(applied(net=net)), evaluated(plain))


def late(name, **rule):
    """Return the changes of a phase with one rule."""
    return {"rules": [{"name": name, "match": {"op": "linear"}, **rule}]}


#: A phase that needs the same values of weights.
NEAREST = late("nearest", quantize=MXFP4, operands=FROM_FPROP | {"backward": {"rounding": "nearest"}})
FLOOR = element("e2m1", 32, "e8m0", rounding="floor")


def phases(*later):
    """Return the policy of ``tetrajet`` with phases after 2, 4, ... forwards."""
    return TETRAJET | {"phases": [{"at": 2 + 2 * index, **each} for index, each in enumerate(later)]}


CLAMPED = {"outlier_clamp": {"operands": ["fprop.weight"]}}
#: Policies whose frozen weights cannot be packed, with the reason in the error.
REFUSED = {
    "original": (policy(MXFP4), r"dgrad quantizes it from the original, along the other axis.*source: fprop"),
    "kept": (policy(MXFP4, operands={"dgrad": "keep"}), r"dgrad reads the original.*source: fprop"),
    "stochastic dgrad": (policy(MXFP4, operands={"dgrad": {"rounding": "stochastic"}}), "original stochastically"),
    "stochastic fprop": (
        from_fprop(operands={"fprop": {"rounding": "stochastic"}}),
        r"stochastically at every forward.*[Rr]ound fprop\.weight to nearest",
    ),
    "rotated": (from_fprop(MXFP4, "hadamard"), r"hadamard transforms it in fprop.*backward"),
    "state": (from_fprop(MXFP4, "q_ema"), "q_ema changes the weight itself, or keeps state"),
    "split": (from_fprop(MXFP4, CLAMPED), "outlier_clamp gives it values that are not FP4"),
    "8 bits": (from_fprop({**MXFP4, "element": "e4m3"}), "bytes of e4m3 in blocks of 32"),
    "one block": (from_fprop({**MXFP4, "block": "tensor"}), "in blocks of tensor"),
    "two elements": (
        from_fprop(element(["e2m1", "int4"], 16, "e4m3")),
        r"each of its blocks chooses one of the elements e2m1, int4.*with one element",
    ),
}
#: Later phases that need other values of weights than the bytes, with the rule and the reason in the error.
UNSOUND = {
    "nothing quantized": ({"rules": [], "default": "keep"}, "default", "keeps it in high precision"),
    "the rule keeps": (late("off", keep="exact") | {"default": "keep"}, "off", "keeps it in high precision"),
    "other scales": (late("floor", quantize=FLOOR, operands=FROM_FPROP), "floor", "its quantizer changes values"),
    "fprop is stochastic": (
        {"techniques": [{"stochastic_rounding": {"operands": ["fprop"]}}]},
        "the rule",
        "stochastically at every forward",
    ),
    "dgrad of the original": (late("late", quantize=MXFP4), "late", "dgrad quantizes it from the original"),
}


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in REFUSED), *UNSOUND])
def test_weights_that_cannot_be_packed_are_named_and_unchanged(name, tmp_path):
    """The error names the line of the rule. Every later phase is checked."""
    if name in REFUSED:
        (data, message), rule = REFUSED[name], "the rule"
    else:
        later, rule, message = UNSOUND[name]
        data, message = phases(NEAREST, later), f"in the phase that begins at 4, .*{message}"
    (tmp_path / "p.yaml").write_text(fp4graph.load_policy(data).to_yaml())
    net = applied(tmp_path / "p.yaml")
    before = copy.deepcopy(dict(net.state_dict()))
    expected = rf"(?s)p\.yaml:\d+: rule '{rule}': 0\.base_layer\.weight cannot be packed: .*{message}"
    with pytest.raises(PolicyError, match=expected):
        fp4graph.pack_frozen(net)
    assert all(isinstance(net.get_submodule(name).weight, nn.Parameter) for name in LINEARS)
    assert not differences(dict(net.state_dict()), before)


OF_THE_HEAD = from_fprop(match={"module": "head", "role": "head"})


def test_models_that_cannot_be_packed_are_named():
    not_finite, dora = model(), model()
    not_finite[4].weight.data[3, 5] = torch.nan
    dora[2].lora_magnitude_vector = nn.ModuleDict({"default": nn.Linear(1, 1)})
    attention = nn.MultiheadAttention(64, 2).requires_grad_(False)
    for net, message in (
        (applied(net=not_finite), r"4\.weight cannot be packed: it holds NaN or Inf\. Load finite values"),
        (applied(net=dora), r"2\.base_layer\.weight cannot be packed: 2 has a DoRA adapter.*use_dora"),
        (
            applied(OF_THE_HEAD, Tied().requires_grad_(False)),
            r"head\.weight cannot be packed: embed\.weight is the same parameter\. Untie",
        ),
        (applied(net=attention), "without a call of its module, a MultiheadAttention"),
    ):
        with pytest.raises(PolicyError, match=message):
            fp4graph.pack_frozen(net)
    with pytest.raises(Error, match=r"pack_frozen\(\) takes a model that fp4graph\.apply has prepared"):
        fp4graph.pack_frozen(nn.Linear(64, 64))


def test_a_module_of_two_names_is_packed_once():
    layer = nn.Linear(64, 64).requires_grad_(False)
    net = applied(from_fprop(match={"op": "linear"}), nn.Sequential(layer, nn.GELU(), layer))
    expected = evaluated(net)
    assert torch.equal(evaluated(fp4graph.pack_frozen(net)), expected)
    assert [name for name, _ in fp4graph.unpack_frozen(net).named_parameters()] == ["0.weight", "0.bias"]


@pytest.mark.slow
def test_weights_that_train_are_not_packed():
    net = applied(net=model().requires_grad_(True))
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


@pytest.mark.slow
def test_weights_stay_packed_through_phases_that_need_the_same_values():
    plain, net = applied(phases(NEAREST)), packed(phases(NEAREST))
    size = at_rest(net)
    assert same(train(plain, 4), train(net, 4))
    assert runtime_of(net).phase == 1
    assert at_rest(net) == size


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{"match": {"module": "0"}}, {"quantize": FLOOR}], ids=["kept", "other scales"])
def test_a_plan_that_needs_other_values_is_an_error_at_every_call(changed):
    """Layer 4 is kept under the changed rule, or has other scales."""
    net = packed()
    train(net, 1)
    runtime_of(net).policy = fp4graph.load_policy(TETRAJET | {"rules": [TETRAJET["rules"][0] | changed]})
    net[4] = Lora(net[4])  # the next call plans the model anew
    for _ in range(3):
        with pytest.raises(PolicyError, match=r"\w+ was packed.*gone.*load the original weights and apply"):
            net(X)
    applied(net=net.requires_grad_(True))
    train(net, 1)


@pytest.mark.slow
def test_a_policy_that_cannot_be_applied_leaves_a_model_packed():
    net = packed()
    size, expected = at_rest(net), net(X)
    unused = policy(MXFP4, match={"module": "4"}) | {"expect": {"quantized": 3}}
    with pytest.raises(Error):
        fp4graph.apply(net, unused, backend="eager", example_inputs=(X,))
    assert at_rest(net) == size
    assert torch.equal(net(X), expected)


@pytest.mark.slow
@pytest.mark.parametrize("module", [nn.Linear(64, 32), Lora(nn.Linear(64, 32))])
def test_a_call_in_another_context_of_autocast_is_an_error(module):
    net = applied(net=nn.Sequential(module.requires_grad_(False)))
    with torch.autocast("cpu", torch.bfloat16):
        fp4graph.pack_frozen(net)
        expected = net(X)
    packed_from = r"weight was packed from torch\.bfloat16, and this .* torch\."
    for _ in range(2):
        with pytest.raises(Error, match=packed_from + "float32; call"):
            net(X)
        with torch.autocast("cpu", torch.float16), pytest.raises(Error, match=packed_from + "float16"):
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


READS = {
    "data": lambda w: w.data,
    "norm": lambda w: w.norm(),
    "mT": lambda w: w.mT,
    "slice": lambda w: w[:8],
    "w * 2": lambda w: w * 2,
    "2 * w": lambda w: 2 * w,
    "x @ w": lambda w: torch.ones(3, 32) @ w,
    "w @ x": lambda w: w @ torch.ones(64),
    "cat": lambda w: torch.cat([w]),
    "linear": lambda w: nn.functional.linear(torch.ones(3, 64), w),
    "addmm": lambda w: torch.addmm(torch.ones(64), torch.ones(3, 32), w),
    "requires_grad_": lambda w: w.requires_grad_(True),
    "requires_grad": lambda w: setattr(w, "requires_grad", True),
}
IN_FORWARD = {
    "w.norm()": lambda y, w: y / w.norm(),
    "linear": lambda y, w: nn.functional.linear(y, w.mT),
    "y @ w": lambda y, w: y @ w,
}
OUTSIDE = r"wo\.weight is packed, but was read outside a call of its module; call fp4graph\.unpack_frozen"


def reading(values, strict=False):
    return applied(net=Reads(values).requires_grad_(False), strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_a_packed_weight_has_what_libraries_read(strict):
    plain, net = reading(None, strict), reading(None, strict)
    net.load_state_dict(plain.state_dict())
    fp4graph.pack_frozen(net)
    assert torch.equal(net(X), plain(X))
    assert (net.wo.weight.dtype, net.wo.weight.device.type, *net.wo.weight.shape) == (torch.float32, "cpu", 32, 64)
    assert not hasattr(net.wo.weight, "quant_state")
    for name in ("layout", "is_sparse", "is_nested", "is_cpu", "is_cuda", "is_meta", "is_leaf", "grad", "itemsize"):
        assert getattr(net.wo.weight, name) == getattr(plain.wo.weight, name), name
    for name in ("element_size", "nelement", "ndimension", "get_device", "is_signed"):
        assert getattr(net.wo.weight, name)() == getattr(plain.wo.weight, name)(), name


@pytest.mark.parametrize("read", READS)
def test_reading_the_values_of_a_packed_weight_is_an_error(read):
    net = fp4graph.pack_frozen(reading(None))
    with pytest.raises(Error, match=OUTSIDE):
        READS[read](net.wo.weight)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("read", IN_FORWARD)
def test_a_forward_that_reads_the_values_of_a_packed_weight_is_an_error(read, strict):
    net = fp4graph.pack_frozen(reading(IN_FORWARD[read], strict))
    for _ in range(2):
        with pytest.raises(Error, match=OUTSIDE):
            net(X)


@pytest.mark.slow
def test_unfreezing_beside_packed_weights_warns_once():
    net = packed()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    fp4graph.prepare_optimizer(net, optimizer)
    train(net)
    net.requires_grad_(True)
    message = r"3 parameters that were frozen .* now require gradients; packed weights .* fp4graph\.unpack_frozen"
    with pytest.warns(fp4graph.PolicyWarning, match=message):
        fp4graph.prepare_optimizer(net, optimizer)
    train(net)
    assert "weight" not in net[4]._parameters

    net = packed()
    for unfrozen in (copy.deepcopy(net), net):  # a copy warns about its own parameters
        unfrozen.requires_grad_(True)
        with pytest.warns(fp4graph.PolicyWarning, match=message):
            train(unfrozen)


@pytest.mark.slow
def test_a_packed_model_is_pickled_with_its_bytes():
    net = packed()
    loaded = saved_whole(net)
    assert at_rest(loaded) == at_rest(net)
    assert torch.equal(evaluated(applied(net=loaded)), evaluated(net))
    assert isinstance(loaded[4].weight, nn.Parameter)


@pytest.mark.slow
@pytest.mark.parametrize(
    "convert", [nn.Module.half, nn.Module.bfloat16, lambda net: net.to(torch.float64)], ids=["half", "bfloat16", "to"]
)
def test_converting_a_packed_model_is_an_error_with_the_remedy(convert):
    net = packed(net=model().requires_grad_(False))
    message = r"0\.base_layer\.weight is packed as bytes of torch\.float32 and cannot become torch\.\w+; call "
    remedy = r"fp4graph\.unpack_frozen\(model\), convert the model, and call fp4graph\.pack_frozen"
    with pytest.raises(Error, match=message + remedy):
        convert(net)
    convert(fp4graph.unpack_frozen(net))
    fp4graph.pack_frozen(net)
    assert net(X.to(net[4].bias.dtype)).dtype == net[4].bias.dtype
