"""What targets run natively: the data, verdicts that agree with the targets' sources, and the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fp4graph
from fp4graph.commands.catalogue import native_on
from fp4graph.commands.targets import page
from fp4graph.errors import Error
from fp4graph.graph import targets
from fp4graph.graph.plan import plan_site
from fp4graph.graph.site import Site
from fp4graph.technique.operands import Gemm
from fp4graph.technique.site import SiteView
from tests.helpers.commands import run
from tests.helpers.models import llama
from tests.helpers.policies import NVFP4, one_rule

TARGETS = targets.data().targets


def verdict(policy, target, gemm="fprop", op="linear"):
    """Return the kind and the reason of the verdict of ``target`` on a GEMM; all rows of the GEMM must agree."""
    rows = native_on(target, fp4graph.load_policy(policy))
    ((kind, why),) = {(kind, why) for _, *product, kind, why in rows if product == [op, gemm]}
    return kind, why


def rotated(gemm, *techniques):
    return one_rule({"hadamard": {"scope": [gemm], "block": 16, "kind": "random"}}, *techniques, quantize=NVFP4)


def test_every_source_is_used_and_every_format_is_multiplied():
    data = targets.data()
    assert {source for target in TARGETS.values() for source in target.sources} == data.sources.keys()
    used = {name for target in TARGETS.values() for pair in (*target.products, *target.grouped) for name in pair}
    assert used - {"exact"} == data.formats.keys()


@pytest.mark.parametrize(
    ("policy", "target", "gemm", "kind", "why"),
    [
        # torch multiplies NVFP4, through cuBLASLt, on every NVIDIA GPU with FP4; MXFP4 only at capability 10.x.
        ("nvfp4-te", "b200", "wgrad", "native", "NVFP4 x NVFP4"),
        ("nvfp4-te", "rtx5090", "dgrad", "native", "NVFP4 x NVFP4"),
        ("nvfp4-te", "mi355x", "fprop", "simulated", "E4M3 scales, MXFP4 has E8M0"),
        ("nvfp4-te", "h200", "fprop", "simulated", "E2M1 elements"),
        ("tetrajet", "b300", "dgrad", "native", "MXFP4 x MXFP4 (torch with MSLK)"),
        ("tetrajet", "rtx5090", "fprop", "simulated", "E8M0 scales, NVFP4 has E4M3"),
        ("tetrajet", "mi355x", "wgrad", "native", "MXFP4 x MXFP4"),
        # Among GPUs, only Hopper multiplies FP8 in tiles of 128 with squares of 128 x 128.
        ("fp8-block", "h200", "fprop", "native", "FP8 by tile x FP8 by tile"),
        ("fp8-block", "b200", "fprop", "simulated", "blocks of 128"),
        ("fp8-block", "torchao", "wgrad", "native", "FP8 by tile x FP8 by tile"),
        # No hardware multiplies operands with encode or group scales or these elements, or quantized by exact operands.
        ("nvfp4", "b200", "fprop", "simulated", "encode"),
        ("tetrajet-v2", "b200", "fprop", "simulated", "tensor_scaling has scales of groups"),
        ("averis", "b200", "fprop", "simulated", "mean_split wraps the quantizer of fprop.input"),
        ("if4", "b200", "fprop", "simulated", "E2M1 or INT4 elements"),
        ("tetrajet-q1", "b200", "fprop", "simulated", "fprop.weight: kept in high precision"),
        ("tetrajet-q1", "b200", "dgrad", "exact", "high precision"),
        ("fp4-all-the-way", "mi355x", "fprop", "simulated", "E4M3 scales"),
        # A constant factor before the quantizer is divided out of the result.
        ("mxfp4-rht-sr", "b200", "dgrad", "native", "MXFP4 x MXFP4"),
        # Transformer Engine rounds only gradients stochastically, and rotates only wgrad.
        ("nvfp4-te-4over6", "te", "fprop", "native", "NVFP4 x NVFP4"),
        ("fp4-all-the-way", "te", "wgrad", "simulated", "does not round wgrad.input stochastically"),
        ("quartet-ii", "te", "dgrad", "simulated", "does not round ties of dgrad.grad_output away"),
        ("fp4-all-the-way", "te", "fprop", "simulated", "tensor_scaling with headroom 1.0 only, not 0.5"),
        ("nvfp4-rl", "te", "fprop", "simulated", "tensor_scaling with share None only, not siblings"),
        ("nvfp4-rl", "b200", "fprop", "simulated", "fprop.input: tensor_scaling has scales of groups"),
        # vLLM serves. It multiplies quantized weights with exact inputs too, and inputs that were rotated without
        # random signs. It reads weights of any rounding, and rounds inputs as FlashInfer does: MXFP4 scales up, ties
        # to even.
        ("mxfp4-round-up", "vllm", "fprop", "native", "MXFP4 x MXFP4"),
        ("quartet", "vllm", "fprop", "simulated", "does not round scales of fprop.input by floor"),
        ("tetrajet", "vllm", "fprop", "simulated", "does not round ties of fprop.input up"),
        ("tetrajet-q2", "vllm", "fprop", "native", "exact x MXFP4"),
        ("mxfp4-full-rht", "vllm", "fprop", "simulated", "does not round scales of fprop.input by floor"),
        ("nvfp4-w4a16", "vllm", "fprop", "native", "exact x NVFP4"),
        ("nvfp4-w4a16", "b200", "fprop", "simulated", "fprop.input: kept in high precision"),
        ("nvfp4-te-4over6", "vllm", "fprop", "simulated", "four_over_six with operands"),
        ("mxfp8", "vllm", "dgrad", "simulated", "it serves, and does not train"),
        (rotated("fprop"), "vllm", "fprop", "simulated", "hadamard with kind deterministic or random_backward only"),
        # torchao runs NVFP4 and its techniques, but does not draw new signs at each step.
        ("nvfp4-te", "torchao", "wgrad", "native", "NVFP4 x NVFP4"),
        ("nvfp4-te-4over6", "torchao", "fprop", "simulated", "tensor_scaling with target None only, not 256.0"),
        ("mxfp4-rht-sr", "torchao", "dgrad", "simulated", "E8M0 scales"),
        (rotated("wgrad"), "torchao", "wgrad", "simulated", "hadamard with resample never only, not step"),
        (rotated("wgrad"), "b200", "wgrad", "native", "NVFP4 x NVFP4"),
    ],
)
def test_verdicts(policy, target, gemm, kind, why):
    actual, reason = verdict(policy, target, gemm)
    assert actual == kind
    assert why in reason


def test_transformer_engine_has_a_scale_for_each_row_of_x():
    assert verdict("nvfp4-mxfp8-experts", "te", op="grouped") == ("native", "NVFP4 x NVFP4")
    assert verdict("nvfp4-mxfp8-experts", "b200", op="grouped")[0] == "simulated"
    assert verdict("nvfp4-mxfp8-experts", "te", "dgrad", "grouped") == ("native", "MXFP8 x MXFP8")


def test_techniques_that_a_library_cannot_combine_are_simulated():
    policy = rotated("wgrad", "four_over_six", {"tensor_scaling": {"target": 256}})
    assert verdict(policy, "te") == ("simulated", "Transformer Engine has no hadamard together with four_over_six")
    assert verdict(policy, "b200")[0] == "native"


@pytest.mark.slow
def test_a_product_of_a_size_that_a_target_does_not_multiply_is_simulated():
    ids = torch.zeros(2, 12, dtype=torch.long)
    shown = fp4graph.explain(llama(), one_rule("tensor_scaling", quantize=NVFP4), (ids,))
    verdicts = targets.verdicts("b200", shown.sites[0].program, shown.sites[0])
    assert [each.kind for each in verdicts.values()] == ["native", "native", "simulated"]
    assert verdicts["wgrad"].why == "tokens 24 is not a multiple of 16"
    listed = [data["sites"][0].get("target") for data in (shown.to_json(target="b200"), shown.to_json())]
    assert listed == [{gemm: {"kind": kind, "why": why} for gemm, (kind, why) in verdicts.items()}, None]
    table = shown.on("b200")
    assert "tokens 24 is not a multiple of 16" in table
    assert "model.layers.0-1.self_attn.q_proj" in table
    *shares, kept = [int(number) for number in re.findall(r"(\d+) %", table)]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert f"(unquantized products, not in the table: 2 with {kept} %)" in table
    assert kept == round(100 * sum(site.flops for site in shown.sites if not site.quantized) / shown.flops)


def test_grouped_products_have_verdicts_of_their_own():
    view = SiteView("e", "grouped", 64, 64, 4 * 64 * 64)
    program = plan_site(view, fp4graph.load_policy("tetrajet").rules[0]).program
    site = Site("e", "grouped", ((32, 64), (4, 64, 64)), None, "", {}, quantized=True)
    assert targets.verdicts("b200", program, site)[Gemm.FPROP] == ("native", "MXFP4 x MXFP4 (torch with MSLK)")
    assert targets.verdicts("mi355x", program, site)[Gemm.FPROP].why == "fprop.input and fprop.weight: E2M1 elements"
    why = f"{targets.target('rtx5090').title} has no grouped products of quantized operands"
    assert targets.verdicts("rtx5090", program, site)[Gemm.FPROP] == ("simulated", why)


def test_gradients_in_e5m2_are_native_beside_e4m3_where_the_kernel_takes_both():
    tensor, row = ({"element": "e4m3", "block": block, "scale": {"format": "fp32"}} for block in ("tensor", "row"))
    policy = one_rule(quantize=tensor, operands={"gradients": {"element": "e5m2"}})
    assert verdict(policy, "h200", "dgrad") == ("native", "FP8 in E5M2 by tensor x FP8 by tensor")
    assert verdict(one_rule(quantize=tensor | {"element": "e5m2"}), "h200")[0] == "simulated"  # both operands are E5M2
    policy = one_rule(quantize=row, operands={"wgrad.input": {"element": "e5m2"}})
    kinds = [verdict(policy, target, "wgrad")[0] for target in ("h200", "b200", "mi355x")]
    assert kinds == ["native", "simulated", "simulated"]  # the CUTLASS kernel and ROCm take E4M3 on the right


@pytest.mark.parametrize("op", ["conv", "sdpa", "matmul"])
def test_ops_that_no_source_multiplies_are_simulated(op):
    rows = native_on("te", fp4graph.load_policy(one_rule("tensor_scaling", quantize=NVFP4, op=op)))
    assert {kind for *_, kind, _ in rows} == {"simulated"}


@pytest.mark.slow
def test_verdicts_tell_experts_phases_and_refused_sites_apart():
    rows = native_on("rtx5090", fp4graph.load_policy("fp4-all-the-way"))
    assert {(op, kind) for _, op, _, kind, _ in rows} == {("linear", "native"), ("grouped", "simulated")}
    assert "nothing is quantized" in run("check", "nvfp4-te-bf16", "--target", "b200").out
    assert "| `nvfp4-te-bf16` | yes at first |" in page()
    refused = native_on("b200", fp4graph.load_policy(one_rule("q_ema", quantize=NVFP4, op=["conv", "linear"])))
    assert [(op, kind) for _, op, _, kind, _ in refused][:2] == [("conv", "refused"), ("linear", "native")]


def test_the_command_shows_verdicts_and_suggests_a_target_for_an_unknown_name():
    with pytest.raises(Error, match="unknown target 'b20'; did you mean 'b200'"):
        targets.target("b20")
    assert "did you mean" in run("check", "nvfp4-te", "--target", "b20").err
    shown = run("check", "nvfp4-te", "--target", "H200")
    assert shown.code == 0
    assert "E2M1 elements" in shown.out


@pytest.mark.slow
def test_the_page_is_up_to_date():
    """`python -m fp4graph.commands.targets docs/targets.md` writes it."""
    assert Path(__file__).parents[1].joinpath("docs/targets.md").read_text("utf-8") == page()
