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

from benchmarks.gpu_plan import figures

pytestmark = [pytest.mark.process, pytest.mark.gpu]


@pytest.mark.parametrize("policy", ["tetrajet", "nvfp4-te"])
def test_an_fp32_block_multiplies_bf16_and_writes_fp32(policy: str, compiler: ProcessPoolExecutor) -> None:
    """Four linears with three GEMMs each; the unquantized program has as many operations in fp32."""
    block = "trial-vit"
    own = compiler.submit(figures, block, policy, "H200", "float32", False).result()
    plain = compiler.submit(figures, block, "unquantized", "H200", "float32", False).result()
    linears = plain["gemm_flops"]["float32"]
    assert own["gemm_flops"]["bfloat16"] == linears
    gemms = [kernel for kernel in own["largest"] if kernel["kind"] == "gemm" and "dtype" in kernel["what"]]
    assert gemms
    for kernel in gemms:
        assert all(read.startswith("bfloat16 ") for read in kernel["reads"])
        assert all(written.startswith("float32 ") for written in kernel["writes"])
