"""What vLLM, SGLang and TensorRT-LLM multiply after they load an export, compared with an eval forward.

``docs/servers.md`` has the results as a table; test_the_table_of_the_page computes each cell again.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fp4graph
from fp4graph.errors import Error, PolicyWarning
from fp4graph.exports.readers import SERVERS, Activations, ServerError, fuse, read
from fp4graph.technique.operands import Operand
from tests.exports.models import MXFP4, NVFP4, TOKENS, llama, mixture, multiplied, policy, qwen3, recorded, trained
from tests.helpers.long import LONG

pytest.importorskip("compressed_tensors")
PAGE = Path(__file__).parents[2] / "docs/servers.md"
SHARED = {"tensor_scaling": {"share": "siblings"}}
W4A4 = {"operands": {"fprop.input": NVFP4}}
CALIBRATED = {"calibration": [TOKENS]}
EXPERTS = {"match": {"op": "grouped"}}
small = partial(llama, num_hidden_layers=1)
moe = partial(mixture, "Qwen3-MoE", num_hidden_layers=1)


@dataclass(frozen=True)
class Case:
    """A row of the page's table: an export of a model that was trained under a policy."""

    name: str
    layout: str
    make: Callable[[], Any]
    under: Any
    options: dict[str, Any] = field(default_factory=dict)


CT, MODELOPT = "compressed-tensors", "modelopt"
OWN, SHARED_W4A4 = policy(NVFP4, "tensor_scaling", **W4A4), policy(NVFP4, SHARED, **W4A4)
CASES = [
    Case("Llama, `nvfp4-w4a16`", CT, small, "nvfp4-w4a16"),
    Case("Qwen3, `nvfp4-w4a16`", MODELOPT, qwen3, "nvfp4-w4a16"),
    Case("Llama, NVFP4 weights, `own`", CT, small, policy(NVFP4, "tensor_scaling"), {"sibling_scales": "own"}),
    Case("Llama, NVFP4, shared in training", CT, small, SHARED_W4A4, CALIBRATED),
    Case("Llama, NVFP4, shared in training", MODELOPT, small, SHARED_W4A4, CALIBRATED),
    Case("Llama, NVFP4, `own`", MODELOPT, small, OWN, CALIBRATED | {"sibling_scales": "own"}),
    Case("Llama, NVFP4, `share`", CT, small, OWN, CALIBRATED | {"sibling_scales": "share"}),
    Case("Llama, `tetrajet`", CT, small, "tetrajet"),
    Case("Llama, `tetrajet`, weights alone", CT, small, "tetrajet", {"activations": False}),
    Case("Qwen3-MoE, MXFP4 experts", CT, moe, policy(MXFP4, **EXPERTS)),
    Case("Qwen3-MoE, NVFP4, shared in training", MODELOPT, moe, SHARED_W4A4, CALIBRATED),
    Case("GPT-OSS, MXFP4 experts", "gpt-oss", partial(mixture, "GPT-OSS", num_hidden_layers=1), policy(**EXPERTS)),
]


