"""The bytes, sizes and tokenizers of exports, and the constants of activations."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import fp4graph
from fp4graph.errors import Error, PolicyWarning
from tests.clients.tiny import tokenizer
from tests.exports.models import MXFP4, NVFP4, TOKENS, by_rule, configuration, llama, mixture, policy, trained, vit
from tests.helpers.training import applied

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow
WITH_INPUTS = {"operands": {"fprop.input": {}}}


def tensors(folder):
    return load_file(folder / "model.safetensors")


def test_codes_and_scales_are_those_of_fp4graph_pack(tmp_path):
    model, name = trained(llama(), policy()), "model.layers.1.mlp.up_proj"
    fp4graph.export(model, tmp_path / "out")
    spec = fp4graph.QuantSpec("e2m1", 32, fp4graph.ScaleSpec("e8m0", "ceil"))
    packed, found = fp4graph.pack(model.get_parameter(f"{name}.weight").detach(), spec), tensors(tmp_path / "out")
    assert torch.equal(found[f"{name}.weight_packed"], packed.codes)
    assert torch.equal(found[f"{name}.weight_scale"], packed.scales)


SIZES = {"hidden_size": 256, "num_hidden_layers": 4}
#: Models of 4 blocks of width 256, and the number of elements in the matrices of one block, in units of 256².
WIDE = {
    "vit": (lambda: vit(embed_dim=256, depth=4), 12),
    "llama": (lambda: llama(**SIZES, intermediate_size=512), 4 + 3 * 2),
    "qwen3-moe": (lambda: mixture("Qwen3-MoE", **SIZES, moe_intermediate_size=256, head_dim=64), 4 + 4 * 3),
}
#: Shipped policies: how many of the 4 blocks they quantize, and the bits per element with its block scale.
UNDER = {"tetrajet": (4, 4 + 8 / 32), "nvfp4-te": (2, 4 + 8 / 16)}


@pytest.mark.filterwarnings("ignore:.*ignores the global scales of experts")
@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("kind", ["vit", *(pytest.param(kind, marks=pytest.mark.long) for kind in list(WIDE)[1:])])
def test_sizes_are_those_of_the_formats_arithmetic(kind, under, tmp_path):
    """nvfp4-te keeps the first and the last block. A matrix has at most 4 more bytes, of a global scale."""
    (make, of_block), (blocks, bits) = WIDE[kind], UNDER[under]
    model = trained(make(), under, 1)
    fp4graph.export(model, tmp_path / "out", activations=False, sibling_scales="own")
    assert all(p.dtype == torch.float32 for p in model.parameters())
    quantized = blocks * of_block * 256**2
    expected = quantized * bits / 8 + (sum(p.numel() for p in model.parameters()) - quantized) * 4
    assert (tmp_path / "out/model.safetensors").stat().st_size == pytest.approx(expected, rel=0.03)


@pytest.mark.long
def test_the_tokenizer_of_the_folder_is_copied_or_the_argument_is_written(tmp_path):
    llama().save_pretrained(tmp_path / "in")
    for name in ("in", "in/qformer_tokenizer"):  # InstructBLIP has a second tokenizer, in a folder inside
        tokenizer().save_pretrained(tmp_path / name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    fp4graph.export(trained(loaded, policy(), 0), tmp_path / "out")
    for name in ("tokenizer.json", "qformer_tokenizer/tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    assert (tmp_path / "out/generation_config.json").exists()
    fp4graph.export(trained(llama(), policy(), 0), tmp_path / "other", tokenizer=tokenizer())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "other").vocab_size == 64


@pytest.mark.parametrize(
    ("layout", "quantizer"), [("compressed-tensors", [MXFP4]), ("modelopt", [NVFP4, "tensor_scaling"])]
)
def test_packed_weights_are_written_like_parameters(layout, quantizer, tmp_path):
    """With the same values; powers of two may lie in scales or in elements."""
    under = policy(*quantizer, operands={"dgrad.weight": {"source": "fprop"}})
    model = trained(llama(), under, 1).requires_grad_(False)
    for folder in ("plain", "packed"):
        fp4graph.export(model, tmp_path / folder, format=layout, sibling_scales="own")
        fp4graph.pack_frozen(model)
    first, second = (tmp_path / "plain", tmp_path / "packed")
    assert (second / "config.json").read_text() == (first / "config.json").read_text()
    assert tensors(second).keys() == tensors(first).keys()
    plain, packed = (fp4graph.load_quantized(llama(), folder).state_dict() for folder in (first, second))
    assert all(torch.equal(packed[name], plain[name]) for name in plain)


@pytest.mark.parametrize("given", [True, False])
def test_a_tokenizer_keeps_all_of_its_chat_templates(given, tmp_path):
    """transformers saves each template but the default in a folder inside the folder of the tokenizer."""
    (several := tokenizer()).chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    several.save_pretrained(tmp_path / "in")
    model = trained(llama(), policy(), 0)
    model.name_or_path = str(tmp_path / "in")
    fp4graph.export(model, tmp_path / "out", tokenizer=several if given else None)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == several.chat_template


# ---------------------------------------------------------------------- activations


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "kappa"),
    [({}, 6 * 448), ({"target": 256}, 6 * 256), ({"headroom": 0.5}, 6 * 224), ({"gradient_target": 256}, 6 * 448)],
    ids=str,
)
def test_calibration_measures_the_scales_of_activations(options, kappa, tmp_path):
    """1/γ is κ over the amax of the layer's input in all batches; it is 1 where the policy has no tensor scale."""
    data = policy(NVFP4, **WITH_INPUTS)
    without = {"match": {"module": "model.layers.0.mlp.up_proj"}, "quantize": NVFP4}
    data["rules"] = [without, *({**rule, "techniques": [{"tensor_scaling": options}]} for rule in data["rules"])]
    model, layer, largest = trained(llama(), data), "model.layers.2.mlp.down_proj", []
    batches = [TOKENS, TOKENS.flip(1)]
    with torch.no_grad():
        handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, x: largest.append(x[0].abs().max()))
        for batch in batches:
            model(batch)
        handle.remove()
    fp4graph.export(model, tmp_path / "out", calibration=batches, sibling_scales="own")
    scale = tensors(tmp_path / "out")[f"{layer}.input_global_scale"]
    torch.testing.assert_close(scale, (kappa / max(largest)).reshape(1), rtol=2**-22, atol=0)  # two roundings
    assert tensors(tmp_path / "out")["model.layers.0.mlp.up_proj.input_global_scale"] == 1
    groups = configuration(tmp_path / "out")["config_groups"]
    assert {group["input_activations"]["dynamic"] for group in groups.values()} == {"local"}
    reader = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert reader(TOKENS).logits.isfinite().all()


