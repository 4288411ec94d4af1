"""Mistakes of users and unusual calls: each raises an error, or a warning, that names the remedy."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import jit, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.model.capture import Capture
from fp4graph.model.runtime import runtime_of
from fp4graph.model.uncompiled import Uncompiled
from tests.helpers import training
from tests.helpers.models import Mlp, module_of
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.training import prepared

NEAREST, POLICY = one_rule(), one_rule(quantize=quantizer() | {"rounding": "stochastic"})
Model = partial(Mlp, 32, 32, 32)


def applied(policy=POLICY, model=None, **options):
    return training.applied(model or Model(), policy, **options)


def batch(n=4):
    return torch.randn(n, 32, generator=torch.Generator().manual_seed(0))


def train(model, steps=2):
    for _ in range(steps):
        model(batch()).square().sum().backward()
    return model


def pickled():
    return pickle.loads(pickle.dumps(applied()))


def part_of_a_removed_model():
    model = applied()
    part, model.first = model.first, nn.Identity()
    fp4graph.remove(model)
    part(batch())


def sparse(model, layout=torch.sparse_coo):
    model.second.weight = nn.Parameter(model.second.weight.detach().to_sparse(layout=layout))
    return model


def nested(layout):
    parts = [torch.randn(3, 32), torch.randn(5, 32)]
    applied()(torch.nested.nested_tensor(parts, layout=layout))


def nested_in_a_dict():
    class Reads(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"])

    model = fp4graph.apply(Reads(32, 32), one_rule(), backend="eager")
    model({"x": torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(5, 32)], layout=torch.strided)})


def weight_norm_before_a_step():
    model = applied(one_rule("q_ema"))
    optimizer = prepared(model, torch.optim.SGD)
    train(model, 1)
    torch.nn.utils.weight_norm(model.first)
    optimizer.step()


optimizer_of, explain = fp4graph.prepare_optimizer, fp4graph.explain
CSR, SPARSE = torch.sparse_csr, r"^second.weight: it is sparse"
ERRORS = {
    "pickled, called": (lambda: pickled()(batch()), r"pickled \(by .*ddp_spawn.*fp4graph.apply"),
    "pickled, prepared": (lambda: optimizer_of(pickled(), None), "ddp_spawn.*fp4graph.apply"),
    "not applied": (lambda: optimizer_of(Model(), None), r"call fp4graph.apply\(model, policy\) first"),
    "scripted": (lambda: fp4graph.apply(jit.script(Model()), POLICY), "TorchScript module.*the Python module"),
    "traced part": (lambda: explain(nn.Sequential(jit.trace(Model(), batch())), POLICY), "^0 is a TorchScript module"),
    "lazy": (lambda: fp4graph.apply(nn.LazyLinear(4), POLICY), "^weight has no shape yet; call the model once"),
    "copied part": (lambda: copy.deepcopy(applied().first)(batch()), "copied apart from its model.*apply.*bypass"),
    "part of a removed model": (part_of_a_removed_model, "the module was taken out of its model"),
    "sparse": (lambda: applied(model=sparse(Model())), SPARSE + ".*to_dense.*match: {module: 'second'}"),
    "sparse rows": (lambda: applied(model=sparse(Model(), CSR)), SPARSE + r" \(torch.sparse_csr\)"),
    "sparse later": (lambda: sparse(train(applied(), 1))(batch()), r"^second: .*a factor is sparse.*to_dense"),
    "named by a number": (lambda: explain(Model(), POLICY, {1: batch()}), "names of forward's inputs; got 1"),
    "meta": (lambda: applied(model=Model().to("meta"))(batch()), r"on the meta device.*to_empty.*fp4graph.explain"),
    "jagged": (lambda: nested(torch.jagged), r"^first: .*nested tensor; pass its values \(x.values\(\)\), or pad"),
    "nested": (lambda: nested(torch.strided), r"nested tensor.*to_padded_tensor"),
    "nested in a dict": (nested_in_a_dict, r"nested tensor.*to_padded_tensor"),
    "seed": (lambda: applied(seed="x"), "seed is an int.*'x'"),
    "limit": (lambda: applied(recompile_limit=-1), "recompile_limit is a number of graphs, at least 1.*-1"),
    "dynamic": (lambda: applied(dynamic="no"), "dynamic is True, False or None"),
    "strict": (lambda: applied(strict="no"), "strict is True or False; got 'no'"),
    "dtype": (lambda: applied().bfloat16()(batch()), r"^first: .*float32 with torch.bfloat16.*x.to\(torch.bfloat16\)"),
    "swapped": (lambda: optimizer_of(torch.optim.SGD(Model().parameters()), applied()), "arguments are swapped"),
    "class": (lambda: optimizer_of(applied(), torch.optim.SGD), r"takes an optimizer such as torch.optim.AdamW\("),
    "weight_norm before a step": (weight_norm_before_a_step, r"^first.weight: .*no longer.*fp4graph.apply.*prepare_o"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(runs uncompiled|Sparse CSR|nested tensors is in|weight_norm|torch.jit)")
@pytest.mark.parametrize("case", ERRORS)
def test_an_error_says_what_is_wrong_and_what_to_do(case):
    call, words = ERRORS[case]
    with pytest.raises(fp4graph.Error, match=words):
        call()


def test_an_outer_fullgraph_compilation_is_told_to_leave_it_out():
    model = applied()
    outer = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
        outer(batch())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_compile_after_apply_has_no_effect_and_warns(called, strict):
    expected = applied()(batch())
    model = applied(strict=strict)
    first = model(batch()) if called else None
    with pytest.warns(PolicyWarning, match="compile.. has no effect after fp4graph.apply"):
        model.compile(backend="eager")
    y = first if called else model(batch())
    assert torch.equal(y, expected)
    assert "compile" not in fp4graph.remove(model).__dict__


def test_a_compile_method_of_the_models_class_is_left_alone():
    class Own(Mlp):
        def compile(self, optimizer):
            return optimizer

    assert applied(model=Own(32, 32, 32)).compile("adam") == "adam"


@pytest.mark.parametrize("inputs", [batch(), [batch()], {"x": batch()}])
def test_explain_takes_what_example_inputs_takes(inputs):
    assert fp4graph.explain(Model(), POLICY, inputs).quantized == 2


def test_explain_without_inputs_says_which_inputs_forward_takes():
    with pytest.raises(TypeError, match="missing 1 required") as caught:
        fp4graph.explain(Model(), POLICY)
    assert "0 positional inputs and the keywords []; they come from args of explain()" in caught.value.__notes__[0]


AFTERWARDS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm, old": torch.nn.utils.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [NEAREST, POLICY], ids=["no noise", "noise"])
@pytest.mark.parametrize("technique", AFTERWARDS)
def test_a_layer_whose_weight_becomes_computed_is_planned_again(technique, policy):
    model = train(applied(policy))
    AFTERWARDS[technique](model.first)
    prepared(model, torch.optim.SGD)
    train(model)
    assert [site.module for site in runtime_of(model).sites if site.quantized] == ["first", "second"]
    if technique == "pruning":
        prune.remove(model.first, "weight")
        assert {weight.name for weight in runtime_of(train(model)).weights} == {"first.weight", "second.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 2])
def test_a_module_runs_uncompiled_only_while_it_has_a_hook_on_its_backward(monkeypatch, before):
    runs, seen, run = [], [], Uncompiled.run

    def counted(self, forward, *args, **kwargs):
        runs.append(forward.module)
        return run(self, forward, *args, **kwargs)

    monkeypatch.setattr(Uncompiled, "run", counted)
    model = train(applied(), before)
    hook = model.second.register_full_backward_hook(lambda *_: seen.append(1))
    with pytest.warns(PolicyWarning, match="'second' runs uncompiled.*hook on its backward"):
        train(model, 2)
    hook.remove()
    assert runs == [model.second] * 2
    train(model, 2)
    assert len(runs) == len(seen) == 2


def test_a_meta_tensor_among_the_inputs_does_not_switch_the_policy_off():
    model = module_of(lambda self, batch: self.linear(batch["x"]), linear=nn.Linear(32, 32))
    plain, x = copy.deepcopy(model), torch.randn(4, 32)
    y = fp4graph.apply(model, one_rule(), backend="eager")({"x": x, "like": torch.empty(2, device="meta")})
    assert not torch.allclose(y, plain({"x": x}))


def test_weights_of_a_list_train_after_a_call_on_the_meta_device():
    def forward(self, x):
        for matrix in self.matrices:
            x = F.linear(x, matrix).relu()
        return x

    matrices = nn.ParameterList([torch.randn(32, 32) for _ in range(2)])
    model = applied(model=nn.Sequential(module_of(forward, matrices=matrices)))
    parameters = {name: parameter.detach().to("meta") for name, parameter in model.named_parameters()}
    assert torch.func.functional_call(model, parameters, (batch().to("meta"),)).is_meta
    train(model)
    assert [site.quantized for site in runtime_of(model).sites][-2:] == [True, True]


CAUSES = {
    "recompile limit": {"recompile_limit": 1, "dynamic": False},
    "config.disable": {},
    "set_stance.'force_eager'": {},
    "set_stance.'eager_on_recompile'": {"dynamic": False},
    "without an error": {},
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_forward_that_dynamo_does_not_compile_runs_and_warns_once_of_the_cause(monkeypatch, cause):
    model, compiled = applied(**CAUSES[cause]), applied()
    if cause != "config.disable":
        model(batch())
        compiled(batch())
    with torch.no_grad():
        expected = compiled(batch(6))
    if cause == "without an error":
        monkeypatch.setattr(Capture, "run", lambda self, name, *args: self._uncompiled(name, model._call_impl, *args))
    stance = cause.split("'")[1] if "stance" in cause else "default"
    with torch._dynamo.config.patch(disable=cause == "config.disable"), torch.compiler.set_stance(stance):
        with torch.no_grad(), pytest.warns(PolicyWarning, match=f"this forward runs uncompiled.*{cause}"):
            y = model(batch(6))
        model(batch(6))
    assert torch.equal(y, expected)


RULES = (
    "default: keep\nrules:\n"
    "- {{name: first, match: {{{}}}, keep: why}}\n- {{name: second, match: {{{}}}, quantize: {{}}}}"
)
INHERITING = "extends: tetrajet\nrules: {before: [{match: {module: '*'}, keep: why}]}"
IN_BLOCKS = "op: linear, block: true"
NO_SITE = "'second' matches no site of this model; "


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (INHERITING, r"tetrajet\.yaml.* matches no site .*p\.yaml inherits it"),
        (RULES.format(IN_BLOCKS, IN_BLOCKS), NO_SITE + r"rules before it \('first'\) keep every site that it could"),
        # The head is in no block.
        (RULES.format("module: head", "module: head, block: true"), NO_SITE + "give it 'required: false'"),
    ],
)
def test_a_rule_that_fits_no_site_names_the_file_that_inherits_it_or_the_rules_that_keep_it(tmp_path, text, says):
    path, model = tmp_path / "p.yaml", nn.Sequential()
    path.write_text(f"version: 1\n{text}\n")
    model.blocks, model.head = nn.Sequential(Model(), Model()), nn.Linear(32, 32)
    with pytest.raises(fp4graph.PolicyError, match=says):
        applied(path, model)(batch())
