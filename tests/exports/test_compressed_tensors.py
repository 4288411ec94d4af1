"""The compressed-tensors layout, read by transformers and by the library's own decompressor."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import fp4graph
from fp4graph.errors import PolicyWarning
from tests.exports.models import (
    MODELS,
    MXFP4,
    NVFP4,
    TOKENS,
    fprop_parameters,
    keeping,
    llama,
    mixture,
    multiplied,
    policy,
    trained,
    vit,
)

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow
STEPS = [2, pytest.param(50, marks=pytest.mark.long)]
FURTHER = [pytest.param(name, marks=pytest.mark.long) for name in ("tetrajet", "tetrajet-qema")]
QUICK = ["llama", pytest.param("qwen3-moe", marks=pytest.mark.long)]


def read(folder, **options):
    """Load a checkpoint by transformers, in fp32: its reader leaves experts in bf16 whatever dtype is asked for."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "num_experts"):
        options["experts_implementation"] = "grouped_mm"
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how, **options).float().eval()


def decompressed(folder):
    return read(folder, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))


def dequantized_checkpoint(folder):
    """Have the library make a plain checkpoint of ``folder``, and return the plain one's folder."""
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    plain = folder.with_name("plain")
    convert_checkpoint(folder, plain, CompressedTensorsDequantizer(folder))
    return plain


@torch.no_grad()
def same_activations(reader, under):
    """Return the logits of the reader's weights with activations quantized as ``under`` says."""
    operands = ("fprop.weight", "dgrad.weight")
    return fp4graph.apply(reader, keeping(under, *operands), backend="eager")(TOKENS).logits


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", QUICK)
def test_mxfp4_is_read_bit_for_bit(name, steps, tmp_path):
    model = trained(MODELS[name](), "tetrajet", steps)
    fp4graph.export(model, tmp_path / "out")
    reader = decompressed(tmp_path / "out")
    wanted = fprop_parameters(model)
    assert len(wanted) == 3 * (7 if name == "llama" else 6)
    for key, weight in wanted.items():
        assert torch.equal(reader.get_parameter(key), weight), key
    with torch.no_grad():
        assert torch.equal(same_activations(reader, "tetrajet"), model(TOKENS).logits)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*ignores the global scales of experts")
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", QUICK)
def test_nvfp4_is_read_but_for_the_readers_bf16(name, steps, tmp_path):
    """The library dequantizes to bf16, which holds 8 bits: a weight is off by 2^-9 of itself, or 2^-8 with the
    roundings of γ and its inverse before. The first and the last block are in high precision."""
    model = trained(MODELS[name](), "nvfp4-te", steps)
    fp4graph.export(model, tmp_path / "out", activations=False, sibling_scales="own")
    reader = read(dequantized_checkpoint(tmp_path / "out"))
    wanted = fprop_parameters(model)
    assert len(wanted) == (7 if name == "llama" else 6)
    plain = fp4graph.strip(model.state_dict())
    for key, weight in reader.state_dict().items():
        expected = wanted.get(key, plain[key])
        bound = expected.abs() * 2**-8 if key in wanted else torch.zeros(())
        assert ((weight - expected).abs() <= bound).all(), key
    with torch.no_grad():
        y = model(TOKENS).logits
    # Activations are rounded to FP4 after every layer, which amplifies an ulp: no more than three times what any other
    # change of the weights by 2^-9 comes to.
    changed = MODELS[name]()
    changed.load_state_dict(plain)
    generator = torch.Generator().manual_seed(1)
    for key, weight in wanted.items():
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        changed.get_parameter(key).data.copy_(weight * (1 + signs * 2**-9))
    bound = 3 * (same_activations(changed.eval(), "nvfp4-te") - y).abs().max().item()
    torch.testing.assert_close(same_activations(reader, "nvfp4-te"), y, rtol=0, atol=bound)


