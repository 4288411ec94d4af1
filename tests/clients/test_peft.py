"""PEFT: adapters on a quantized base, their files, and generation through a PeftModel."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import fp4graph
from fp4graph.model.runtime import runtime_of
from fp4graph.numerics.noise import make_key
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from tests.clients import tiny
from tests.helpers import oracle
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.steps import descend, differences

peft = pytest.importorskip("peft", reason="needs fp4graph[clients]")

TOKENS = torch.randint(2, 64, (2, 16), generator=torch.Generator().manual_seed(3))


def with_options(base, **options):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **options})
    return peft.get_peft_model(base, config)


def adapted(base):
    return with_options(base, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def quantized(policy):
    return fp4graph.apply(tiny.qwen3(), policy, backend="eager")


def trained(model, applied, steps=2):
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = fp4graph.prepare_optimizer(applied, torch.optim.AdamW(trainable, lr=1e-2))
    return descend(lambda: model(input_ids=TOKENS, labels=TOKENS).loss, optimizer, steps)


@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
@pytest.mark.parametrize("applied", ["the PeftModel", "its base"])
def test_adapters_train_generate_and_load(policy, applied, tmp_path, products, policy_warnings, watch_parameters):
    model = adapted(tiny.qwen3())
    inner = model if applied == "the PeftModel" else model.get_base_model()
    fp4graph.apply(inner, policy, backend="eager")
    changed = watch_parameters(model)
    losses = trained(model, inner)
    assert losses[1] < losses[0]
    assert changed() == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert runtime_of(inner).count == 2
    assert len(products) == 14  # the base layers; adapters stay in high precision
    assert set(products.values()) == {2}

    tokens = generated(model, 8)
    assert set(products.values()) == {2 + 8}
    # PeftModel.generate calls its base model, which warns that it runs uncompiled if the policy is the PeftModel's.
    assert len(policy_warnings()) == (1 if applied == "the PeftModel" else 0)

    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 2 * 3 * 2
    assert all("lora_" in name and "fp4graph" not in name for name in saved)
    again = peft.PeftModel.from_pretrained(tiny.qwen3(), tmp_path).eval()
    assert same(again, model)
    fp4graph.apply(again.get_base_model(), policy, backend="eager")
    joined = peft.PeftModel.from_pretrained(quantized(policy), tmp_path).eval()
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(joined), logits(model))
    assert torch.equal(generated(again, 8), tokens)


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def generated(model, length):
    prompt, lengths = TOKENS[:, :6], {"max_new_tokens": length, "min_new_tokens": length}
    return model.eval().generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **lengths)


def same(left, right):
    """Return whether ``right`` has the weights, adapters and state of techniques of ``left``, to the bit."""
    state = right.state_dict()
    return all(torch.equal(value, state[name]) for name, value in left.state_dict().items())


def assert_joins(adapt, policy, steps=2):
    """Compare adapters added after ``apply`` with adapters added before it; return the model of the former."""
    before, after = adapt(quantized(policy)), adapt(tiny.qwen3())
    fp4graph.apply(after.get_base_model(), policy, backend="eager")
    losses = [trained(model, model.get_base_model(), steps) for model in (before, after)]
    assert losses[0] == losses[1]
    assert same(before, after)
    assert torch.equal(logits(before.eval()), logits(after.eval()))
    return before


@pytest.mark.parametrize("policy", ["mxfp4", "tetrajet", "tetrajet-qema", "nvfp4-best"])
def test_adapters_added_after_apply_train_as_those_added_before(policy, products):
    assert_joins(adapted, policy, 3)
    assert len(products) == 14  # the base layers


@pytest.mark.parametrize("adapt", [adapted, partial(with_options, modules_to_save=["lm_head"])])
@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
def test_adapters_join_and_leave_between_the_steps_of_a_training(policy, adapt):
    """Compare with a training that applies the policy again after each change."""

    def joined_and_left(reapply):
        base = quantized(policy)
        losses = trained(base, base)
        model = adapt(base)
        reapply(base)
        losses += trained(model, base)
        assert runtime_of(base).count == 4
        assert model.merge_and_unload() is base
        reapply(base)
        losses += trained(base.requires_grad_(True), base)
        assert not any("lora_" in name or "base_layer" in name for name in base.state_dict())
        return base, losses

    base, losses = joined_and_left(lambda base: None)
    other, expected = joined_and_left(lambda base: fp4graph.apply(base, policy, backend="eager"))
    assert losses == expected
    assert same(base, other)


def test_the_optimizer_of_merged_adapters_may_live_on():
    """User code may keep the optimizer, although its parameters have left the model."""
    base = quantized("tetrajet-qema")
    model = adapted(base)
    of_adapters = fp4graph.prepare_optimizer(base, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    of_adapters.step()
    model.merge_and_unload()
    base.requires_grad_(True)
    trained(base, base)
    assert of_adapters.state
    assert runtime_of(base).count == 3


def test_a_merged_model_is_quantized_as_one_that_never_had_adapters(tmp_path):
    model = adapted(quantized("tetrajet"))
    trained(model, model.get_base_model())
    apart = logits(model.eval())
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    expected = type(merged).from_pretrained(tmp_path).eval()
    fp4graph.apply(expected, "tetrajet", backend="eager")
    assert torch.equal(logits(merged), logits(expected))
    assert not torch.equal(logits(merged), apart)  # Q(W + BA) is not Q(W) + BA


def test_an_export_of_merged_weights_has_their_names_and_quantized_values(tmp_path):
    """The definition quantizes W + BA, which PEFT computes before the merge."""
    model = adapted(quantized("tetrajet"))
    trained(model, model.get_base_model())
    layers = dict(model.get_base_model().named_modules())
    sums = {
        name: (layer.base_layer.weight + layer.get_delta_weight("default")).detach()
        for name, layer in layers.items()
        if hasattr(layer, "base_layer") and ".0." in name
    }
    merged = model.merge_and_unload()
    for act in (partial(fp4graph.export, merged, tmp_path / "out"), lambda: list(fp4graph.packed_weights(merged))):
        with pytest.raises(fp4graph.Error, match=r"has not been called since.*call it once"):
            act()
    logits(merged.eval())
    names = {matrix.name for matrix in fp4graph.packed_weights(merged)}
    assert sums.keys() <= names
    assert not any("base_layer" in name for name in names)
    fp4graph.export(merged, tmp_path / "out")
    state = fp4graph.load_quantized(tiny.qwen3(), tmp_path / "out").state_dict()
    spec = QuantSpec("e2m1", 32, ScaleSpec("e8m0", "ceil"), ties="up")
    for name, weight in sums.items():
        assert torch.equal(state[f"{name}.weight"], oracle.quantized(weight, spec, make_key(0)))


def test_a_module_that_is_trained_beside_the_adapters_joins_too():
    model = assert_joins(lambda base: with_options(base, modules_to_save=["lm_head"]), "tetrajet")
    base = model.get_base_model()
    head = base.lm_head
    assert not torch.equal(head.modules_to_save["default"].weight, head.original_module.weight)
    fp4graph.remove(base)  # the copied head keeps no call of fp4graph
    plain = with_options(tiny.qwen3(), modules_to_save=["lm_head"])
    plain.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), logits(plain.eval()))


@pytest.mark.parametrize("tied", [False, True])
def test_trainable_rows_of_the_embedding_join_with_adapters(tied):
    def with_rows(base):
        base.config.tie_word_embeddings = tied
        base.tie_weights()
        return with_options(base, trainable_token_indices=[5, 9])

    model = assert_joins(with_rows, "tetrajet")
    (rows,) = {value for name, value in model.named_parameters() if "trainable_tokens_delta" in name}
    assert not torch.equal(rows.detach(), tiny.qwen3().model.embed_tokens.weight[[5, 9]])
    assert torch.isfinite(logits(model.merge_and_unload())).all()


@pytest.mark.parametrize("match", [{"role": "adapter"}, {"module": "*lora_A*"}])
def test_adapters_that_join_are_quantized_where_a_rule_says_so(match, products):
    data = {**fp4graph.load_policy("mxfp4").to_data(), "name": "p"}
    rule = {"name": "adapters", "match": match, "quantize": {"element": "e2m1", "block": 32}, "required": False}
    data["rules"].append(rule)
    assert_joins(adapted, data)
    assert len([name for name in products if "lora_A" in name]) == 6
    assert len([name for name in products if "lora_B" in name]) == (0 if "module" in match else 6)


def test_other_modules_that_join_are_refused_until_the_policy_is_applied_again():
    class More(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.more = layer, torch.nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(self.more(x))

    base = quantized("tetrajet")
    base.model.layers[0].mlp = More(base.model.layers[0].mlp)
    with pytest.raises(fp4graph.CaptureError, match=r"added to the model after .* call fp4graph\.apply"):
        base(input_ids=TOKENS)
    fp4graph.apply(base, "tetrajet", backend="eager")
    trained(base, base)


@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
def test_adapters_of_parameters_are_refused_with_a_remedy_that_serves(policy):
    base = quantized(policy)
    model = with_options(base, target_modules=[], target_parameters=["q_proj.weight"])
    with pytest.raises(fp4graph.CaptureError, match=r"q_proj\.base_layer\.weight: .* in target_modules="):
        model(input_ids=TOKENS)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_packed_base_trains_generates_and_merges(checkpointing, tmp_path):
    outcomes = []
    for packs in (False, True):
        model = adapted(tiny.qwen3())
        base = model.get_base_model()
        if checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        fp4graph.apply(base, "tetrajet", backend="eager")
        if packs:
            fp4graph.pack_frozen(base)
            assert "model.layers.0.mlp.up_proj.weight" not in dict(base.named_parameters())
        model.train()
        losses = trained(model, base)
        tokens = generated(model, 4)
        model.save_pretrained(tmp_path / str(packs))
        outcomes.append((losses, tokens, load_file(tmp_path / str(packs) / "adapter_model.safetensors")))
    assert not differences(*outcomes)
    fp4graph.unpack_frozen(base)
    assert torch.isfinite(logits(model.merge_and_unload())).all()


@pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")
def test_explain_finds_the_sites_that_dora_trains():
    def dora():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["0", "2"], use_dora=True)
        layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        return peft.get_peft_model(layers, config).get_base_model()

    data, x = one_rule(quantize=quantizer() | {"rounding": "stochastic"}), torch.randn(8, 64)
    model = fp4graph.apply(dora(), data, backend="eager", example_inputs=x)
    model(x).square().sum().backward()
    trained = sorted(site.module for site in runtime_of(model).sites if site.quantized)
    explained = sorted(site.module for site in fp4graph.explain(dora(), data, x).sites if site.quantized)
    assert trained == explained == ["0.base_layer", "2.base_layer"]
    strict = fp4graph.apply(dora(), data, backend="eager", strict=True)
    with pytest.raises(fp4graph.CaptureError, match=r"graph break parts that call from this.*leave out strict=True"):
        strict(x)
