"""``fp4graph.load_quantized`` gives the values that fprop multiplied with; other people's readers agree."""

from __future__ import annotations

import json
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import fp4graph
from fp4graph.errors import Error, PolicyWarning
from tests.exports.models import MODELS, MXFP4, NVFP4, TOKENS, fprop_parameters, mixture, multiplied, policy, trained

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
STEPS = [3, pytest.param(50, marks=pytest.mark.long)]
NAMES = ["vit", pytest.param("llama", marks=pytest.mark.long), pytest.param("qwen3-moe", marks=pytest.mark.long)]
EXPERTS = {"match": {"op": "grouped"}}


def fresh(name):
    """Make a model as a user does for a checkpoint: another initialization."""
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def call(name):
    return {"x": X} if name == "vit" else {}


def wanted(name, model):
    """Return what fprop multiplies with, by parameters."""
    if name != "vit":
        return fprop_parameters(model)
    return {f"{site}.weight": w for site, w in multiplied(model, X).items()}


def exported(folder, name, under, steps, layout="compressed-tensors"):
    """Train, export and return the model, with all that a plain model would hold of it."""
    model = trained(MODELS[name](), under, steps, **call(name))
    fp4graph.export(model, folder, format=layout, activations=False, sibling_scales="own")
    return model, fp4graph.strip(model.state_dict()) | wanted(name, model)


def by_numpy(folder, module):
    """Dequantize a weight of ModelOpt's layout in float64 by another library's FP4, and round it to fp32."""
    found = load_file(folder / "model.safetensors")
    codes = found[f"{module}.weight"].numpy()
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    elements = pairs.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = found[f"{module}.weight_scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    gamma = found[f"{module}.weight_scale_2"].double().numpy()
    return (elements * np.repeat(scales.astype(np.float64), 16, -1) * gamma).astype(np.float32)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", NAMES)
def test_mxfp4_comes_back_bit_for_bit_and_stays(name, steps, tmp_path):
    model, expected = exported(tmp_path / "out", name, "tetrajet", steps)
    loaded = fp4graph.load_quantized(fresh(name), tmp_path / "out").eval()
    values = loaded.state_dict()
    assert values.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in values.items())
    # Weights in FP4 are quantized to themselves: the same forward, and a training can go on from there.
    fp4graph.apply(loaded, "tetrajet", backend="eager")
    with torch.no_grad():
        y, own = (each(X) if name == "vit" else each(TOKENS).logits for each in (model, loaded))
    assert torch.equal(own, y)
    assert all(torch.equal(w, expected[key]) for key, w in wanted(name, loaded).items())
    trained(loaded, "tetrajet", 1, **call(name))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", NAMES)
def test_nvfp4_comes_back_bit_for_bit_from_modelopts_layout(name, steps, tmp_path):
    model, expected = exported(tmp_path / "out", name, "nvfp4-te", steps, "modelopt")
    loaded = fp4graph.load_quantized(fresh(name), tmp_path / "out").eval()
    values = loaded.state_dict()
    assert values.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in values.items())
    one = next(key for key in wanted(name, model) if key.endswith("weight"))
    assert np.array_equal(values[one].numpy(), by_numpy(tmp_path / "out", one.removesuffix(".weight")))
    # Codes and block scales stay; γ is amax / (6·448) of the rounded product 6·448·γ, an ulp away at most.
    fp4graph.apply(loaded, "nvfp4-te", backend="eager")
    with torch.no_grad():
        loaded(X) if name == "vit" else loaded(TOKENS)
    for key, w in wanted(name, loaded).items():
        torch.testing.assert_close(w, expected[key], rtol=2**-22, atol=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*ignores the global scales of experts")
@pytest.mark.parametrize("name", MODELS)
def test_nvfp4_of_compressed_tensors_is_an_ulp_away_at_most(name, tmp_path):
    """The layout has 1/γ. The inverse of the rounded inverse is γ for a significand below √2, else perhaps another."""
    _, expected = exported(tmp_path / "out", name, "nvfp4-te", 2)
    for key, value in fp4graph.load_quantized(fresh(name), tmp_path / "out").state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=2**-22, atol=0)
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    convert_checkpoint(tmp_path / "out", tmp_path / "plain", CompressedTensorsDequantizer(tmp_path / "out"))
    theirs = load_file(tmp_path / "plain/model.safetensors")
    if name != "qwen3-moe":  # whose experts have names of their own there
        own = fp4graph.load_quantized(fresh(name), tmp_path / "out").state_dict()
        for key, value in own.items():
            torch.testing.assert_close(value.to(theirs[key].dtype), theirs[key], rtol=2**-7, atol=0)