class Exported:
    """An export of a trained model, and the operands that its eval forward multiplies."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.folder, self.layout, model = folder, case.layout, trained(case.make(), case.under, 1)
        self.weights = {name: w.numpy() for name, w in multiplied(model).items()}
        self.inputs = recorded(model, Operand.FPROP_INPUT)
        fp4graph.export(model, folder, format=case.layout, **case.options)

    def weight(self, layer: Any) -> np.ndarray:
        """Return the weight that the eval forward multiplies at a server's layer."""
        owner, _, last = layer.name.rpartition(".")
        if last in ("w13", "w2"):
            return self.weights[f"{owner}.{'gate_up_proj' if last == 'w13' else 'down_proj'}"]
        return np.concatenate([self.weights[f"{module}.weight"] for module in layer.modules])

    def input(self, layer: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the eval forward's activations at a server's layer, before and after their quantizer."""
        owner, _, last = layer.name.rpartition(".")
        given, multiplied_with = self.inputs[{"w13": owner, "w2": f"{owner}#1"}.get(last, layer.modules[0])]
        return given.numpy(), multiplied_with.numpy()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that returns the export of the first case with a name and, if it is given, a layout."""

    @cache
    def export(index):
        return Exported(CASES[index], tmp_path_factory.mktemp("made") / "out")

    def first(name: str, layout: str | None = None) -> Exported:
        return export(next(i for i, c in enumerate(CASES) if c.name == name and layout in (None, c.layout)))

    return first


def cell(export: Exported, server: str) -> str:
    """Return the cell of the page's table for an export and a server."""
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            layers = read(export.folder, server)
    except ServerError as error:
        return re.sub(r".* cannot load [^:]+: ", "refused: ", str(error))
    weights, activations = zip(*(_compared(layer, export, server) for layer in layers.values()), strict=True)
    parts = ["differ" if "differ" in each else each[0] for each in (weights, activations)]
    warning = ", with a warning" if any(issubclass(each.category, PolicyWarning) for each in heard) else ""
    return f"weights {parts[0]}{warning}; activations {parts[1]}"


def _compared(layer: Any, export: Exported, server: str) -> tuple[str, str]:
    """Compare a layer with the eval forward: its weight and its activations.

    Weights are equal to the bit, but for an ulp of γ in compressed-tensors, which stores 1/γ. Activations are equal but
    for those that an ulp moves over a midpoint.
    """
    expected = export.weight(layer)
    if server == "tensorrt-llm" and export.layout == "gpt-oss" and layer.name.endswith("w13"):
        expected = np.concatenate([expected[:, 0::2], expected[:, 1::2]], 1)
    weight, tolerance = layer.dequantized(), 2**-22 if export.layout == CT and layer.kind == "nvfp4" else 0
    weights = "equal" if np.allclose(weight, expected, rtol=tolerance, atol=0) else "differ"
    if layer.activations.kind == "mxfp4":
        return weights, "MXFP4"
    x, quantized = export.input(layer)
    same = np.isclose(layer.activations.quantize(x), quantized, rtol=2**-22, atol=0).mean()
    return weights, "equal" if same > 0.999 else "differ"


def table() -> dict[tuple[str, str], dict[str, str]]:
    """Return the cells of the page's table, by export and format, and server."""
    lines = PAGE.read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| export | format"))
    rows = [line.strip("| ").split(" | ") for line in lines[start + 2 : start + 2 + len(CASES)]]
    return {(row[0], row[1].strip("`")): dict(zip(SERVERS, row[2:], strict=True)) for row in rows}


def test_the_page_has_the_rows_and_versions():
    assert list(table()) == [(case.name, case.layout) for case in CASES]
    text = PAGE.read_text("utf-8")
    assert all(server.version in text for server in SERVERS.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(case.name, case.layout, marks=LONG if "in training" in case.name else ()) for case in CASES],
)
def test_the_table_of_the_page(name, layout, made):
    assert {server: cell(made(name, layout), server) for server in SERVERS} == table()[name, layout]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*warns about.*different tensor scales")
@pytest.mark.parametrize(
    ("name", "server", "key"),
    [
        ("Llama, NVFP4 weights, `own`", "vllm", "weight_global_scale"),
        ("Llama, NVFP4, `own`", "vllm", "weight_scale_2"),
        ("Llama, NVFP4, `own`", "sglang", "weight_scale_2"),
    ],
)
def test_without_sharing_servers_read_only_one_sibling_right(name, server, key, made):
    """Servers read the largest stored number for all, so the others are wrong by the quotient of the numbers."""
    export = made(name)
    stored = load_file(export.folder / "model.safetensors")
    layer = read(export.folder, server)["model.layers.0.self_attn.qkv_proj"]
    largest = max(stored[f"{module}.{key}"].item() for module in layer.modules)
    for module, rows in zip(layer.modules, np.split(layer.dequantized(), np.cumsum(layer.rows)[:-1]), strict=True):
        own, expected = stored[f"{module}.{key}"].item(), export.weights[f"{module}.weight"]
        factor = largest / own if key == "weight_scale_2" else own / largest
        np.testing.assert_allclose(rows, expected * factor, rtol=2**-21)
        assert np.allclose(rows, expected, rtol=2**-21, atol=0) == (own == largest)


# ---------------------------------------------------------------------- numbers and rules, without a model


