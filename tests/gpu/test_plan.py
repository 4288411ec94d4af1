"""Counts of kernels, bytes and FLOPs in the program of a block for an absent card."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system, or it is not installed")
pytest.importorskip("timm", reason="benchmarks need the extra 'bench'")
pytest.importorskip("cpuinfo", reason="benchmarks need the extra 'bench'")
if not torch.cuda._is_compiled():
    pytest.skip("this torch is built without CUDA", allow_module_level=True)

from benchmarks.gpu import absent, plan
from benchmarks.gpu.absent import GPUS
from benchmarks.gpu.plan import BLOCKS, RATES, Rates, compared, figures
from benchmarks.gpu.program import _variants, program
from benchmarks.processes import attempt

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOKENS, WIDTH = 64, 64
#: (in, out) of the trial block's linears.
LINEARS = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]


def counted(compiler: Any, policy: str, block: str = "trial-vit", linears: bool = False) -> dict[str, Any]:
    return compiler(figures, block, policy, "H200", "bfloat16", linears)


@pytest.mark.long
def test_counts_of_an_unquantized_block(compiler):
    """Each linear has three products, which read their factors and write their result in bf16."""
    counts = counted(compiler, "unquantized")
    assert counts["gemms"] == 3 * len(LINEARS)
    assert counts["gemm_flops"] == {"bfloat16": sum(3 * 2 * TOKENS * k * n for k, n in LINEARS)}
    elements = sum(3 * (TOKENS * k + k * n + TOKENS * n) + n for k, n in LINEARS)  # fprop adds a bias
    assert counts["gemm_bytes"] == 2 * elements
    assert counts["key_launches"] == 0
    assert counts["launches"] >= counts["distinct_kernels"] > 0
    # The backward of norms, attention, GELU and the products reads their inputs and some results: at most the
    # activations of the block.
    assert 2 * TOKENS * 4 * WIDTH < counts["saved_bytes"] < 4 * TOKENS * 20 * WIDTH


@pytest.mark.long
def test_a_policy_reads_and_writes_more(compiler):
    counts, baseline = counted(compiler, "mxfp4-fprop"), counted(compiler, "unquantized")
    assert all(counts[name] == baseline[name] for name in ("gemms", "gemm_flops", "gemm_bytes"))
    weights = sum(k * n for k, n in LINEARS)
    assert counts["bytes"] > baseline["bytes"] + 2 * weights  # at least another read of every weight
    assert compared(counts, baseline, RATES["H200"])["estimate"] > 1


@pytest.mark.long
def test_one_launch_quantizes_an_operand_or_both_directions_of_dy(compiler):
    counts, baseline = counted(compiler, "tetrajet"), counted(compiler, "unquantized")
    assert counts["key_launches"] == 0
    added = 6 * len(LINEARS)  # X and W in the forward, and again in the backward, dY, and the last sum for the bias
    assert counts["launches"] <= baseline["launches"] + added
    assert counts["distinct_kernels"] <= 1.5 * baseline["distinct_kernels"]
    # Inputs and weights are kept as bytes, other activations as in the baseline. bf16 takes 3.76 times as many bytes as
    # 4-bit codes with a scale for 32 of them.
    saved = sum(TOKENS * k for k, _ in LINEARS) * 2
    assert counts["saved_bytes"] < baseline["saved_bytes"] - saved * (1 - 1 / 3.76) / 2


#: Of ViT-B's block: the ratio of bytes to the unquantized program's in docs/figures.md, its upper bound, launches, and
#: the ratio of distinct kernels.
FIGURES = {
    "tetrajet": (1.256, 1.28, 44, 0.85),
    "microscaling": (1.256, 1.28, 44, 0.85),
    "nvfp4": (1.257, 1.28, 44, 0.85),
    # With a tensor scale: 8 launches are GEMMs, and each size of tensor has a kernel for γ.
    "nvfp4-best": (1.339, 1.36, 71, 1.54),
}


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", FIGURES)
def test_figures_of_vit_b(policy, compiler):
    baseline = counted(compiler, "unquantized", "vit-b", linears=True)
    assert baseline["bytes"] == pytest.approx(1411e6, rel=0.01)  # Inductor's versions differ in what they fuse
    assert baseline["gemms"] == 12
    figures = compared(counted(compiler, policy, "vit-b", linears=True), baseline, RATES["H200"])
    stated, most, launches, kernels = FIGURES[policy]
    assert figures["ratio"] == pytest.approx(stated, rel=0.01)
    assert figures["ratio"] <= most
    assert figures["launches"] == pytest.approx(launches, abs=3)
    assert figures["key_launches"] == 0
    assert figures["gemms"] == 12
    assert figures["linears_saved_ratio"] <= 0.29
    assert figures["kernels_ratio"] == pytest.approx(kernels, abs=0.1)


@pytest.mark.gpu
def test_a_tensor_scale_adds_few_bytes(compiler):
    """The amax of most tensors is computed where they are made, and only the GEMMs of wgrad write their accumulator."""
    plain, scaled = counted(compiler, "nvfp4", "vit-b"), counted(compiler, "nvfp4-best", "vit-b")
    tokens, width = 32 * 197, 768
    read_again = 2 * tokens * 4 * width  # the output of attention, and the three of its backward
    accumulators = 4 * 12 * width**2  # written and read, 4 bytes instead of 2
    casts = 4 * (12 * width**2 + tokens * width)  # of weights and dY, which the search for the amax writes in bf16
    due = plain["bytes"] + read_again + accumulators + casts
    assert scaled["bytes"] == pytest.approx(due, rel=0.01)


@pytest.mark.gpu
def test_a_held_scale_is_computed_once(compiler):
    """The operand and the state both need it; Inductor merges the two computations."""
    assert counted(compiler, "ue5m3-d50", "vit-b")["launches"] == pytest.approx(149, abs=3)


DEEP = {"tetrajet": 1.5, "microscaling": 1.5, "nvfp4": 1.5}


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("block", ["trial-vit-3", pytest.param("deit-tiny-12", marks=pytest.mark.long)])
def test_the_number_of_kernels_to_compile_is_close_to_the_unquantized_models(block, compiler):
    """At every depth of the model."""
    baseline = counted(compiler, "unquantized", block)
    for policy, most in DEEP.items():
        counts = counted(compiler, policy, block)
        assert counts["gemms"] == baseline["gemms"]
        assert counts["distinct_kernels"] <= most * baseline["distinct_kernels"]
        assert counts["source_bytes"] <= most * baseline["source_bytes"]


def products(policy: str) -> list[tuple[str, str, int]]:
    """Return the products of an fp32 block: dtypes of factors and of the result, FLOPs. For a worker."""
    block = BLOCKS["trial-vit"]
    (x,), _ = block.inputs(block.batch(block.size))
    return program(block.make(), [x.requires_grad_()], policy, GPUS["H200"], torch.float32).products


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize(("policy", "rotations"), [("tetrajet", 0), ("nvfp4-te", 2 * 4)])  # both operands of wgrad
def test_an_fp32_block_multiplies_bf16_and_writes_fp32(policy, rotations, compiler):
    """Four linears with three GEMMs each; the unquantized program has as many operations in fp32."""
    found, plain = compiler(products, policy), compiler(products, "unquantized")
    short = [product for product in found if product[0] == "bfloat16"]
    assert sum(flops for _, _, flops in short) == sum(flops for *_, flops in plain)
    assert {factors for factors, _, _ in plain} == {"float32"}
    assert len(short) == 3 * 4
    assert {written for _, written, _ in short} == {"float32"}
    assert len(found) - len(short) == rotations


def test_calls_that_differ_in_tensors_and_salts_alone_share_a_kernel():
    call = "torch.ops.fp4graph.quantize_both.default"
    first = f"buf1 = {call}(buf0, '{{a}}', '{{b}}', primals_1, primals_2, [4], [6], [], [buf7, None], True)"
    others = [
        first.replace("buf0", "reinterpret_tensor(buf3, (4, 5), (5, 1), 0)").replace("[4]", "[9]"),
        first.replace("'{b}'", "'{c}'"),
        first.replace("[buf7, None]", "[None, None]"),
        first.replace("True", "False"),
    ]
    names = [set(_variants(line)) for line in (first, *others)]
    assert all(len(name) == 1 for name in names)
    assert names[0] == names[1]
    assert len(set().union(*names)) == 4
    assert not set(_variants("extern_kernels.mm(buf0, buf1, out=buf2)"))


def test_the_estimate_adds_the_time_of_products_and_of_all_other_bytes():
    baseline = {"bytes": 30, "gemm_bytes": 10, "gemm_flops": {"bfloat16": 8}, "distinct_kernels": 4}
    baseline |= {"saved_bytes": 6, "saved_parameter_bytes": 2, "linears_saved_bytes": 5}
    counts = {**baseline, "bytes": 60, "saved_bytes": 2, "linears_saved_bytes": 1}
    result = compared(counts, baseline, Rates(bytes=10.0, flops={"bfloat16": 4.0}))
    assert (result["seconds"], result["baseline_seconds"]) == (2 + 5, 2 + 2)
    assert (result["estimate"], result["ratio"]) == (7 / 4, 2.0)
    assert result["linears_saved_ratio"] == 0.2


class Killed:
    """A process pool whose process is killed by ``microscaling``, after which it runs nothing more."""

    broken = False

    def submit(self, function: Any, block: str, policy: str, *others: Any) -> Any:
        self.broken |= policy == "microscaling"
        counts = {"bytes": 3, "gemm_bytes": 1, "gemm_flops": {}, "distinct_kernels": 1}
        counts |= {"saved_bytes": 1, "saved_parameter_bytes": 0}
        result = Mock(side_effect=BrokenProcessPool("killed")) if self.broken else Mock(return_value=counts)
        return SimpleNamespace(result=result)


def test_a_program_whose_process_is_killed_takes_no_other_with_it(monkeypatch):
    monkeypatch.setattr(absent, "worker", lambda: nullcontext(Killed()))
    made = plan.cases(Mock(), "trial-vit", "microscaling,tetrajet", linears=False)
    found = {case["policy"]: attempt(measure) for case, measure in made}
    assert found["microscaling"] == {"failed": "BrokenProcessPool: killed"}
    assert found["tetrajet"]["ratio"] == 1.0
    (unquantized, *_) = plan.cases(Mock(), bandwidth=5.0)
    assert unquantized[0]["bandwidth"] == 5.0  # a case of its own, which replaces no row of the page
    monkeypatch.setattr(Killed, "broken", True)
    found = {case["policy"]: attempt(measure) for case, measure in plan.cases(Mock(), policies="tetrajet")}
    assert "failed" in found["unquantized"]
    assert "the unquantized program" in found["tetrajet"]["inapplicable"]


@pytest.mark.long
def test_a_linear_keeps_what_an_inner_blocks_linear_keeps(compiler):
    """The policy keeps the last blocks, for one of which a linear by itself would count."""
    kept = [compiler(plan._saved_by_linear, 64, 64, 96, policy, "H200") for policy in ("unquantized", "nvfp4-te")]
    keys = 2 * 4 + 5 * 4  # of the site, and the step's, for the noise; the operands are kept unpacked
    assert kept[1] == kept[0] + keys
