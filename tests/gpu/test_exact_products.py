"""The GEMMs of an fp32 model in the program that Inductor writes for a card that is not there."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system, or it is not installed")
pytest.importorskip("timm", reason="benchmarks need the extra 'bench'")
pytest.importorskip("cpuinfo", reason="benchmarks need the extra 'bench'")
if not torch.cuda._is_compiled():
    pytest.skip("this torch is built without CUDA", allow_module_level=True)

from benchmarks.gpu.absent import GPUS
from benchmarks.gpu.plan import BLOCKS
from benchmarks.gpu.program import Kernel, program

pytestmark = [pytest.mark.process, pytest.mark.gpu]


def products(policy: str) -> tuple[dict[str, int], list[Kernel]]:
    """Return the FLOPs of the products in the program of an fp32 block by the dtype that they read, and the products.

    For a worker process.
    """
    block = BLOCKS["trial-vit"]
    made = program(block.module(), block.inputs(), policy, GPUS["H200"], torch.float32)
    return dict(made.flops), [kernel for kernel in made.kernels if kernel.kind == "gemm"]


@pytest.mark.parametrize("policy", ["tetrajet", "nvfp4-te"])
def test_an_fp32_block_multiplies_bf16_and_writes_fp32(policy: str, compiler: ProcessPoolExecutor) -> None:
    """Four linears with three GEMMs each; the unquantized program has as many operations in fp32."""
    flops, gemms = compiler.submit(products, policy).result()
    plain, _ = compiler.submit(products, "unquantized").result()
    assert flops["bfloat16"] == plain["float32"]
    short = [gemm for gemm in gemms if all(read.startswith("bfloat16 ") for read in gemm.reads if "×" in read)]
    assert len(short) == 3 * 4
    assert all(written.startswith("float32 ") for gemm in short for written in gemm.writes)
    rotations = {"tetrajet": 0, "nvfp4-te": 2 * 4}  # both operands of wgrad
    assert len(gemms) - len(short) == rotations[policy]
