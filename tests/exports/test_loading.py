"""Checkpoints that ``fp4graph.load_quantized`` reads with a warning, and checkpoints that it refuses."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import fp4graph
from fp4graph.errors import Error, PolicyWarning
from tests.exports.models import NVFP4, Tied, by_rule, policy
from tests.helpers.steps import same
from tests.helpers.training import applied

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow
CT, MODELOPT = "compressed-tensors", "modelopt"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A small model with one layer in NVFP4, in two layouts."""
    folder = tmp_path_factory.mktemp("written")
    data = by_rule(NVFP4, "tensor_scaling", match={"module": "inner"}, operands={"fprop.input": "keep"})
    model = applied(Tied(), data)
    with torch.no_grad():
        model(torch.arange(4))
    for layout in (CT, MODELOPT):
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


def load(folder, model=None):
    return fp4graph.load_quantized(Tied() if model is None else model, folder)


def test_tied_weights_stay_tied_and_the_older_configuration_file_of_modelopt_is_read(small):
    model = load(small / MODELOPT)
    assert model.head.weight is model.embed.weight
    assert not torch.equal(model.inner.weight, Tied().inner.weight)
    (small / MODELOPT / "config.json").write_text("{}")
    assert torch.equal(model.inner.weight, load(small / MODELOPT).inner.weight)


def test_a_module_of_two_names_is_written_once_and_read(tmp_path):
    layer, x = nn.Linear(64, 64), torch.randn(4, 64)
    data = by_rule(NVFP4, operands={"fprop.input": "keep"})
    with torch.no_grad():
        model = applied(nn.Sequential(layer, nn.ReLU(), layer), data).eval()
        y = model(x)
        for layout in (CT, MODELOPT):
            fp4graph.export(model, tmp_path / layout, format=layout)
            other = nn.Linear(64, 64)
            read = load(tmp_path / layout, nn.Sequential(other, nn.ReLU(), other))
            assert torch.equal(applied(read, data).eval()(x), y)


@pytest.mark.parametrize(
    ("dtype", "factor", "message"),
    [
        (torch.bfloat16, 1.0, r"1 weights .* rounded \(inner\.weight to torch\.bfloat16\)"),
        (torch.float16, 1e30, "2 weights"),  # infinite in a shorter dtype
    ],
)
def test_numbers_that_the_dtype_of_the_model_changes_warn(dtype, factor, message, small):
    changed(small / MODELOPT, lambda tensors: tensors["embed.weight"].mul_(factor))
    with pytest.warns(PolicyWarning, match=message):
        load(small / MODELOPT, Tied().to(dtype))


UNREAD = ".*dequantized.*and apply"  # the remedy for formats that load_quantized does not read
METHODS = "not one of 'compressed-tensors', 'modelopt', 'mxfp4'"
CONFIGURATIONS = [
    (CT, {"config_groups": ["a"]}, r"config_groups must be an object; got \['a'\]"),
    (CT, {"config_groups": {"group_0": 3}}, "config_groups of group_0 must be an object; got 3"),
    (CT, {"format": ["a"]}, r"format is \"\['a'\]\""),
    (CT, {"transform_config": "x"}, "transform_config must be an object; got 'x'"),
    (MODELOPT, {"quant_algo": "MIXED_PRECISION", "quantized_layers": [1]}, "quantized_layers must be an object"),
    (MODELOPT, {"quant_method": "awq"}, f"quant_method is 'awq', {METHODS}{UNREAD}"),
    (MODELOPT, {"quant_algo": "FP8"}, f"quant_algo is 'FP8', not NVFP4 or W4A16_NVFP4{UNREAD}"),
    (CT, {"format": "pack-quantized"}, f"format is 'pack-quantized', not mxfp4-pack-quantized{UNREAD}"),
    (CT, {"transform_config": {"config_groups": {"u": {}}}}, f"transform_config changes the weights{UNREAD}"),
]


@pytest.mark.parametrize(("layout", "values", "message"), CONFIGURATIONS, ids=[str(v) for _, v, _ in CONFIGURATIONS])
def test_damaged_and_unread_configurations_are_named(layout, values, message, small):
    file = small / layout / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"] |= values
    file.write_text(json.dumps(content))
    with pytest.raises(Error, match=rf"config\.json: {message}"):
        load(small / layout)