def test_codes_and_scales_by_their_definition():
    """Every code of E2M1 times every scale, by the formats of ml_dtypes."""
    codes = (np.arange(16) | np.arange(16) << 4).astype(np.uint8).repeat(8).reshape(16, 8)
    for scale, kind, block in ((ml_dtypes.float8_e4m3fn, "nvfp4", 16), (ml_dtypes.float8_e8m0fnu, "mxfp4", 32)):
        scales = np.arange(256, dtype=np.uint8).reshape(16, 16)
        tensors, config = checkpoint(CT, [1.0], kind=kind)
        tensors["q_proj.weight_packed"] = np.tile(codes.repeat(block // 16, 1), (1, 16))
        tensors["q_proj.weight_scale"] = scales
        elements = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            values = fuse(tensors, config)["q_proj"].dequantized()
            expected = elements[:, None] * scales.view(scale).astype(np.float32)
        np.testing.assert_array_equal(values, expected.repeat(block, 1))


def test_activations_by_their_definition():
    """Random values and all midpoints, in blocks from subnormal scales to the largest, by the formats of ml_dtypes."""
    rng = np.random.default_rng(0)
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6]
    blocks = np.concatenate([[ties], rng.standard_normal((64, 16))])
    x = (blocks * 2.0 ** np.arange(-12, 9)[:, None, None]).reshape(-1, 16).astype(np.float32)
    gamma, amax = np.float32(0.5), np.abs(x).max(-1, keepdims=True)
    scales = np.minimum(2 * (amax * np.float32(1 / 6)), 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        elements = np.where(scales > 0, np.clip(x * (1 / (scales * gamma)), -6, 6), 0)
    expected = elements.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales * gamma
    quantized = Activations("nvfp4", gamma, 1 / gamma).quantize(x)
    np.testing.assert_array_equal(quantized, expected)
    assert (scales == 0).any()
    assert (scales == 448).any()
    np.testing.assert_array_equal(Activations(None).quantize(x), x)
    with pytest.raises(ServerError, match="rounded by the server's kernel"):
        Activations("mxfp4").quantize(x)


def checkpoint(layout: str, scales: Any, names: Any = ("q_proj",), inputs: Any = None, kind: str = "nvfp4") -> Any:
    """Return tensors and ``config.json`` of the modules ``names``.

    Args:
        scales: the tensor scale of each module, as the layout stores it.
        inputs: the constant of each module's activations; None quantizes weights alone.
    """
    rng, tensors, last, scale, constant = np.random.default_rng(0), {}, "weight", "weight_scale_2", "input_scale"
    if layout == CT:
        last, scale, constant = "weight_packed", "weight_global_scale", "input_global_scale"
    for i, name in enumerate(names):
        tensors[f"{name}.{last}"] = rng.integers(0, 256, (4, 16), np.uint8)
        tensors[f"{name}.weight_scale"] = rng.integers(1, 126, (4, 2 if kind == "nvfp4" else 1), np.uint8)
        if kind == "nvfp4":
            tensors[f"{name}.{scale}"] = np.array([scales[i]], np.float32)
        if inputs is not None:
            tensors[f"{name}.{constant}"] = np.array([inputs[i]], np.float32)
    strategy, size = ("tensor_group", 16) if kind == "nvfp4" else ("group", 32)
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": size}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None if inputs is None else args}
    settings: dict[str, Any] = {"quant_method": CT, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    if layout == MODELOPT:
        algorithm = "W4A16_NVFP4" if inputs is None else "NVFP4"
        settings = {"quant_method": MODELOPT, "quant_algo": algorithm, "ignore": ["lm_head"]}
    return tensors, {"quantization_config": settings}


PAIR = ["mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.1.gate_proj", "mlp.experts.1.up_proj"]
LINEAR = ["q_proj", "k_proj", "v_proj"]
SAME, CONSTANTS = "its modules have different tensor scales", [0.5, 0.5, 0.25, 0.25]
#: The arguments of checkpoint(), and by server its γ and constant of activations, or the text of its refusal.
RULES = {
    "linear in modelopt's layout": (
        (MODELOPT, LINEAR, [2, 4, 1], [1, 2, 4]),
        {"vllm": (4, 4), "sglang": (4, 4), "tensorrt-llm": SAME},
    ),
    "linear in compressed-tensors": (
        (CT, LINEAR, [2, 4, 1], [1, 2, 4]),
        {"vllm": (1 / 4, 1 / 4), "sglang": (1 / 4, 1 / 4), "tensorrt-llm": "not weight_packed"},
    ),
    "weights alone in compressed-tensors": (
        (CT, LINEAR, [2, 4, 1], None),
        {"vllm": (1 / 4, None), "sglang": SAME, "tensorrt-llm": "must describe input_activations"},
    ),
    "experts in modelopt's layout": (
        (MODELOPT, PAIR, [2, 4, 8, 1], CONSTANTS),
        {"vllm": ([2, 8], 0.5), "sglang": ([2, 8], 0.5), "tensorrt-llm": ([4, 8], 0.5)},
    ),
    "experts with two constants": (
        (MODELOPT, PAIR, [2, 2, 8, 8], [1, 2, 1, 1]),
        {"vllm": ([2, 8], 2), "sglang": ([2, 8], 2), "tensorrt-llm": "gate and up have different constants"},
    ),
    "experts in compressed-tensors": (
        (CT, PAIR, [2, 4, 8, 1], CONSTANTS),
        {"vllm": ([1 / 2, 1 / 8], 4), "sglang": ([1 / 2, 1 / 8], 4), "tensorrt-llm": "not weight_packed"},
    ),
    "experts' weights alone in compressed-tensors": (
        (CT, PAIR, [2, 4, 8, 1], None),
        {"vllm": ([1 / 2, 1 / 8], None), "sglang": SAME, "tensorrt-llm": "must describe input_activations"},
    ),
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", RULES)
def test_which_scale_a_server_takes(name, server):
    (layout, names, scales, inputs), results = RULES[name]
    tensors, config = checkpoint(layout, scales, names, inputs)
    expected = results[server]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if isinstance(expected, str):
            with pytest.raises(ServerError, match=expected):
                fuse(tensors, config, server)
            return
        (layer,) = fuse(tensors, config, server).values()
    assert (layer.multiplier.tolist(), layer.activations.scale) == expected
    assert layer.name == ("qkv_proj" if names is LINEAR else "mlp.experts.w13")
    # If activations are quantized, SGLang takes the largest scale of a linear without a warning.
    silent = server == "sglang" and names is LINEAR and inputs is not None
    assert len(heard) == (not silent and scales != [2, 2, 8, 8])


def test_tensors_of_torch_are_fused_as_arrays_are():
    """A trainer may pass its packed weights without a file, from any device."""

    class OnDevice(torch.Tensor):
        def cpu(self):
            return self.as_subclass(torch.Tensor)

        def numpy(self):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    tensors, config = checkpoint(MODELOPT, [2, 2, 2], LINEAR)
    held = {name: torch.from_numpy(array).as_subclass(OnDevice) for name, array in tensors.items()}
    for name in LINEAR:
        held[f"{name}.weight_scale"] = held[f"{name}.weight_scale"].view(torch.float8_e4m3fn)
    (layer,), (other,) = fuse(tensors, config).values(), fuse(held, config).values()
    np.testing.assert_array_equal(layer.dequantized(), other.dequantized())


#: Checkpoints that no server loads: the layout, a change of the checkpoint, and the reason.
REFUSED = {
    "method": (MODELOPT, lambda t, c: c.update(quant_method="awq"), "quant_method 'awq'"),
    "algorithm": (MODELOPT, lambda t, c: c.update(quant_algo="FP8"), "quant_algo 'FP8'"),
    "format": (CT, lambda t, c: c["config_groups"]["group_0"]["weights"].update(num_bits=8), "neither NVFP4 nor MXFP4"),
    "transform": (CT, lambda t, c: c.update(transform_config={"config_groups": {}}), "transform_config"),
    "a sibling kept": (CT, lambda t, c: c["ignore"].append("k_proj"), "k_proj is not quantized as its siblings"),
    "ignored": (CT, lambda t, c: c["ignore"].append("re:[qkv]_proj"), "or as config.json says"),
    "not listed": (
        MODELOPT,
        lambda t, c: c.update(quant_algo="MIXED_PRECISION", quantized_layers={"q_proj": {"quant_algo": "W4A16_NVFP4"}}),
        "k_proj is not quantized as its siblings",
    ),
    "no block scales": (CT, lambda t, c: t.pop("v_proj.weight_scale"), "v_proj.weight_scale: the checkpoint does not"),
    "no γ": (CT, lambda t, c: t.pop("v_proj.weight_global_scale"), "qkv_proj: it lacks a tensor scale"),
    "experts kept": (CT, lambda t, c: t.update({"mlp.experts.gate_up_proj": None}), "kept in high precision"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_checkpoints_that_are_refused(wrong):
    layout, change, message = REFUSED[wrong]
    tensors, config = checkpoint(layout, [1, 1, 1], LINEAR)
    change(tensors, config["quantization_config"])
    with pytest.raises(ServerError, match=message):
        fuse(tensors, config)
    with pytest.raises(Error, match="unknown server 'vlm'; did you mean 'vllm'"):
        fuse(tensors, config, "vlm")


def test_a_layer_without_siblings_keeps_its_name():
    tensors, config = checkpoint(CT, [1, 1], ["mlp.up_proj", "mlp.down_proj"])
    assert list(fuse(tensors, config)) == ["mlp.down_proj", "mlp.up_proj"]


@pytest.mark.slow
def test_the_older_configuration_file_of_modelopt_is_read(made, tmp_path):
    """``hf_quant_config.json`` has the settings that ``config.json`` lacks."""
    folder = made("Qwen3, `nvfp4-w4a16`").folder
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    assert read(copy).keys() == read(folder).keys()
