"""``fp4graph export`` writes checkpoints of runs and of Hugging Face models."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

import fp4graph
from fp4graph.cli import app
from tests.exports.models import NVFP4, TOKENS, llama, trained

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow
TRAIN = ["train", "digits", "--steps", "2", "--batch-size", "8", "--validation-batches", "1", "--device", "cpu"]


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_a_run(tmp_path):
    rule = {"name": "blocks", "match": {"op": "linear", "block": True}, "quantize": NVFP4}
    policy = {"version": 1, "name": "two-level", "rules": [rule], "techniques": ["tensor_scaling"]}
    (tmp_path / "p.yaml").write_text(json.dumps(policy))
    assert run(*TRAIN, "--policy", tmp_path / "p.yaml", "--output", tmp_path / "run").exit_code == 0
    done = run("export", tmp_path / "run/checkpoint.pt", "--output", tmp_path / "out", "--format", "modelopt")
    assert done.exit_code == 0, done.exception
    assert "modelopt, 0." in done.output
    found = load_file(tmp_path / "out/model.safetensors")
    assert found["blocks.0.mlp.fc1.weight"].dtype == torch.uint8
    assert found["blocks.0.mlp.fc1.input_scale"] > 0  # measured on batches of the run
    assert json.loads((tmp_path / "out/config.json").read_text())["architecture"].startswith("vit")
    again = run("export", tmp_path / "run", "--output", tmp_path / "out")
    assert again.exit_code != 0
    assert "already exists" in str(again.exception)


@pytest.mark.long
def test_a_hugging_face_folder_with_the_state_of_techniques(tmp_path):
    model = trained(llama(), "tetrajet-qema", 3)
    model.save_pretrained(tmp_path / "model")
    target = tmp_path / "out"
    done = run("export", tmp_path / "model", "--policy", "tetrajet-qema", "--output", target, "--weights-only")
    assert done.exit_code == 0, done.exception
    fp4graph.export(model, tmp_path / "direct", activations=False)
    found, direct = (load_file(folder / "model.safetensors") for folder in (target, tmp_path / "direct"))
    assert found.keys() == direct.keys()
    assert all(torch.equal(value, direct[key]) for key, value in found.items())
    assert transformers.AutoConfig.from_pretrained(target).architectures == ["LlamaForCausalLM"]
    assert model(TOKENS).logits.shape == (2, 24, 97)


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
    done = run("export", tmp_path, "--output", tmp_path / "out", *options)
    assert done.exit_code != 0
    assert message in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_cut_off(tmp_path):
    assert run(*TRAIN, "--policy", "tetrajet", "--output", tmp_path / "run").exit_code == 0
    file = tmp_path / "run/checkpoint.pt"
    file.write_bytes(file.read_bytes()[:-1000])
    done = run("export", tmp_path / "run", "--output", tmp_path / "out")
    assert "truncated, damaged, or not by torch.save" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_the_error_of_one_tensor_scale_is_printed(tmp_path):
    rule = {"name": "blocks", "match": {"op": "linear", "block": True}, "quantize": NVFP4}
    policy = {"version": 1, "name": "two-level", "rules": [rule], "techniques": ["tensor_scaling"]}
    (tmp_path / "p.yaml").write_text(json.dumps(policy))
    llama().save_pretrained(tmp_path / "model")
    options = "--policy", tmp_path / "p.yaml", "--weights-only", "--output", tmp_path / "out"
    command = "export", tmp_path / "model", *options
    assert "--sibling-scales share" in str(run(*command).exception)
    done = run(*command, "--sibling-scales", "share")
    assert done.exit_code == 0, done.exception
    assert "model.layers.2.mlp: one tensor scale, relative error " in done.output
