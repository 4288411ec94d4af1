"""examples/finetune_lora.py: its losses fall, and its graphs quantize nothing for unneeded gradients."""

import re
import runpy
from argparse import Namespace
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import fp4graph
from fp4graph.model import running

pytest.importorskip("peft", reason="needs fp4graph[clients]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_lora.py"
#: The operators that quantize, each with the number of quantized operands that it returns.
QUANTIZERS = {
    "quantize": 1,
    "quantize_and_pack": 1,
    "requantize": 1,
    "quantize_both": 2,
    "quantize_and_pack_columns": 2,
}


def rows(printed):
    return {name.strip(): float(loss) for name, loss in re.findall(r"^(\D{40})(.*)$", printed, re.M)}


def quantized(make):
    """Return how many operands the forward and the backward graph of a model under ``nvfp4`` quantize."""
    counts = []

    def count(graph, inputs):
        operators = Counter(
            node.target.name().removeprefix("fp4graph::").partition(".")[0]
            for node in graph.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "fp4graph"
        )
        assert operators.keys() <= QUANTIZERS.keys(), operators
        counts.append(sum(QUANTIZERS[name] * number for name, number in operators.items()))
        return make_boxed_func(graph.forward)

    model = make(runpy.run_path(str(EXAMPLE)))
    base = getattr(model, "get_base_model", lambda: model)()
    with mock.patch.object(running, "inner_backend", return_value=aot_autograd(fw_compiler=count, bw_compiler=count)):
        fp4graph.apply(base, "nvfp4", backend="aot_eager")
        tokens = torch.arange(32).reshape(2, 16)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    forward, backward = counts
    return forward, backward


def full_model(example):
    return example["LlamaForCausalLM"](example["LlamaConfig"](num_hidden_layers=2, **example["SMALL"]))


def adapted(example):
    return example["adapted"](full_model(example), Namespace(seed=0, rank=8))


@pytest.mark.long
@pytest.mark.compiler
def test_a_frozen_model_quantizes_nothing_for_unneeded_gradients():
    """Each of the 2·7 products has two operands. A frozen weight has no wgrad. No trained parameter precedes
    the query, the key and the value of the first layer, so these three have no dgrad."""
    layers = 2 * 7
    assert quantized(full_model) == (2 * layers, (2 + 2) * layers)
    assert quantized(adapted) == (2 * layers, 2 * (layers - 3))


def assert_complete(losses):
    assert list(losses) == [
        "pre-trained",
        "pre-trained, quantized",
        "adapted",
        "loaded beside the quantized model",
        "merged, in high precision",
        "merged, then quantized",
    ]
    assert losses["pre-trained, quantized"] != losses["pre-trained"]
    assert losses["loaded beside the quantized model"] == losses["adapted"]
    assert losses["merged, then quantized"] != losses["merged, in high precision"]


@pytest.mark.long
def test_adapters_are_saved_loaded_and_merged(example, tmp_path):
    few = ["--base-steps=2", "--steps=2", "--batch-size=2", "--validation-batches=1", "--layers=2"]
    assert_complete(rows(example("finetune_lora.py", "--backend=eager", f"--output={tmp_path / 'adapter'}", *few)))
    assert sorted(file.suffix for file in (tmp_path / "adapter").iterdir()) == [".json", ".md", ".safetensors"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy=tetrajett"], "did you mean the shipped policy 'tetrajet'"),
        (["--pack"], r"nvfp4\.yaml:\d+: .* cannot be packed: "),
        pytest.param(
            ["--policy=nvfp4-te"],
            r"nvfp4-te\.yaml:\d+: .* rules before it \('first block', 'last block'\) keep every site",
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.slow
def test_a_policy_that_cannot_be_used_is_an_error_before_the_pre_training(arguments, says, example):
    with pytest.raises(SystemExit) as ended:
        example("finetune_lora.py", "--backend=eager", "--layers=2", "--base-steps=1000000", *arguments)
    assert re.search(says, str(ended.value))


@pytest.mark.long
def test_adapters_learn_what_the_frozen_model_does_not_know(example):
    losses = rows(example("finetune_lora.py", "--backend=eager", "--base-steps=150", "--steps=60"))
    assert_complete(losses)
    assert losses["adapted"] < losses["pre-trained, quantized"] - 0.05
    assert abs(losses["merged, in high precision"] - losses["adapted"]) < 0.05


@pytest.mark.long
@pytest.mark.parametrize("policy", ["tetrajet", "nvfp4-te"])
def test_packed_weights_give_the_same_losses(policy, example):
    few = ["--base-steps=5", "--steps=5", "--batch-size=2", "--validation-batches=1", "--layers=3"]
    arguments = ["finetune_lora.py", "--backend=eager", f"--policy={policy}", *few]
    assert example(*arguments, "--pack") == example(*arguments)
