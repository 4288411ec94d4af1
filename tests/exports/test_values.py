"""Exports hold the values that fprop multiplies, as read by fp4graph, by other libraries and by definition."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fp4graph
from tests.exports.models import (
    GROUPED,
    MODELS,
    MXFP4,
    NVFP4,
    SQUARE,
    configuration,
    keeping,
    logits,
    modelopt_parts,
    multiplied,
    policy,
    trained,
)

pytest.importorskip("compressed_tensors")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*ignores the global scales of experts")]
ALONE = {"activations": False, "sibling_scales": "own"}


def keeping_the_first(data: Any) -> Any:
    """Add a rule that keeps the first block of a model in high precision."""
    rule = {"name": "first", "match": {"first_blocks": 1, "op": ["linear", "grouped"]}, "keep": "x"}
    return data | {"rules": [rule, *data["rules"]]}


def of_two_kinds() -> Any:
    (rule,) = policy(NVFP4)["rules"]
    return policy(NVFP4) | {"rules": [{**rule, "name": "mlp", "match": {"module": "*.mlp.*"}, "quantize": MXFP4}, rule]}


@dataclass(frozen=True)
class Case:
    """An export: its model, policy and layout, and the number of its weights in FP4."""

    kind: str
    under: Any
    weights: int
    layout: str = "compressed-tensors"
    options: dict[str, Any] = field(default_factory=lambda: ALONE)
    gamma: bool = False

    @property
    def inverse(self) -> bool:
        """Whether the layout stores 1/γ, whose inverse may differ from γ by an ulp."""
        return self.gamma and self.layout == "compressed-tensors"


CASES = {
    "mxfp4 vit": Case("vit", "tetrajet", 12),
    "mxfp4 llama": Case("llama", "tetrajet", 21, options={}),
    "mxfp4 moe": Case("qwen3-moe", "tetrajet", 18, options={}),
    "q-ema": Case("vit", "tetrajet-qema", 12),
    "encode scales": Case("vit", "mxfp4", 12, options={}),  # powers of two, which are inverted
    "nvfp4 vit": Case("vit", "nvfp4-te", 4, gamma=True),  # the first and the last block are in high precision
    "nvfp4 llama": Case("llama", "nvfp4-te", 7, gamma=True),
    "nvfp4 moe": Case("qwen3-moe", "nvfp4-te", 6, gamma=True),
    "modelopt vit": Case("vit", "nvfp4-te", 4, "modelopt", gamma=True),
    "modelopt llama": Case("llama", policy(NVFP4, "tensor_scaling", operands=SQUARE), 21, "modelopt", gamma=True),
    "modelopt moe": Case("qwen3-moe", policy(NVFP4, "tensor_scaling", operands=SQUARE), 18, "modelopt", gamma=True),
    "learned scales": Case("llama", "nvfp4-qad-lsq", 21, gamma=True),
    "no γ": Case("vit", policy(NVFP4), 12, options={}),
    "two kinds": Case("llama", of_two_kinds(), 21, options={}),
    "experts kept": Case("qwen3-moe", keeping_the_first(policy()), 12, options={}),
    "weights alone": Case("llama", policy(), 21, options={"max_shard_size": "60KB"}),
    "weights alone, γ": Case("llama", policy(NVFP4, "tensor_scaling", operands=SQUARE), 21, gamma=True),
    "gpt-oss": Case("gpt-oss", keeping_the_first(policy(**GROUPED)), 4, "gpt-oss", {}),
    "conv1d": Case("gpt2", policy(match={"module": "lm_head"}), 1, options={}),  # beside kept Conv1D
}
VISION = ("mxfp4 vit", "nvfp4 vit", "modelopt vit")
QUICK = (*VISION, "mxfp4 llama")


def cases(*names: str, steps: tuple[int, ...] = (2,), quick: tuple[str, ...] = QUICK) -> Any:
    """Parametrize by these cases, or by all. Cases outside of ``quick``, and trainings of 50 steps, are ``long``."""
    marks = {name: () if name in quick else pytest.mark.long for name in names or CASES}
    found = [pytest.param(name, 2, marks=mark, id=name) for name, mark in marks.items()]
    if 50 in steps:
        found += [pytest.param(name, 50, marks=pytest.mark.long, id=f"{name}, 50 steps") for name in marks]
    return pytest.mark.parametrize(("name", "steps"), found)


class Exported:
    """A trained model, its export, the weights that fprop multiplies, and the state that a reader should get."""

    def __init__(self, case: Case, steps: int, folder: Any) -> None:
        self.model, self.folder = trained(MODELS[case.kind](), case.under, steps), folder
        fp4graph.export(self.model, folder, format=case.layout, **case.options)
        transposed = case.kind == "gpt-oss"  # whose experts are [E, K, N]
        self.weights = {key: w.mT if transposed else w for key, w in multiplied(self.model).items()}
        self.state = fp4graph.strip(self.model.state_dict()) | self.weights
        self.logits = logits(self.model)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cache(lambda name, steps=2: Exported(CASES[name], steps, tmp_path_factory.mktemp("made") / "out"))


def loaded(name, folder):
    """Load an export into a model with other initial weights."""
    model = MODELS[CASES[name].kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return fp4graph.load_quantized(model, folder).eval()


@cases(steps=(2, 50))
def test_load_quantized_gives_the_values_of_fprop(name, steps, made):
    case, export = CASES[name], made(name, steps)
    assert len(export.weights) == case.weights
    values = loaded(name, export.folder).state_dict()
    assert values.keys() == export.state.keys()
    for key, value in values.items():
        torch.testing.assert_close(value, export.state[key], rtol=2**-22 if case.inverse else 0, atol=0, msg=key)


@cases(*(f"{kind} {model}" for kind in ("mxfp4", "modelopt") for model in ("vit", "llama", "moe")), quick=VISION)
def test_a_training_goes_on_from_what_is_read(name, steps, made):
    """Weights in FP4 are quantized to themselves: the same forward. Codes and block scales of NVFP4 stay; γ is
    amax / (6·448) of the rounded product 6·448·γ, an ulp away at most."""
    case, export = CASES[name], made(name, steps)
    model = fp4graph.apply(loaded(name, export.folder), case.under, backend="eager")
    assert case.gamma or torch.equal(logits(model), export.logits)
    for key, weight in multiplied(model).items():
        torch.testing.assert_close(weight, export.weights[key], rtol=2**-22 if case.gamma else 0, atol=0)
    trained(model, case.under, 1)


# ---------------------------------------------------------------------- readers of other libraries


def plain_folder(folder):
    """Have the library of compressed-tensors make a plain checkpoint, and return its folder."""
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    plain = folder.with_name("plain")
    if not plain.exists():
        convert_checkpoint(folder, plain, CompressedTensorsDequantizer(folder))
    return plain


def by_transformers(name, folder):
    """Load by transformers, in fp32: its reader leaves experts in bf16 whatever dtype is asked for."""
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    if CASES[name].kind in ("qwen3-moe", "gpt-oss"):
        how["experts_implementation"] = "grouped_mm"
    if CASES[name].layout == "gpt-oss":
        how["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    elif folder.name != "plain":
        how["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how).float().eval()


@cache
def by_others(name, folder):
    """Return a model as transformers reads it; where transformers cannot, compressed-tensors dequantizes the export."""
    case = CASES[name]
    if case.kind == "vit":
        model = MODELS["vit"]()
        model.load_state_dict(load_file(plain_folder(folder) / "model.safetensors"))
        return model.eval()
    return by_transformers(name, plain_folder(folder) if case.gamma or name == "two kinds" else folder)


@cases(*(name for name, case in CASES.items() if case.layout != "modelopt"), steps=(2, 50))
def test_readers_of_other_libraries_give_the_values_of_fprop(name, steps, made):
    """Values without γ are equal to the bit. Values with γ are dequantized to bf16, which rounds by 2^-9 of the value;
    the roundings of γ and of its inverse before make it 2^-8 at most."""
    case, export = CASES[name], made(name, steps)
    values = by_others(name, export.folder).state_dict()
    assert export.weights.keys() <= values.keys()
    for key, value in values.items():
        expected = export.state[key]
        bound = expected.abs() * 2**-8 if case.gamma and key in export.weights else torch.zeros(())
        assert ((value - expected).abs() <= bound).all(), key
    if case.gamma:
        for key, value in loaded(name, export.folder).state_dict().items():
            torch.testing.assert_close(value, values[key], rtol=2**-7, atol=0)


def with_activations(reader, under):
    """Return the logits of the reader's weights with activations quantized as ``under`` says."""
    return logits(fp4graph.apply(reader, keeping(under, "fprop.weight", "dgrad.weight"), backend="eager"))