@pytest.mark.long
@pytest.mark.parametrize(("quantize", "operands"), [(MXFP4, {}), (NVFP4, {"weights": {"block": [16, 16]}})])
def test_weights_alone_give_the_logits_of_our_eval_forward(quantize, operands, tmp_path):
    techniques = ["tensor_scaling"] if quantize is NVFP4 else []
    model = trained(llama(), policy(quantize, *techniques, operands=operands))
    fp4graph.export(model, tmp_path / "out", sibling_scales="own")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"] is None
    assert config["ignore"] == ["lm_head"]
    with torch.no_grad():
        y, own = model(TOKENS).logits, decompressed(tmp_path / "out")(TOKENS).logits
        in_bf16 = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        compressed = in_bf16(TOKENS).logits.float()  # decompresses at its first forward
    if quantize is MXFP4:
        assert torch.equal(own, y)
    # Weights rounded to bf16 are off by 2^-9 of themselves; some of it cancels in sums.
    torch.testing.assert_close(own, y, rtol=0, atol=2**-8 * y.abs().max().item())
    # All in bf16: every activation of three blocks is rounded too.
    torch.testing.assert_close(compressed, y, rtol=0, atol=2**-5 * y.abs().max().item())


@pytest.mark.long
def test_experts_in_high_precision_stay_readable(tmp_path):
    data = policy()
    data["rules"].insert(0, {"name": "first", "match": {"first_blocks": 1, "op": ["linear", "grouped"]}, "keep": "x"})
    model = trained(mixture("qwen3-moe"), data)
    fp4graph.export(model, tmp_path / "out")
    reader = decompressed(tmp_path / "out")
    plain = fp4graph.strip(model.state_dict()) | fprop_parameters(model)
    for key, value in reader.state_dict().items():
        assert torch.equal(value, plain[key]), key


@pytest.mark.long
def test_experts_in_nvfp4_warn_of_the_reader_that_loses_their_scale(tmp_path):
    model = trained(mixture("qwen3-moe"), policy(NVFP4, "tensor_scaling"))
    with pytest.warns(PolicyWarning, match="ignores the global scales of experts"):
        fp4graph.export(model, tmp_path / "out", sibling_scales="own")


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("under", ["nvfp4-te", *FURTHER])
def test_a_vit_is_read_by_the_decompressor(under, steps, tmp_path):
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    model = trained(vit(), under, steps, x=x)
    fp4graph.export(model, tmp_path / "out", activations=False)
    found = load_file(dequantized_checkpoint(tmp_path / "out") / "model.safetensors")
    wanted = {f"{site}.weight": weight for site, weight in multiplied(model, x).items()}
    assert len(wanted) == (4 if under == "nvfp4-te" else 12)
    expected = fp4graph.strip(model.state_dict()) | wanted
    assert found.keys() == expected.keys()
    for key, value in found.items():
        bound = expected[key].abs() * (2**-8 if key in wanted and under == "nvfp4-te" else 0)
        assert ((value.float() - expected[key]).abs() <= bound).all(), key


@pytest.mark.long
def test_encode_scales_that_are_powers_of_two_are_inverted(tmp_path):
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    model = trained(vit(), "mxfp4", x=x)
    fp4graph.export(model, tmp_path / "out")
    found = load_file(dequantized_checkpoint(tmp_path / "out") / "model.safetensors")
    wanted = multiplied(model, x)
    assert wanted
    for site, weight in wanted.items():
        assert torch.equal(found[f"{site}.weight"].float(), weight), site