@pytest.mark.long
def test_nvfp4_without_a_tensor_scale_is_exact(tmp_path):
    model = trained(MODELS["vit"](), policy(NVFP4), 1, x=X)
    fp4graph.export(model, tmp_path / "out")
    loaded = fp4graph.load_quantized(fresh("vit"), tmp_path / "out")
    for key, weight in wanted("vit", model).items():
        assert torch.equal(loaded.get_parameter(key), weight), key


@pytest.mark.long
def test_transformers_reads_the_same(tmp_path):
    model = trained(MODELS["llama"](), policy(MXFP4), 0)
    fp4graph.export(model, tmp_path / "out", max_shard_size="60KB")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    made = fp4graph.load_quantized(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "out")
    reader = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    )
    theirs = reader.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in made.state_dict().items())
    made.save_pretrained(tmp_path / "plain")  # a plain model, which says nothing of quantization
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


@pytest.mark.long
def test_experts_of_gpt_oss(tmp_path):
    model = trained(mixture("gpt-oss"), policy(MXFP4, **EXPERTS), 0)
    fp4graph.export(model, tmp_path / "out", format="gpt-oss")
    loaded = fp4graph.load_quantized(mixture("gpt-oss"), tmp_path / "out")
    reader = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    theirs = reader.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in loaded.state_dict().items())
    for key, weight in fprop_parameters(model).items():
        assert torch.equal(loaded.get_parameter(key), weight.mT), key


@pytest.mark.long
def test_experts_in_high_precision_beside_quantized_ones(tmp_path):
    data = policy(MXFP4)
    data["rules"].insert(0, {"name": "first", "match": {"first_blocks": 1, "op": ["linear", "grouped"]}, "keep": "x"})
    model = trained(mixture("qwen3-moe"), data, 1)
    fp4graph.export(model, tmp_path / "out")
    expected = fp4graph.strip(model.state_dict()) | fprop_parameters(model)
    loaded = fp4graph.load_quantized(fresh("qwen3-moe"), tmp_path / "out").state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in loaded.items())


@pytest.mark.long
def test_one_projection_in_bf16_leaves_the_other_experts_exact(tmp_path):
    """It shares a tensor of the model with them, and comes first."""
    exported(tmp_path / "out", "qwen3-moe", policy(NVFP4, match={"op": "grouped"}), 1, layout="modelopt")
    whole = fp4graph.load_quantized(fresh("qwen3-moe"), tmp_path / "out").state_dict()
    name = "model.layers.0.mlp.experts.0.gate_proj"
    changed(tmp_path / "out", lambda tensors: _in_bf16(tensors, name))
    mixed = fp4graph.load_quantized(fresh("qwen3-moe"), tmp_path / "out").state_dict()
    differs = {key: (mixed[key] != whole[key]) for key in whole if not torch.equal(mixed[key], whole[key])}
    ((key, where),) = differs.items()
    assert key == "model.layers.0.mlp.experts.gate_up_proj"
    rows = where.shape[1] // 2
    assert not where[1:].any()
    assert not where[0, rows:].any()


def _in_bf16(tensors, name):
    packed = [key for key in tensors if key.startswith(f"{name}.")]
    lines, half = tensors[f"{name}.weight"].shape
    for key in packed:
        del tensors[key]
    tensors[f"{name}.weight"] = torch.randn(lines, 2 * half, dtype=torch.bfloat16)


# ------------------------------------------------------------------ what cannot be loaded


class Tied(nn.Module):
    """Two layers, the second of which an embedding's weight is tied to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.head = nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.inner(self.embed(x)))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A small model with one layer in NVFP4, in two layouts."""
    folder = tmp_path_factory.mktemp("written")
    rule = {"name": "inner", "match": {"module": "inner"}, "quantize": NVFP4, "operands": {"fprop.input": "keep"}}
    data = {"version": 1, "name": "p", "rules": [rule], "techniques": ["tensor_scaling"]}
    model = fp4graph.apply(Tied(), data, backend="eager")
    with torch.no_grad():
        model(torch.arange(4))
    for layout in ("compressed-tensors", "modelopt"):
        fp4graph.export(model, folder / layout, format=layout)
    return folder


@pytest.fixture
def small(written, tmp_path):
    """A copy of the small model's folders."""
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