@cases("mxfp4 llama", "mxfp4 moe", "nvfp4 llama", "nvfp4 moe", steps=(2, 50))
def test_the_logits_are_those_of_an_eval_forward(name, steps, made):
    """In MXFP4 they are equal. In NVFP4 the reader's weights are bf16, and activations rounded to FP4 after every layer
    amplify the difference; the bound is three times the effect of changing every weight by 2^-9."""
    case, export, bound = CASES[name], made(name, steps), 0.0
    if case.gamma:
        changed, generator = MODELS[case.kind](), torch.Generator().manual_seed(1)
        changed.load_state_dict(export.state)
        for key, weight in export.weights.items():
            signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            changed.get_parameter(key).data.copy_(weight * (1 + signs * 2**-9))
        bound = 3 * (with_activations(changed.eval(), case.under) - export.logits).abs().max().item()
    reader = by_transformers(name, plain_folder(export.folder) if case.gamma else export.folder)
    torch.testing.assert_close(with_activations(reader, case.under), export.logits, rtol=0, atol=bound)


@cases("weights alone", "weights alone, γ", "gpt-oss", "conv1d")
def test_weights_alone_give_the_logits_of_an_eval_forward(name, steps, made):
    """Rounding weights to bf16 changes them by 2^-9 of their values; some of this cancels in sums. A model in bf16 also
    rounds every activation of three blocks."""
    export = made(name, steps)
    y, largest = logits(by_transformers(name, export.folder)), export.logits.abs().max().item()
    assert CASES[name].gamma or torch.equal(y, export.logits)
    torch.testing.assert_close(y, export.logits, rtol=0, atol=2**-8 * largest)
    if name.startswith("weights alone"):
        compressed = transformers.AutoModelForCausalLM.from_pretrained(export.folder, dtype=torch.bfloat16)
        y = logits(compressed).float()  # decompresses at its first forward
        torch.testing.assert_close(y, export.logits, rtol=0, atol=2**-5 * largest)


