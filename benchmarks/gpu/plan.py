"""Predicts the cost of a policy on a GPU from its generated program, without a GPU.

For one block of a model in training, Inductor writes the program for an absent card (:mod:`benchmarks.gpu.program`).
docs/figures.md, "Predicted, not measured", defines the figures. In the estimate attention counts by its bytes.
``--quantizers`` chooses the kernels of this project, or the tensor code that Inductor fuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
from benchmarks.models import DTYPES, UNQUANTIZED, llama_blocks, of_inner_blocks, vit_blocks
from benchmarks.processes import Inapplicable
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
    flops = Counter[str]()
    for factors, _, operations in written.products:
        flops[factors] += operations
    counted = {
        "bytes": written.bytes,
        "gemm_bytes": written.gemm_bytes,
        "launches": written.launches,
        "key_launches": written.keys,
        "gemms": written.gemms,
        "distinct_kernels": len(written.sources),
        "source_bytes": sum(map(len, written.sources)),
        "gemm_flops": dict(flops),
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
    written = _written(linear, [x], of_inner_blocks(policy), gpu, torch.float32)
    return written.saved + written.saved_parameters


def _written(module: nn.Module, args: list[Tensor], policy: Any, gpu: str, dtype: torch.dtype) -> Program:
    from benchmarks.gpu.absent import GPUS  # not above: Triton, which the report does without
    from benchmarks.gpu.program import program

    try:
        return program(module, args, policy, GPUS[gpu], dtype)
    except fp4graph.PolicyError as error:
        raise Inapplicable(str(error).partition(";")[0]) from None


def compared(program: dict[str, Any], baseline: dict[str, Any], rates: Rates) -> dict[str, Any]:
    """Return the figures of ``program`` with their ratios to those of the unquantized program."""
    result = {**program, "baseline_bytes": baseline["bytes"], "rates": vars(rates)}
    result["seconds"], result["baseline_seconds"] = _seconds(program, rates), _seconds(baseline, rates)
    result["estimate"] = result["seconds"] / result["baseline_seconds"]
    result["ratio"] = program["bytes"] / baseline["bytes"]
    result["kernels_ratio"] = program["distinct_kernels"] / baseline["distinct_kernels"]
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
    bandwidth: Annotated[float | None, typer.Option(min=0.001, help="TB/s, instead of the card's.")] = None,
    gemm_rate: Annotated[float | None, typer.Option(min=0.001, help="TFLOP/s, instead of the card's.")] = None,
    linears: Annotated[bool, typer.Option(help="Saved bytes of linears too, each compiled alone.")] = True,
    quantizers: Annotated[str, typer.Option(help="kernels, tensor code, or both, separated by commas.")] = "kernels",
) -> Cases:
    named = command.policies_of(policies)
    codes = command.choices(quantizers, ("kernels", "tensor code"))
    chosen = command.choices(blocks, BLOCKS), command.choices(dtypes, DTYPES), command.choices(cards, RATES)
    given = {name: rate for name, rate in (("bandwidth", bandwidth), ("gemm_rate", gemm_rate)) if rate is not None}
    for block, dtype, card in product(*chosen):
        rates, baseline = _rates(card, bandwidth, gemm_rate), dict[str, Any]()
        for policy, code in ((UNQUANTIZED, "–"), *product(named, codes)):
            case = {"block": block, "dtype": dtype, "card": card, "policy": policy, "quantizers": code, **given}
            yield case, partial(_counted, case, linears, rates, baseline)


def _counted(case: dict[str, Any], linears: bool, rates: Rates, baseline: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a case; ``baseline`` keeps those of the unquantized program, which comes first."""
    from benchmarks.gpu.absent import worker

    if case["policy"] != UNQUANTIZED and not baseline:
        raise Inapplicable("the unquantized program, to which the figures relate, was not written")
    arguments = case["block"], case["policy"], case["card"], case["dtype"], linears, case["quantizers"]
    with worker() as pool:  # one for each case: after a kill a process pool runs nothing more
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