def changed(folder, change):
    """Rewrite the tensors of a checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def configured(folder, file="config.json", **values):
    content = json.loads((folder / file).read_text())
    content["quantization_config"] |= values
    (folder / file).write_text(json.dumps(content))


def test_tied_weights_are_loaded_once(small):
    model = fp4graph.load_quantized(Tied(), small / "modelopt")
    assert model.head.weight is model.embed.weight
    assert not torch.equal(model.inner.weight, Tied().inner.weight)


def test_tied_weights_of_two_values_are_an_error(small):
    changed(small / "modelopt", lambda tensors: tensors.update({"head.weight": tensors["embed.weight"] + 1}))
    message = r"model\.safetensors: 'head\.weight' has other values than 'embed\.weight'.*tie_word_embeddings=False"
    with pytest.raises(Error, match=message):
        fp4graph.load_quantized(Tied(), small / "modelopt")


@pytest.mark.parametrize(
    ("layout", "values", "message"),
    [
        ("compressed-tensors", {"config_groups": ["a"]}, r"config_groups must be an object; got \['a'\]"),
        ("compressed-tensors", {"config_groups": {"group_0": 3}}, "config_groups of group_0 must be an object; got 3"),
        ("compressed-tensors", {"format": ["a"]}, r"format is \"\['a'\]\""),
        ("compressed-tensors", {"transform_config": "x"}, "transform_config must be an object; got 'x'"),
        ("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": [1]}, "quantized_layers must be an object"),
    ],
)
def test_a_damaged_configuration_is_named(layout, values, message, small):
    configured(small / layout, **values)
    with pytest.raises(Error, match=rf"config\.json: {message}"):
        fp4graph.load_quantized(Tied(), small / layout)


@pytest.mark.parametrize("places", [{}, {"inner.weight": 3}, {"inner.weight": ["a"]}])
def test_a_damaged_index_is_named(places, small):
    (small / "modelopt/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(Error, match=r"index\.json has no weight_map from tensors to file names"):
        fp4graph.load_quantized(Tied(), small / "modelopt")


def test_numbers_that_a_shorter_dtype_makes_infinite_are_said(small):
    changed(small / "modelopt", lambda tensors: tensors["embed.weight"].mul_(1e30))
    with pytest.warns(PolicyWarning, match=r"2 weights"):
        fp4graph.load_quantized(Tied().to(torch.float16), small / "modelopt")


def test_old_checkpoints_of_modelopt_say_it_in_another_file(small):
    expected = fp4graph.load_quantized(Tied(), small / "modelopt").inner.weight
    (small / "modelopt/config.json").write_text("{}")
    assert torch.equal(expected, fp4graph.load_quantized(Tied(), small / "modelopt").inner.weight)


def test_a_model_in_another_dtype_is_said_to_be_rounded(small):
    with pytest.warns(PolicyWarning, match=r"1 weights .* rounded \(inner\.weight to torch\.bfloat16\)"):
        fp4graph.load_quantized(Tied().to(torch.bfloat16), small / "modelopt")


WRONG_TENSORS = {
    "no scale": (lambda t: t.pop("inner.weight_scale"), r"'inner\.weight_packed' needs 'inner\.weight_scale'"),
    "no γ": (lambda t: t.pop("inner.weight_global_scale"), r"needs 'inner\.weight_global_scale'"),
    "no weight": (lambda t: t.pop("inner.weight_packed"), r"lacks inner\.weight; .*has .*inner\.weight_scale"),
    "no bias": (lambda t: t.pop("inner.bias"), r"lacks inner\.bias\. Make the model"),
    "one more": (lambda t: t.update(other=torch.ones(2)), r"model\.safetensors has other, which the model lacks"),
    "zero point": (lambda t: t.update({"inner.weight_zero_point": torch.ones(2)}), r"has inner\.weight_zero_point"),
    "shape": (lambda t: t.update({"inner.bias": torch.ones(2)}), r"'inner\.bias' gives .*\[2\].*model has \[64\]"),
    "blocks": (
        lambda t: t.update({"inner.weight_scale": t["inner.weight_scale"][:, :2].contiguous()}),
        r"'inner\.weight_packed' has shape \[64, 32\], which does not fit scales \[64, 2\]",
    ),
    "codes": (
        lambda t: t.update({"inner.weight_packed": t["inner.weight_packed"].int()}),
        r"'inner\.weight_packed' has dtype I32; two elements per byte must be U8",
    ),
    "scales": (
        lambda t: t.update({"inner.weight_scale": t["inner.weight_scale"].float()}),
        r"'inner\.weight_scale' has dtype F32; block scales must be U8",
    ),
    "kind": (
        lambda t: t.update({"inner.weight_scale": t["inner.weight_scale"].view(torch.uint8)}),
        r"'inner\.weight_scale' is a scale of mxfp4-pack-quantized, which config\.json does not name",
    ),
    "NaN": (
        lambda t: t["inner.weight_scale"].view(torch.uint8).fill_(0x7F),
        r"'inner\.weight_packed' times its scales has NaN or Inf",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_wrong_tensors_are_named_with_their_file(wrong, small):
    change, message = WRONG_TENSORS[wrong]
    folder = small / "compressed-tensors"
    changed(folder, change)
    model = Tied()
    with pytest.raises(Error, match=rf"(?s){folder}.*{message}"):
        fp4graph.load_quantized(model, folder)
    if wrong != "NaN":
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), Tied().parameters(), strict=True))


@pytest.mark.parametrize(
    ("layout", "values", "message"),
    [
        (
            "modelopt",
            {"quant_method": "awq"},
            "quant_method is 'awq', not one of 'compressed-tensors', 'modelopt', 'mxfp4'",
        ),
        ("modelopt", {"quant_algo": "FP8"}, "quant_algo is 'FP8', not NVFP4 or W4A16_NVFP4"),
        ("compressed-tensors", {"format": "pack-quantized"}, "format is 'pack-quantized', not mxfp4-pack-quantized"),
        (
            "compressed-tensors",
            {"transform_config": {"config_groups": {"u": {}}}},
            "transform_config changes the weights",
        ),
    ],
)
def test_other_formats_are_named_with_the_file(layout, values, message, small):
    configured(small / layout, **values)
    with pytest.raises(Error, match=rf"config\.json: {message}.*dequantized.*and apply"):
        fp4graph.load_quantized(Tied(), small / layout)


def test_a_plain_checkpoint_is_none(small):
    (small / "compressed-tensors/config.json").write_text("{}")
    with pytest.raises(Error, match=r"config\.json: has no quantization_config.*with its own library"):
        fp4graph.load_quantized(Tied(), small / "compressed-tensors")


def sharded(folder):
    """Split the file of a checkpoint in two with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {key: f"model-0000{1 + key.startswith('inner')}-of-00002.safetensors" for key in tensors}
    for name in set(names.values()):
        save_file({key: tensor for key, tensor in tensors.items() if names[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder / "model-00002-of-00002.safetensors"


def test_shards_that_are_cut_off_or_lost(small):
    folder = small / "compressed-tensors"
    expected = fp4graph.load_quantized(Tied(), folder).inner.weight
    shard = sharded(folder)
    assert torch.equal(expected, fp4graph.load_quantized(Tied(), folder).inner.weight)
    whole = shard.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    for length in (4, 8 + header // 2, len(whole) - 1):
        shard.write_bytes(whole[:length])
        with pytest.raises(Error, match=rf"{shard} is damaged or cut off \(.*fetch or copy it again"):
            fp4graph.load_quantized(Tied(), folder)
    shard.write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["inner.more"] = shard.name
    index.write_text(json.dumps(content))
    with pytest.raises(Error, match=rf"{shard} lacks 'inner\.more', which {index} lists"):
        fp4graph.load_quantized(Tied(), folder)
    shard.unlink()
    with pytest.raises(Error, match=rf"{shard} is missing; the checkpoint in .* is incomplete"):
        fp4graph.load_quantized(Tied(), folder)
    index.write_text("{")
    with pytest.raises(Error, match=rf"{index} is not JSON"):
        fp4graph.load_quantized(Tied(), folder)


def test_folders_that_hold_no_checkpoint(small):
    with pytest.raises(Error, match="nowhere is not a folder"):
        fp4graph.load_quantized(Tied(), small / "nowhere")
    folder = shutil.copytree(small / "modelopt", small / "copy")
    (folder / "model.safetensors").unlink()
    with pytest.raises(Error, match=r"model\.safetensors is missing"):
        fp4graph.load_quantized(Tied(), folder)
    (folder / "config.json").unlink()
    with pytest.raises(Error, match=r"cannot read .*config\.json"):
        fp4graph.load_quantized(Tied(), folder)


def test_models_that_cannot_be_filled(small):
    applied = fp4graph.apply(nn.Linear(64, 64), policy(match={"op": "linear"}), backend="eager")
    with pytest.raises(Error, match=r"takes a plain model; call it before fp4graph\.apply"):
        fp4graph.load_quantized(applied, small / "modelopt")
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(Error, match=r"'embed\.weight', which has no data \(device meta\)"):
        fp4graph.load_quantized(model, small / "modelopt")
