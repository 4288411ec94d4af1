"""``fp4graph export`` writes checkpoints of runs and of Hugging Face models."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import fp4graph
from tests.exports.models import NVFP4, TOKENS, llama, trained
from tests.helpers.commands import run
from tests.helpers.policies import one_rule

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow
TRAIN = ["train", "digits", "--steps", "2", "--batch-size", "8", "--validation-batches", "1", "--device", "cpu"]


@pytest.fixture
def two_level(tmp_path):
    """A file with a policy that has tensor scales."""
    policy = one_rule(match={"op": "linear", "block": True}, quantize=NVFP4, techniques=["tensor_scaling"])
    (tmp_path / "p.yaml").write_text(json.dumps(policy))
    return tmp_path / "p.yaml"


def test_the_checkpoint_of_a_run_is_exported(two_level, tmp_path):
    assert run(*TRAIN, "--policy", two_level, "--output", tmp_path / "run").code == 0
    done = run("export", tmp_path / "run/checkpoint.pt", "--output", tmp_path / "out", "--format", "modelopt")
    assert done.code == 0, done.err
    assert "modelopt, 0." in done.out
    found = load_file(tmp_path / "out/model.safetensors")
    assert found["blocks.0.mlp.fc1.weight"].dtype == torch.uint8
    assert found["blocks.0.mlp.fc1.input_scale"] > 0  # measured on batches of the run
    assert json.loads((tmp_path / "out/config.json").read_text())["architecture"].startswith("vit")
    assert "already exists" in run("export", tmp_path / "run", "--output", tmp_path / "out").err


@pytest.mark.long
def test_a_hugging_face_folder_with_state_of_techniques_is_exported(tmp_path):
    model = trained(llama(), "tetrajet-qema", 3)
    model.save_pretrained(tmp_path / "model")
    target = tmp_path / "out"
    done = run("export", tmp_path / "model", "--policy", "tetrajet-qema", "--output", target, "--weights-only")
    assert done.code == 0, done.err
    fp4graph.export(model, tmp_path / "direct", activations=False)
    found, direct = (load_file(folder / "model.safetensors") for folder in (target, tmp_path / "direct"))
    assert found.keys() == direct.keys()
    assert all(torch.equal(value, direct[key]) for key, value in found.items())
    assert transformers.AutoConfig.from_pretrained(target).architectures == ["LlamaForCausalLM"]
    assert model(TOKENS).logits.shape == (2, 24, 97)


def test_a_hugging_face_folder_of_an_image_model_is_exported(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    images = transformers.ViTConfig(**sizes, image_size=32, patch_size=16)
    transformers.ViTForImageClassification(images).save_pretrained(tmp_path / "vit")
    done = run("export", tmp_path / "vit", "--policy", "mxfp4", "--weights-only", "--output", tmp_path / "out")
    assert done.code == 0, done.err
    assert sum("weight_packed" in name for name in load_file(tmp_path / "out/model.safetensors")) == 12


@pytest.mark.parametrize("kind", [pytest.param("the text ends with a token", marks=pytest.mark.long), "short contexts"])
def test_a_hugging_face_folder_of_a_text_model_is_captured_by_its_own_tokens(tmp_path, kind):
    """Sixteen zeros have no end of a text, and do not fit into eight positions."""
    if kind == "short contexts":
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, max_position_embeddings=8))
    else:
        sides = {f"{side}_{name}": 64 if "dim" in name else 2 for side in ("encoder", "decoder")
                 for name in ("layers", "attention_heads", "ffn_dim")}  # fmt: skip
        model = transformers.BartForSequenceClassification(transformers.BartConfig(d_model=64, vocab_size=97, **sides))
    model.save_pretrained(tmp_path / "model")
    done = run("export", tmp_path / "model", "--policy", "mxfp4", "--weights-only", "--output", tmp_path / "out")
    assert done.code == 0, done.err


def test_a_hugging_face_folder_whose_inputs_are_unknown_is_an_error(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sound = transformers.ASTConfig(**sizes, num_mel_bins=16, max_length=16)
    transformers.ASTForAudioClassification(sound).save_pretrained(tmp_path / "ast")
    done = run("export", tmp_path / "ast", "--policy", "mxfp4", "--output", tmp_path / "out")
    assert "the inputs of" in done.err
    assert "fp4graph.export(model, folder)" in done.err


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda folder: None, [], "neither the folder of a run"),
        (lambda folder: (folder / "config.json").write_text("{}"), [], "give it with --policy"),
        (lambda folder: (folder / "run.json").write_text("{}"), [], "is not the record of a run"),
        (lambda folder: (folder / "run.json").write_text("{}"), ["--policy", "mxfp4"], "leave --policy"),
    ],
)
def test_what_cannot_be_exported(make, options, message, tmp_path):
    make(tmp_path)
    assert message in run("export", tmp_path, "--output", tmp_path / "out", *options).err
    assert not (tmp_path / "out").exists()


def test_a_truncated_checkpoint_is_an_error(tmp_path):
    assert run(*TRAIN, "--policy", "tetrajet", "--output", tmp_path / "run").code == 0
    file = tmp_path / "run/checkpoint.pt"
    file.write_bytes(file.read_bytes()[:-1000])
    done = run("export", tmp_path / "run", "--output", tmp_path / "out")
    assert "truncated, damaged, or not written by torch.save" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_the_error_that_a_shared_tensor_scale_adds_is_printed(two_level, tmp_path):
    llama().save_pretrained(tmp_path / "model")
    command = "export", tmp_path / "model", "--policy", two_level, "--weights-only", "--output", tmp_path / "out"
    assert "--sibling-scales share" in run(*command).err
    done = run(*command, "--sibling-scales", "share")
    assert done.code == 0, done.err
    assert "model.layers.2.mlp: one tensor scale, relative error " in done.out