@pytest.mark.long
def test_two_kinds_of_blocks_in_one_model(tmp_path):
    data = policy(NVFP4)
    mlp = {"name": "mlp", "match": {"module": "*.mlp.*"}, "quantize": MXFP4, "operands": {"fprop.input": "keep"}}
    data["rules"].insert(0, mlp)
    model = trained(llama(), data)
    fp4graph.export(model, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {group["format"] for group in config["config_groups"].values()} == {
        "mxfp4-pack-quantized",
        "nvfp4-pack-quantized",
    }
    reader = read(dequantized_checkpoint(tmp_path / "out"))
    for key, weight in fprop_parameters(model).items():  # without γ both are exact in bf16
        assert torch.equal(reader.get_parameter(key), weight), key


def test_the_bytes_are_those_of_our_own_packer(tmp_path):
    """``fp4graph.pack`` is another way to the same codes and scales."""
    model = trained(llama(), policy())
    fp4graph.export(model, tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    spec = fp4graph.QuantSpec("e2m1", 32, fp4graph.ScaleSpec("e8m0", "ceil"))
    packed = fp4graph.pack(model.get_parameter(f"{name}.weight").detach(), spec)
    assert torch.equal(found[f"{name}.weight_packed"], packed.codes)
    assert torch.equal(found[f"{name}.weight_scale"], packed.scales)


@pytest.mark.parametrize(("quantize", "bits"), [(MXFP4, 4 + 8 / 32), (NVFP4, 4 + 8 / 16)])
def test_sizes_are_those_of_the_formats_arithmetic(quantize, bits, tmp_path):
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    model = trained(llama(**wide), policy(quantize), 0)
    fp4graph.export(model, tmp_path / "out")
    quantized = 2 * (4 * 256 * 256 + 3 * 256 * 512)
    kept = sum(p.numel() for p in model.parameters()) - quantized
    expected = quantized * bits / 8 + kept * 4
    assert (tmp_path / "out/model.safetensors").stat().st_size == pytest.approx(expected, rel=0.03)


#: Models of 4 blocks of width 256, each with the elements of the matrices of one block.
WIDE = {
    "vit": (lambda: vit(embed_dim=256, depth=4), 12 * 256 * 256),
    "llama": (
        lambda: llama(hidden_size=256, intermediate_size=512, num_hidden_layers=4),
        4 * 256 * 256 + 3 * 256 * 512,
    ),
    "qwen3-moe": (
        lambda: mixture("qwen3-moe", hidden_size=256, moe_intermediate_size=256, head_dim=64, num_hidden_layers=4),
        4 * 256 * 256 + 4 * 3 * 256 * 256,
    ),
}
#: Shipped policies, with the blocks of four that they quantize and the bits of an element.
UNDER = {"tetrajet": (4, 4 + 8 / 32), "nvfp4-te": (2, 4 + 8 / 16)}


@pytest.mark.filterwarnings("ignore:.*ignores the global scales of experts")
@pytest.mark.parametrize(
    ("kind", "under"),
    [
        pytest.param(kind, under, marks=() if (kind, under) == ("vit", "nvfp4-te") else pytest.mark.long)
        for kind in WIDE
        for under in UNDER
    ],
)
def test_sizes_under_shipped_policies_are_those_of_the_formats_arithmetic(kind, under, tmp_path):
    """nvfp4-te keeps the first block and the last. A matrix has 4 bytes of a global scale at most."""
    (make, of_block), (blocks, bits) = WIDE[kind], UNDER[under]
    call = {"x": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))} if kind == "vit" else {}
    model = trained(make(), under, 1, **call)
    fp4graph.export(model, tmp_path / "out", activations=False, sibling_scales="own")
    quantized = blocks * of_block
    kept = [p for p in model.parameters() if p.dtype == torch.float32]
    assert len(kept) == len(list(model.parameters()))
    expected = quantized * bits / 8 + (sum(p.numel() for p in kept) - quantized) * 4
    assert (tmp_path / "out/model.safetensors").stat().st_size == pytest.approx(expected, rel=0.03)


