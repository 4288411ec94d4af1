"""Predicts the cost of a policy on a GPU from its generated program, without a GPU.

For one block of a model in training, Inductor writes the program for an absent card (:mod:`benchmarks.gpu.program`).
docs/figures.md, "Predicted, not measured", defines the figures. In the estimate attention counts by its bytes.
``--quantizers`` chooses the kernels of this project, or the tensor code that Inductor fuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor, nn

import fp4graph
from benchmarks import command, tables
from benchmarks.command import Cases, Settings
from benchmarks.models import DTYPES, UNQUANTIZED, Inapplicable, llama_blocks, vit_blocks
from fp4graph.kernels import operators

if TYPE_CHECKING:
    from benchmarks.gpu.program import Program


@dataclass(frozen=True)
class Rates:
    """The assumed rates of a card: bytes per second, and operations of GEMMs per second by dtype."""

    bytes: float
    flops: dict[str, float]


#: About five sixths of the H200's and B200's memory bandwidth, and two thirds of their dense rates.
RATES = {
    "H200": Rates(4.0e12, {"bfloat16": 650e12, "float32": 45e12}),
    "B200": Rates(6.6e12, {"bfloat16": 1500e12, "float32": 50e12}),
}


#: LLaMA-350M is that of GaLore (Zhao et al. 2024), with sequences of 256 tokens. ``trial-`` blocks are for tests.
BLOCKS = {
    "vit-b": vit_blocks(768, 12),
    "deit-tiny": vit_blocks(192, 3),
    "deit-tiny-12": vit_blocks(192, 3, depth=12),
    "llama-350m": llama_blocks(1024, 2736, 16, tokens=256, size=32),
    "trial-vit": vit_blocks(64, 2, tokens=16, size=4),
    "trial-vit-3": vit_blocks(64, 2, tokens=16, size=4, depth=3),
    "trial-llama": llama_blocks(64, 192, 2, tokens=32, size=4),
}


def figures(
    block: str, policy: str, gpu: str, dtype: str, linears: bool, quantizers: str = "kernels"
) -> dict[str, Any]:
    """Return the figures of one program, without the comparison. Call it in a worker process."""
    subject = BLOCKS[block]
    code = operators.tensor_code() if quantizers == "tensor code" else nullcontext()
    with code, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stack, (x, *rotary) = subject.make(), subject.inputs(subject.batch(subject.size))[0]
        x.requires_grad_()  # as inside a model
        kinds = Counter(_linears(stack, x.shape[:-1].numel())) if linears else Counter()
        written = _written(stack, [x, *rotary], policy, gpu, DTYPES[dtype])
        saved_by_linears = sum(count * _saved_by_linear(*kind, policy, gpu) for kind, count in kinds.items())
    forward = [kernel for kernel in written.kernels if not kernel.backward]
    gemms = [kernel for kernel in written.kernels if kernel.kind == "gemm"]
    counted = {
        "bytes": sum(kernel.bytes for kernel in written.kernels),
        "forward_bytes": sum(kernel.bytes for kernel in forward),
        "gemm_bytes": sum(kernel.bytes for kernel in gemms),
        "launches": written.launches,
        "key_launches": written.keys,
        "gemms": len(gemms),
        "library_calls": sum(kernel.kind == "library" for kernel in written.kernels),
        "distinct_kernels": len(written.sources),
        "source_bytes": sum(map(len, written.sources)),
        "gemm_flops": dict(written.flops),
        "saved_bytes": written.saved,
        "saved_parameter_bytes": written.saved_parameters,
        "compile_seconds": written.seconds,
    }
    return {**counted, "linears_saved_bytes": saved_by_linears} if linears else counted


def _linears(stack: Any, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield (tokens, in, out) of the linears of the called blocks."""
    for index in stack.called:
        for module in stack.blocks[index].modules():
            if isinstance(module, nn.Linear):
                yield tokens, module.in_features, module.out_features


def _saved_by_linear(tokens: int, inside: int, outside: int, policy: str, gpu: str) -> int:
    linear = nn.Linear(inside, outside, bias=False, dtype=torch.bfloat16)
    x = torch.zeros(tokens, inside, dtype=torch.bfloat16, requires_grad=True)
    written = _written(linear, [x], policy, gpu, torch.float32)
    return written.saved + written.saved_parameters


def _written(module: nn.Module, args: list[Tensor], policy: str, gpu: str, dtype: torch.dtype) -> Program:
    from benchmarks.gpu.absent import GPUS  # not above: Triton, which the report does without
    from benchmarks.gpu.program import program

    try:
        return program(module, args, policy, GPUS[gpu], dtype)
    except fp4graph.PolicyError as error:  # such as a policy for all blocks but the first, for a linear
        raise Inapplicable(str(error).partition(";")[0]) from None