# ---------------------------------------------------------------------- ModelOpt's layout, and configurations


def matrices(key, weight):
    """Return the matrices of a parameter by their names in ModelOpt's layout, which names those of each expert."""
    module, _, name = key.rpartition(".")
    if not module.endswith("experts"):
        return {module: weight}
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    each = enumerate(weight)
    return {f"{module}.{i}.{part}": m for i, w in each for part, m in zip(names, w.chunk(len(names)), strict=True)}


@cases("modelopt vit", "modelopt llama", "modelopt moe", steps=(2, 50))
def test_modelopts_bytes_by_their_definition(name, steps, made):
    """A weight is element · weight_scale · weight_scale_2, computed in float64 from ml_dtypes' formats."""
    export = made(name, steps)
    for key, weight in export.weights.items():
        for module, matrix in matrices(key, weight).items():
            elements, scales, gamma = modelopt_parts(export.folder, module)
            assert np.array_equal((elements * scales * gamma).astype(np.float32), matrix.numpy()), module


@pytest.mark.long
def test_modelopt_dequantizes_to_what_fprop_multiplies_with(made):
    tensors = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    export, name = made("modelopt llama"), "model.layers.1.self_attn.q_proj"
    found, weight = load_file(export.folder / "model.safetensors"), export.weights[f"{name}.weight"]
    packed = tensors.NVFP4QTensor(weight.shape, torch.float32, found[f"{name}.weight"])
    scale, double = found[f"{name}.weight_scale"], found[f"{name}.weight_scale_2"]
    read = packed.dequantize(scale=scale, double_scale=double, block_sizes={-1: 16})
    torch.testing.assert_close(read, weight, rtol=2**-22, atol=0)  # the scales' product is rounded first