@pytest.mark.parametrize("places", [{}, {"inner.weight": 3}, {"inner.weight": ["a"]}])
def test_a_damaged_index_is_named(places, small):
    (small / MODELOPT / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(Error, match=r"index\.json has no weight_map from tensors to file names"):
        load(small / MODELOPT)


SCALE, PACKED = "inner.weight_scale", "inner.weight_packed"
WRONG_TENSORS = {
    "no scale": (lambda t: t.pop(SCALE), r"'inner\.weight_packed' needs 'inner\.weight_scale'"),
    "no γ": (lambda t: t.pop("inner.weight_global_scale"), r"needs 'inner\.weight_global_scale'"),
    "no weight": (lambda t: t.pop(PACKED), r"lacks inner\.weight; .*has .*inner\.weight_scale"),
    "no bias": (lambda t: t.pop("inner.bias"), r"lacks inner\.bias\. Make the model"),
    "one more": (lambda t: t.update(other=torch.ones(2)), r"model\.safetensors has other, which the model lacks"),
    "zero point": (lambda t: t.update({"inner.weight_zero_point": torch.ones(2)}), r"has inner\.weight_zero_point"),
    "shape": (lambda t: t.update({"inner.bias": torch.ones(2)}), r"'inner\.bias' gives .*\[2\].*model gives \[64\]"),
    "blocks": (
        lambda t: t.update({SCALE: t[SCALE][:, :2].contiguous()}),
        r"'inner\.weight_packed' has shape \[64, 32\], which does not fit scales \[64, 2\]",
    ),
    "codes": (
        lambda t: t.update({PACKED: t[PACKED].int()}),
        r"'inner\.weight_packed' has dtype I32; two elements per byte must be U8",
    ),
    "scales": (
        lambda t: t.update({SCALE: t[SCALE].float()}),
        r"'inner\.weight_scale' has dtype F32; block scales must be U8",
    ),
    "kind": (
        lambda t: t.update({SCALE: t[SCALE].view(torch.uint8)}),
        r"'inner\.weight_scale' is a scale of mxfp4-pack-quantized, which config\.json does not name",
    ),
    "tied": (
        lambda t: t.update({"head.weight": t["embed.weight"] + 1}),
        r"'head\.weight' has other values than 'embed\.weight'.*tie_word_embeddings=False",
    ),
    "NaN": (
        lambda t: t[SCALE].view(torch.uint8).fill_(0x7F),
        r"'inner\.weight_packed' times its scales has NaN or Inf",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_wrong_tensors_are_named_with_their_file(wrong, small):
    change, message = WRONG_TENSORS[wrong]
    changed(small / CT, change)
    model = Tied()
    with pytest.raises(Error, match=rf"(?s){small / CT}.*{message}"):
        load(small / CT, model)
    if wrong != "NaN":
        assert same(model.parameters(), Tied().parameters())


def sharded(folder):
    """Split the file of a checkpoint in two with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {key: f"model-0000{1 + key.startswith('inner')}-of-00002.safetensors" for key in tensors}
    for name in set(names.values()):
        save_file({key: tensor for key, tensor in tensors.items() if names[key] == name}, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder / "model-00002-of-00002.safetensors", index, names


def test_shards_that_are_cut_off_or_lost_are_named(small):
    folder = small / CT
    expected = load(folder).inner.weight
    shard, index, names = sharded(folder)
    assert torch.equal(expected, load(folder).inner.weight)
    whole = shard.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    for length in (4, 8 + header // 2, len(whole) - 1):
        shard.write_bytes(whole[:length])
        with pytest.raises(Error, match=rf"{shard} is damaged or cut off \(.*fetch or copy it again"):
            load(folder)
    shard.write_bytes(whole)
    index.write_text(json.dumps({"weight_map": names | {"inner.more": shard.name}}))
    with pytest.raises(Error, match=rf"{shard} lacks 'inner\.more', although {index} lists"):
        load(folder)
    shard.unlink()
    with pytest.raises(Error, match=rf"{shard} is missing; the checkpoint in .* is incomplete"):
        load(folder)
    index.write_text("{")
    with pytest.raises(Error, match=rf"{index} is not JSON"):
        load(folder)


def test_folders_without_a_quantized_checkpoint_are_named(small):
    (small / CT / "config.json").write_text("{}")  # as of a checkpoint in high precision
    with pytest.raises(Error, match=r"config\.json: has no quantization_config.*with its own library"):
        load(small / CT)
    with pytest.raises(Error, match="nowhere is not a folder"):
        load(small / "nowhere")
    folder = shutil.copytree(small / MODELOPT, small / "copy")
    (folder / "model.safetensors").unlink()
    with pytest.raises(Error, match=r"model\.safetensors is missing"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(Error, match=r"cannot read .*config\.json"):
        load(folder)


def test_models_that_cannot_be_filled_are_named(small):
    with pytest.raises(Error, match=r"takes a plain model; call it before fp4graph\.apply"):
        load(small / MODELOPT, applied(nn.Linear(64, 64), policy(match={"op": "linear"})))
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(Error, match=r"'embed\.weight', which has no data \(device meta\)"):
        load(small / MODELOPT, model)
    model = Tied()
    model.inner = Conv1D(64, 64)  # a square matrix would fit either way round
    with pytest.raises(Error, match=r"'inner\.weight_packed' is \[out, in\], but inner\.weight belongs to a Conv1D"):
        load(small / CT, model)