@pytest.mark.long
def test_shards_and_tokenizer_are_written(tmp_path):
    from tests.clients.tiny import tokenizer

    model = trained(llama(), policy(), 0)
    fp4graph.export(model, tmp_path / "out", tokenizer=tokenizer(), max_shard_size="60KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == 64
    with torch.no_grad():
        assert torch.equal(decompressed(tmp_path / "out")(TOKENS).logits, model(TOKENS).logits)


def test_the_tokenizer_of_the_folder_is_copied(tmp_path):
    from tests.clients.tiny import tokenizer

    llama().save_pretrained(tmp_path / "in")
    tokenizer().save_pretrained(tmp_path / "in")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    fp4graph.export(trained(loaded, policy(), 0), tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "in/tokenizer.json").read_bytes()
    assert (tmp_path / "out/generation_config.json").exists()


@pytest.mark.long
def test_calibration_measures_the_scales_of_activations(tmp_path):
    """1/γ = 6·448 / the largest magnitude of what the layer is given, in any batch."""
    model = trained(llama(), policy(NVFP4, "tensor_scaling", operands={"fprop.input": {}}))
    layer, largest = "model.layers.2.mlp.down_proj", []
    batches = [TOKENS, TOKENS.flip(1)]
    with torch.no_grad():
        handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, x: largest.append(x[0].abs().max()))
        for batch in batches:
            model(batch)
        handle.remove()
    fp4graph.export(model, tmp_path / "out", calibration=batches, sibling_scales="own")
    found = load_file(tmp_path / "out/model.safetensors")[f"{layer}.input_global_scale"]
    torch.testing.assert_close(found, (6 * 448 / max(largest)).reshape(1), rtol=2**-22, atol=0)  # two roundings
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    with torch.no_grad():
        assert torch.isfinite(transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.bfloat16)(TOKENS).logits).all()  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "kappa"),
    [
        ({"target": 256}, 6 * 256),
        ({"headroom": 0.5}, 6 * 224),
        ({"gradient_target": 256}, 6 * 448),
    ],
)
def test_another_target_of_the_tensor_scale_is_another_constant(options, kappa, tmp_path):
    """An activation with a tensor scale, and one without: only the first is measured."""
    rules = [{"match": {"module": "model.layers.0.mlp.up_proj"}, "quantize": NVFP4}]
    given = policy(NVFP4, {"tensor_scaling": options}, operands={"fprop.input": {}})
    given["rules"] = rules + [{**rule, "techniques": given.get("techniques", [])} for rule in given["rules"]]
    given["techniques"] = []
    model, layer, largest = trained(llama(), given, 0), "model.layers.2.mlp.down_proj", []
    with torch.no_grad():
        handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, x: largest.append(x[0].abs().max()))
        model(TOKENS)
        handle.remove()
    fp4graph.export(model, tmp_path / "out", calibration=[TOKENS], sibling_scales="own")
    found = load_file(tmp_path / "out/model.safetensors")
    torch.testing.assert_close(
        found[f"{layer}.input_global_scale"], (kappa / largest[0]).reshape(1), rtol=2**-22, atol=0
    )
    assert found["model.layers.0.mlp.up_proj.input_global_scale"] == 1


@pytest.mark.long
def test_without_calibration_weights_alone_are_written(tmp_path):
    model = trained(llama(), policy(NVFP4, "tensor_scaling", operands={"fprop.input": {}}), 0)
    with pytest.warns(PolicyWarning, match="only weights are exported"):
        fp4graph.export(model, tmp_path / "out", sibling_scales="own")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"] is None


@pytest.mark.long
def test_under_autocast_weights_are_quantized_from_its_dtype(tmp_path):
    model = trained(llama(), policy())
    with torch.autocast("cpu", torch.bfloat16):
        fp4graph.export(model, tmp_path / "out")
        wanted = fprop_parameters(model)
    reader = decompressed(tmp_path / "out")
    assert all(torch.equal(reader.get_parameter(key), weight) for key, weight in wanted.items())
    exact = fprop_parameters(model)
    assert not all(torch.equal(exact[key], weight) for key, weight in wanted.items())
