"""Models that the command line names: timm, a factory, a Hugging Face config, and the errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp4graph.commands.models import imported, named_model, with_inputs
from fp4graph.errors import Error
from tests.helpers.commands import run

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x) * scale
        return x

class made:
    net = Net()

def with_args(): return Net(), (torch.ones(3, 32),)
def with_kwargs(): return Net(64), (), {"x": torch.ones(3, 64), "scale": 2.0}
def with_mapping(): return Net(), {"x": torch.ones(5, 32)}
def alone(): return Net(), torch.ones(4, 32)
def wrong(): return [Net()]
def picky(width): return Net(width)
def narrow(): return Net(), torch.ones(4, 31)
"""
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
TINY = ", ".join(f"{key}={value}" for key, value in SIZES.items())


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Make a folder with a package ``mine`` the current one."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/nets.py").write_text(MODULE)
    (tmp_path / "mine/broken.py").write_text("import torch\n1 / 0\n")
    (tmp_path / "mine/needy.py").write_text("import a_package_that_is_absent\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("factory", "shape", "width"),
    [("with_args", (3, 32), 32), ("with_kwargs", (3, 64), 64), ("with_mapping", (5, 32), 32), ("alone", (4, 32), 32)],
)
@pytest.mark.usefixtures("here")
def test_a_factory_gives_model_and_inputs(factory, shape, width):
    named = named_model(f"mine.nets:{factory}")
    assert named.model(*named.args, **named.kwargs).shape == shape
    assert named.model.layers[0].in_features == width
    with pytest.raises(Error, match="leave --input-size and --batch-size out"):
        named_model(f"mine.nets:{factory}", batch_size=2)


@pytest.mark.usefixtures("here")
def test_inputs_of_a_class_or_a_model_have_the_given_size():
    for text in ("mine.nets:Net", "mine.nets:made.net"):
        (x,) = named_model(text, input_size="7x32", batch_size=5).args
        assert (x.shape, x.dtype) == ((5, 7, 32), torch.float32)
    assert imported("json:dumps") is json.dumps
    for text, message in (("mine.nets", "write package.module:name"), ("mine/nets.py:alone", "without .py")):
        with pytest.raises(Error, match=message):
            imported(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine.nest:alone", "module 'mine.nest' is neither in "),
        ("yours.nets:alone", "module 'yours' is neither in "),
        ("mine.nets:alon", "has no 'alon'; did you mean 'alone'?"),
        ("sys:foo", "sys has no 'foo'"),
        ("mine:nest", "has no 'nest'"),
        ("mine.broken:x", "importing mine.broken raised ZeroDivisionError"),
        ("mine.needy:x", "importing mine.needy raised ModuleNotFoundError: No module named 'a_package_that_is_absent'"),
        ("mine.nets:wrong", "mine.nets:wrong returned list; return a model, (model, args) or (model, args, kwargs)"),
        ("mine.nets:picky", "missing 1 required positional argument: 'width'"),
        ("mine.nets:Net", "the inputs of mine.nets:Net are unknown; return (model, args)"),
        ("nothing.json", "nothing.json cannot be read as a config of transformers"),
        ("hf:LlamaConfig(hidden_size=64", "is not a config; write hf:LlamaConfig("),
        ("hf:LlamaConfig(64)", "is not a config; write hf:LlamaConfig("),
        ("hf:LlamaConfig(**{'hidden_size': 64})", "is not a config; write hf:LlamaConfig("),
        ("hf:LlamaConfig(hidden_size=open('x'))", "is not a config; write hf:LlamaConfig("),
        ("hf:LamaConfig()", "has no config 'LamaConfig'; did you mean 'LlamaConfig'?"),
        ("hf:LlamaModel()", "has no config 'LlamaModel'"),
        ("hf:LlamaConfig(hidden_size=63, num_attention_heads=2)", "raised"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_model_that_cannot_be_built_is_an_error(text, message):
    if text.startswith("hf:") or text.endswith(".json"):
        pytest.importorskip("transformers")
    with pytest.raises(Error, match=re.escape(message)):
        named_model(text)


def test_a_hugging_face_config_or_its_file_makes_the_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    named = named_model(f"hf:LlamaConfig({TINY})", input_size="9", batch_size=3)
    assert type(named.model) is transformers.LlamaForCausalLM
    assert named.model(**named.kwargs).logits.shape == (3, 9, 64)
    saved = transformers.LlamaConfig(**SIZES)
    saved.architectures = ["LlamaForSequenceClassification"]
    saved.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        model = named_model(str(path), device="meta").model
        assert type(model) is transformers.LlamaForSequenceClassification
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    saved.architectures = ["Nonesuch"]
    saved.save_pretrained(tmp_path)
    with pytest.raises(Error, match="names the architecture 'Nonesuch'"):
        named_model(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "kind", "shapes"),
    [
        ("ViTConfig(image_size=32, num_hidden_layers=1)", "ViTForImageClassification", [(2, 3, 32, 32)]),
        ("BertConfig(num_hidden_layers=1)", "BertForMaskedLM", [(2, 16)]),
        ("T5Config(num_layers=1, d_model=32, d_ff=32)", "T5ForConditionalGeneration", [(2, 16), (2, 16)]),
    ],
)
def test_a_config_without_an_architecture_gets_a_head(config, kind, shapes):
    pytest.importorskip("transformers")
    named = named_model(f"hf:{config}", device="meta")
    assert type(named.model).__name__ == kind
    assert [tuple(x.shape) for x in named.kwargs.values()] == shapes
    named.model(**named.kwargs)


def test_a_decoder_beside_an_encoder_of_features_gets_tokens():
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 64}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **ends, decoder_attention_heads=2, max_source_positions=8)
    named = with_inputs("whisper", transformers.WhisperForConditionalGeneration(config), "80x16", 3)
    assert {name: (tuple(x.shape), x.dtype) for name, x in named.kwargs.items()} == {
        "input_features": ((3, 80, 16), torch.float32),
        "decoder_input_ids": ((3, 16), torch.int64),
    }
    assert named.model(**named.kwargs).logits.shape == (3, 16, 64)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_explain_and_check_take_every_kind_of_model():
    pytest.importorskip("transformers")
    llama = json.loads(run("explain", "--model", f"hf:LlamaConfig({TINY})", "--json", "tetrajet").out)
    quantized = {site["module"]: site["quantized"] for site in llama["sites"]}
    assert quantized["model.layers.0.self_attn.q_proj"]
    assert not quantized["lm_head"]
    fits, narrow = (run("check", "tetrajet", "--model", f"mine.nets:{name}") for name in ("with_kwargs", "narrow"))
    assert (fits.code, narrow.code) == (0, 1)
    assert "2 of 2 sites quantized" in fits.out
    assert re.search(r"mine.nets:narrow: the forward raised.*shapes \(4, 31\)", narrow.err, re.DOTALL)


@pytest.mark.long
@pytest.mark.process
def test_the_installed_command_finds_the_current_folder(here):
    command = [str(Path(sys.executable).with_name("fp4graph")), "explain", "--model", "mine.nets:alone", "tetrajet"]
    done = subprocess.run(command, cwd=here, env=os.environ, capture_output=True, text=True, timeout=120, check=False)
    assert "2 of 2 sites quantized" in done.stdout, done.stderr