def test_calibration_leaves_each_module_in_its_own_mode(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(), nn.BatchNorm1d(32))
    applied(model, by_rule(NVFP4, "tensor_scaling"))(torch.randn(8, 32))
    model[2].eval()
    for batches, error in (([], pytest.raises(Error, match="is empty")), ([torch.randn(8, 32)], nullcontext())):
        with error:
            fp4graph.export(model, tmp_path / "out", calibration=batches)
        assert [module.training for module in model.modules()] == [True, True, True, False]


def test_calibration_leaves_the_recording_of_statistics_on(tmp_path):
    model, x = applied(nn.Sequential(nn.Linear(32, 32)), by_rule(NVFP4, "tensor_scaling")), torch.randn(8, 32)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(x)
    with fp4graph.lab.Statistics(model, optimizer, directory=tmp_path / "log", every=1):
        fp4graph.export(model, tmp_path / "out", calibration=[x])
        model(x).sum().backward()
        optimizer.step()
    assert {row["step"] for row in fp4graph.lab.read(tmp_path / "log").rows} == {1}


@pytest.mark.long
def test_without_calibration_weights_alone_are_written(tmp_path):
    model = trained(llama(), policy(NVFP4, "tensor_scaling", **WITH_INPUTS), 0)
    with pytest.warns(PolicyWarning, match="only weights are exported"):
        fp4graph.export(model, tmp_path / "out", sibling_scales="own")
    assert configuration(tmp_path / "out")["config_groups"]["group_0"]["input_activations"] is None


@pytest.mark.long
def test_experts_in_nvfp4_warn_of_the_reader_that_loses_their_scale(tmp_path):
    model = trained(mixture("Qwen3-MoE"), policy(NVFP4, "tensor_scaling"))
    with pytest.warns(PolicyWarning, match="ignores the global scales of experts"):
        fp4graph.export(model, tmp_path / "out", sibling_scales="own")


@pytest.mark.long
def test_calibrated_activations_are_read_by_the_converter_from_modelopt(tmp_path):
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    model = trained(llama(), policy(NVFP4, "tensor_scaling", **WITH_INPUTS))
    options = {"calibration": [TOKENS], "sibling_scales": "own"}
    for name, layout in (("out", "modelopt"), ("own", "compressed-tensors")):
        fp4graph.export(model, tmp_path / name, format=layout, **options)
    config = configuration(tmp_path / "out")
    assert config["quant_algo"] == "NVFP4"
    convert_checkpoint(tmp_path / "out", tmp_path / "converted", ModelOptNvfp4Converter(config["ignore"], ["Linear"]))
    own, converted = tensors(tmp_path / "own"), tensors(tmp_path / "converted")
    assert own.keys() == converted.keys()
    for key, value in own.items():
        assert torch.equal(value.reshape(-1), converted[key].reshape(-1)), key
    assert tensors(tmp_path / "out")["model.layers.0.mlp.up_proj.input_scale"].dtype == torch.float32