def compared(program: dict[str, Any], baseline: dict[str, Any], rates: Rates) -> dict[str, Any]:
    """Return the figures of ``program`` with their ratios to those of the unquantized program."""
    result = {**program, "baseline_bytes": baseline["bytes"], "rates": vars(rates)}
    result["seconds"], result["baseline_seconds"] = _seconds(program, rates), _seconds(baseline, rates)
    result["estimate"] = result["seconds"] / result["baseline_seconds"]
    result["ratio"] = program["bytes"] / baseline["bytes"]
    result["kernels_ratio"] = program["distinct_kernels"] / baseline["distinct_kernels"]
    saved = program["saved_bytes"] + program["saved_parameter_bytes"]
    result["saved_ratio"] = saved / (baseline["saved_bytes"] + baseline["saved_parameter_bytes"])
    if "linears_saved_bytes" in program:
        result["linears_saved_ratio"] = program["linears_saved_bytes"] / baseline["linears_saved_bytes"]
    return result


def _seconds(program: dict[str, Any], rates: Rates) -> float:
    gemms = sum(flops / rates.flops[dtype] for dtype, flops in program["gemm_flops"].items())
    return float(gemms + (program["bytes"] - program["gemm_bytes"]) / rates.bytes)


COLUMNS = (
    *tables.cases("block", "dtype", "card", "policy", "quantizers"),
    tables.figure("bytes", "MB", ",.0f", 1e6),
    tables.figure("gemm_bytes", "of GEMMs", ",.0f", 1e6),
    tables.figure("ratio", "to unquantized", ".2f"),
    tables.figure("launches", "launches"),
    tables.figure("key_launches", "of keys"),
    tables.figure("gemms", "GEMMs"),
    tables.figure("distinct_kernels", "kernels"),
    tables.figure("source_bytes", "source, KB", ",.0f", 1e3),
    tables.figure("saved_bytes", "saved, MB", ",.0f", 1e6),
    tables.figure("linears_saved_ratio", "of linears", ".3f"),
    tables.figure("estimate", "estimate", ".2f"),
)


def cases(
    settings: Settings,
    blocks: Annotated[str, typer.Option(help=f"Any of {', '.join(BLOCKS)}, separated by commas.")] = "vit-b",
    policies: command.Policies = "tetrajet,microscaling,nvfp4,nvfp4-best",
    dtypes: command.Dtypes = "bfloat16",
    cards: Annotated[str, typer.Option(help=f"Any of {', '.join(RATES)}, separated by commas.")] = "H200",
    bandwidth: Annotated[float | None, typer.Option(min=0, help="TB/s, instead of the card's.")] = None,
    gemm_rate: Annotated[float | None, typer.Option(min=0, help="TFLOP/s, instead of the card's.")] = None,
    linears: Annotated[bool, typer.Option(help="Saved bytes of linears too, each compiled alone.")] = True,
    quantizers: Annotated[str, typer.Option(help="kernels, tensor code, or both, separated by commas.")] = "kernels",
    missing: Annotated[bool, typer.Option(help="Only cases without figures in the folder.")] = False,
) -> Cases:
    from benchmarks.gpu.absent import worker

    named = [name for name in command.policies_of(policies) if name != UNQUANTIZED]
    codes = command.choices(quantizers, ("kernels", "tensor code"))
    chosen = command.choices(blocks, BLOCKS), command.choices(dtypes, DTYPES), command.choices(cards, RATES)
    with worker() as pool:
        for block, dtype, card in product(*chosen):
            rates, baseline = _rates(card, bandwidth, gemm_rate), dict[str, Any]()
            for policy, code in ((UNQUANTIZED, "–"), *product(named, codes)):
                case = {"block": block, "dtype": dtype, "card": card, "policy": policy, "quantizers": code}
                known = settings.results.known(case) if missing else None
                if known is None:
                    yield case, partial(_counted, pool, case, linears, rates, baseline)
                elif policy == UNQUANTIZED:
                    baseline.update(known)


def _counted(
    pool: ProcessPoolExecutor, case: dict[str, str], linears: bool, rates: Rates, baseline: dict[str, Any]
) -> dict[str, Any]:
    """Return the figures of a case; ``baseline`` keeps those of the unquantized program, which comes first."""
    arguments = case["block"], case["policy"], case["card"], case["dtype"], linears, case["quantizers"]
    program = pool.submit(figures, *arguments).result()
    if case["policy"] == UNQUANTIZED:
        baseline.update(program)
    return compared(program, baseline, rates)


def _rates(card: str, bandwidth: float | None, gemm_rate: float | None) -> Rates:
    assumed = RATES[card]
    flops = assumed.flops if gemm_rate is None else dict.fromkeys(assumed.flops, gemm_rate * 1e12)
    return Rates(assumed.bytes if bandwidth is None else bandwidth * 1e12, flops)


benchmark = command.Benchmark(
    "gpu_plan",
    "Predicted: bytes, launches and saved bytes of one block's forward and backward",
    COLUMNS,
    cases,
    without=("device", "backend", "seconds", "repeats"),
)
app = benchmark.app

if __name__ == "__main__":
    app()
