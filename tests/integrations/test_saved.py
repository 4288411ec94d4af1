"""Models of Hugging Face's save_pretrained and from_pretrained: ``apply`` restores the state of techniques."""

import pickle

import pytest
import torch
import transformers

import fp4graph
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.steps import descend, differences
from tests.helpers.training import prepared

TOKENS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def trained(llama, tmp_path):
    model = fp4graph.apply(llama(), "tetrajet-qema", backend="eager")
    descend(lambda: model(input_ids=TOKENS, labels=TOKENS).loss, prepared(model, torch.optim.SGD, lr=1.0), 3)
    model.save_pretrained(tmp_path)
    return model


def loaded(folder, variant=None):
    return transformers.LlamaForCausalLM.from_pretrained(folder, variant=variant)


def entries(model):
    return {key: value for key, value in model.state_dict().items() if "_fp4graph" in key}


@pytest.mark.slow
def test_the_same_policy_finds_its_state(trained, tmp_path):
    again = fp4graph.apply(loaded(tmp_path), "tetrajet-qema", backend="eager")  # without a warning
    assert not differences(entries(again), entries(trained))
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=TOKENS).logits, trained.eval()(input_ids=TOKENS).logits)
    # A pickled copy keeps the state that it holds; the folder's state does not replace it.
    again.model.layers[0].mlp.down_proj._fp4graph_q_ema_weight.add_(1)
    copied = fp4graph.apply(pickle.loads(pickle.dumps(again)), "tetrajet-qema", backend="eager")
    assert not differences(entries(copied), entries(again))


def another(folder):
    """Make a model with other weights from the folder's configuration; it remembers the folder's name."""
    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))


def changed(folder):
    """Load the model and change one weight."""
    model = loaded(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.add_(1)
    return model


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("make", [another, changed])
def test_the_state_begins_anew_with_other_weights(trained, tmp_path, make):
    with pytest.warns(fp4graph.PolicyWarning, match=r"14 of its entries are left out .* is not what the folder holds"):
        model = fp4graph.apply(make(tmp_path), "tetrajet-qema", backend="eager")
    assert model._fp4graph_forwards == 0
    layer = model.model.layers[0].mlp.down_proj
    assert torch.equal(layer._fp4graph_q_ema_weight, layer.weight.detach())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"max_shard_size": "20kB"}, {}, {"variant": "fp16"}, {"variant": "fp16", "max_shard_size": "20kB"}],
    ids=["sharded", "one file", "variant", "sharded variant"],
)
def test_the_state_is_read_from_every_kind_of_file(trained, tmp_path, llama, options):
    folder, variant = tmp_path / "other", options.get("variant")
    if variant is not None:  # beside other weights without state, which transformers does not replace
        llama().save_pretrained(folder)
    trained.save_pretrained(folder, **options)
    if not options:  # the format of older versions
        torch.save(trained.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    again = fp4graph.apply(loaded(folder, variant), "tetrajet-qema", backend="eager")
    assert not differences(entries(again), entries(trained))
    if variant is not None:
        fp4graph.apply(loaded(folder), "tetrajet-qema", backend="eager")  # without a warning


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this state was saved under policy:fp4graph.PolicyWarning")
def test_state_that_the_policy_does_not_keep_is_warned_of(trained, tmp_path):
    with pytest.warns(fp4graph.PolicyWarning, match="14 of its entries are left out .*keeps nothing under these names"):
        fp4graph.apply(loaded(tmp_path), "tetrajet", backend="eager")


def test_a_folder_without_state_is_not_warned_of(llama, tmp_path):
    llama().save_pretrained(tmp_path)
    fp4graph.apply(loaded(tmp_path), "tetrajet-qema", backend="eager")  # without a warning


def test_a_folder_of_the_oldest_format_of_torch_is_read(llama, tmp_path):
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    fp4graph.apply(loaded(tmp_path), "tetrajet-qema", backend="eager")


@pytest.mark.parametrize("later", [False, True], ids=["now", "of a later phase"])
def test_the_state_of_experts_that_transformers_renames_in_a_folder_is_found(tmp_path, later):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(vocab_size=64, num_hidden_layers=1, num_local_experts=2, **sizes)
    rules = [{"name": "all", "match": {"op": ["linear", "grouped"], "block": True}, "quantize": quantizer(16)}]
    policy = one_rule(techniques=["q_ema"]) | {"rules": rules}
    model = fp4graph.apply(transformers.MixtralForCausalLM(config), policy, backend="eager")
    for value in entries(model).values():
        value.add_(1)
    if later:
        policy = one_rule(techniques=[], phases=[{"at": 1, "techniques": ["q_ema"]}]) | {"rules": rules}
        former, model = model, fp4graph.apply(transformers.MixtralForCausalLM(config), policy, backend="eager")
        model.load_state_dict(former.state_dict())
    model.save_pretrained(tmp_path)
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    assert len(entries(fp4graph.apply(again, policy, backend="eager"))) == 6
    assert not differences(entries(again), entries(model))