@pytest.mark.long
@cases("modelopt llama", "modelopt moe")
def test_the_configuration_of_modelopt(name, steps, made):
    gates = [f"model.layers.{i}.mlp.gate" for i in range(3)] if name == "modelopt moe" else []
    written = json.loads((made(name).folder / "hf_quant_config.json").read_text())
    assert written["quantization"] == {
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", *gates],
    }
    converting = pytest.importorskip("modelopt.torch.export.convert_hf_config")
    assert configuration(made(name).folder) == converting.convert_hf_quant_config_format(written)


@pytest.mark.long
def test_shards_and_configurations_of_the_other_layouts(made, tmp_path):
    folder, kinds, gpt = (made(name).folder for name in ("weights alone", "two kinds", "gpt-oss"))
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    config = configuration(folder)
    assert config["config_groups"]["group_0"]["input_activations"] is None
    assert config["ignore"] == ["lm_head"]
    config = configuration(kinds)
    assert config["format"] == "mixed-precision"
    formats = {group["format"] for group in config["config_groups"].values()}
    assert formats == {"mxfp4-pack-quantized", "nvfp4-pack-quantized"}
    config = configuration(gpt)
    assert config["quant_method"] == "mxfp4"
    assert "model.layers.0.mlp.experts" in config["modules_to_not_convert"]
    assert "model.layers.1.mlp.experts" not in config["modules_to_not_convert"]
    # save_pretrained() of a loaded model writes a plain checkpoint.
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    fp4graph.load_quantized(model, folder).save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


@pytest.mark.long
def test_one_projection_in_bf16_leaves_the_other_experts_exact(made, tmp_path):
    """In the model, the projection is the first part of a tensor that holds all experts."""
    folder = shutil.copytree(made("modelopt moe").folder, tmp_path / "out")
    whole = loaded("modelopt moe", folder).state_dict()
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts.0.gate_proj"
    lines, half = tensors[f"{name}.weight"].shape
    kept = {key: value for key, value in tensors.items() if not key.startswith(f"{name}.")}
    kept[f"{name}.weight"] = torch.randn(lines, 2 * half, dtype=torch.bfloat16)
    save_file(kept, folder / "model.safetensors")
    mixed = loaded("modelopt moe", folder).state_dict()
    (key,) = (key for key in whole if not torch.equal(mixed[key], whole[key]))
    assert key == "model.layers.0.mlp.experts.gate_up_proj"
    where = mixed[key] != whole[key]
    assert not where[1:].any()
    assert not where[0, where.shape[1] // 2 :].any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["weights alone", "gpt-oss"])
def test_under_autocast_weights_are_quantized_from_its_dtype(name, tmp_path):
    """Except those of a grouped product, which autocast does not cast."""
    model = trained(MODELS[CASES[name].kind](), CASES[name].under)
    with torch.autocast("cpu", torch.bfloat16):
        fp4graph.export(model, tmp_path / "out", format=CASES[name].layout)
        weights = multiplied(model)
    reader = loaded(name, tmp_path / "out")
    for key, weight in weights.items():
        assert torch.equal(reader.get_parameter(key), weight.mT if name == "gpt-oss" else weight)
    exact = multiplied(model)
    assert all(torch.equal(exact[key], weight) for key, weight in weights.items()) == (name == "gpt-oss")
