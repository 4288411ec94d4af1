"""Predicts the cost of a policy on a GPU from its generated program, without a GPU.

For one block of a model in training, Inductor writes the program for an absent card (:mod:`benchmarks.gpu.program`).
docs/figures.md, "Predicted, not measured", defines the figures. In the estimate attention counts by its bytes.
``--quantizers`` chooses the kernels of this project, or the tensor code that Inductor fuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import fp4graph
from benchmarks import options, tables
from benchmarks.models import UNQUANTIZED
from benchmarks.results import RESULTS, Inapplicable, Results, attempt
from fp4graph.kernels import operators

SHOWN = 12  # kernels of a row


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


class Stack(nn.Module):
    """A stack of ``depth`` equal blocks that calls all of them."""

    def __init__(self, make: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x: Tensor, *rotary: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *rotary)
        return x


class OneOf(nn.Module):
    """A stack of three equal blocks that calls only the middle block, because policies may keep the first and last."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor, *rotary: Tensor) -> Tensor:
        y: Tensor = self.blocks[1](x, *rotary)
        return y


class _Decoder(nn.Module):
    """A decoder layer of LLaMA that takes the rotary embedding as two tensors."""

    def __init__(self, width: int, feed_forward: int, heads: int) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        super().__init__()
        config = LlamaConfig(hidden_size=width, intermediate_size=feed_forward, num_attention_heads=heads)
        config._attn_implementation = "sdpa"
        layer = LlamaDecoderLayer(config, 0)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(x), position_embeddings=(cos, sin), attention_mask=None
        )
        x = x + attended
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


@dataclass(frozen=True)
class Block:
    """A block of a model and its input.

    Attributes:
        make: builds a block.
        width: the features of the input.
        tokens: the tokens of a sequence.
        batch: the number of sequences.
        head: the size of an attention head if the block takes a rotary embedding, else 0.
        depth: the number of equal blocks in sequence; 0 stands for the middle one of three.
    """

    make: Callable[[], nn.Module]
    width: int
    tokens: int
    batch: int
    head: int = 0
    depth: int = 0

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return Stack(self.make, self.depth) if self.depth else OneOf(self.make)

    def inputs(self) -> list[Tensor]:
        """Return the block's arguments; the first needs a gradient, as inside a model."""
        rotary = [torch.randn(1, self.tokens, self.head) for _ in range(2)] if self.head else []
        return [torch.randn(self.batch, self.tokens, self.width, requires_grad=True), *rotary]


def _vit(width: int, heads: int, tokens: int = 197, batch: int = 32, depth: int = 0) -> Block:
    def make() -> nn.Module:
        from timm.models.vision_transformer import Block as VitBlock

        return VitBlock(width, heads, qkv_bias=True)

    return Block(make, width, tokens, batch, depth=depth)


def _llama(width: int, feed_forward: int, heads: int, tokens: int, batch: int) -> Block:
    return Block(lambda: _Decoder(width, feed_forward, heads), width, tokens, batch, width // heads)


#: LLaMA-350M is that of GaLore (Zhao et al. 2024), with sequences of 256 tokens. ``trial-`` blocks are for tests.
BLOCKS = {
    "vit-b": _vit(768, 12),
    "deit-tiny": _vit(192, 3),
    "deit-tiny-12": _vit(192, 3, depth=12),
    "llama-350m": _llama(1024, 2736, 16, tokens=256, batch=32),
    "trial-vit": _vit(64, 2, tokens=16, batch=4),
    "trial-vit-3": _vit(64, 2, tokens=16, batch=4, depth=3),
    "trial-llama": _llama(64, 192, 2, tokens=32, batch=4),
}


def figures(
    block: str, policy: str, gpu: str, dtype: str, linears: bool, quantizers: str = "kernels"
) -> dict[str, Any]:
    """Return the figures of one program, without the comparison. Call it in a worker process."""
    with operators.tensor_code() if quantizers == "tensor code" else nullcontext():
        return _figures(block, policy, gpu, dtype, linears)


def _figures(block: str, policy: str, gpu: str, dtype: str, linears: bool) -> dict[str, Any]:
    from benchmarks.gpu.absent import GPUS
    from benchmarks.gpu.program import program

    subject = BLOCKS[block]
    with torch.random.fork_rng(devices=[]):
        try:
            written = program(subject.module(), subject.inputs(), policy, GPUS[gpu], options.DTYPES[dtype])
        except fp4graph.PolicyError as error:
            raise Inapplicable(str(error).partition(";")[0]) from None
    counted = {
        "bytes": sum(kernel.bytes for kernel in written.kernels),
        "forward_bytes": sum(kernel.bytes for kernel in written.kernels if not kernel.backward),
        "gemm_bytes": sum(kernel.bytes for kernel in written.kernels if kernel.kind == "gemm"),
        "launches": written.launches,
        "key_launches": written.keys,
        "gemms": sum(kernel.kind == "gemm" for kernel in written.kernels),
        "library_calls": sum(kernel.kind == "library" for kernel in written.kernels),
        "distinct_kernels": len(written.sources),
        "source_bytes": sum(map(len, written.sources)),
        "gemm_flops": dict(written.flops),
        "saved_bytes": written.saved,
        "saved_parameter_bytes": written.saved_parameters,
        "compile_seconds": written.seconds,
        "largest": [vars(kernel) for kernel in sorted(written.kernels, key=lambda k: -k.bytes)[:SHOWN]],
    }
    if linears:
        kinds = Counter(_linears(subject))
        counted["linears_saved_bytes"] = sum(n * _saved_by_linear(*kind, policy, gpu) for kind, n in kinds.items())
    return counted


def _linears(block: Block) -> list[tuple[int, int, int]]:
    """Return (tokens, in, out) of the block's linears."""
    linears = [module for module in block.make().modules() if isinstance(module, nn.Linear)] * max(block.depth, 1)
    return [(block.batch * block.tokens, linear.in_features, linear.out_features) for linear in linears]


def _saved_by_linear(tokens: int, inside: int, outside: int, policy: str, gpu: str) -> int:
    from benchmarks.gpu.absent import GPUS
    from benchmarks.gpu.program import program

    linear = nn.Linear(inside, outside, bias=False, dtype=torch.bfloat16)
    x = torch.zeros(tokens, inside, dtype=torch.bfloat16, requires_grad=True)
    try:
        written = program(linear, [x], policy, GPUS[gpu], torch.float32)
    except fp4graph.Error as error:  # such as a policy for all blocks but the first
        raise Inapplicable(str(error).partition(";")[0]) from None
    return written.saved + written.saved_parameters


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


def _megabytes(name: str, header: str) -> tables.Column:
    return tables.Column(header, lambda row: f"{row['figures'][name] / 1e6:,.0f}")


def _ratio(name: str, header: str, digits: int = 2) -> tables.Column:
    def text(row: tables.Stored) -> str:
        return f"{row['figures'][name]:.{digits}f}" if name in row["figures"] else "–"

    return tables.Column(header, text)


COLUMNS = (
    tables.case("block"),
    tables.case("dtype"),
    tables.case("card"),
    tables.case("policy"),
    tables.case("quantizers"),
    _megabytes("bytes", "MB"),
    _megabytes("gemm_bytes", "of GEMMs"),
    _ratio("ratio", "to unquantized"),
    tables.number("launches", "launches"),
    tables.number("key_launches", "of keys"),
    tables.number("gemms", "GEMMs"),
    tables.number("distinct_kernels", "kernels"),
    tables.Column("source, KB", lambda row: f"{row['figures']['source_bytes'] / 1e3:,.0f}"),
    _megabytes("saved_bytes", "saved, MB"),
    _ratio("linears_saved_ratio", "of linears", 3),
    _ratio("estimate", "estimate"),
)
TITLE = "Predicted: bytes, launches and saved bytes of one block's forward and backward"

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    context: typer.Context,
    blocks: Annotated[str, typer.Option(help=f"Any of {', '.join(BLOCKS)}, separated by commas.")] = "vit-b",
    policies: options.Policies = "tetrajet,microscaling,nvfp4,nvfp4-best",
    dtypes: options.Dtypes = "bfloat16",
    cards: Annotated[str, typer.Option(help=f"Any of {', '.join(RATES)}, separated by commas.")] = "H200",
    bandwidth: Annotated[float | None, typer.Option(min=0, help="TB/s, instead of the card's.")] = None,
    gemm_rate: Annotated[float | None, typer.Option(min=0, help="TFLOP/s, instead of the card's.")] = None,
    linears: Annotated[bool, typer.Option(help="Saved bytes of linears too, each compiled alone.")] = True,
    quantizers: Annotated[str, typer.Option(help="kernels, tensor code, or both, separated by commas.")] = "kernels",
    largest: Annotated[bool, typer.Option(help="Print the largest kernels of each program.")] = True,
    missing: Annotated[bool, typer.Option(help="Only cases without figures in the folder.")] = False,
    folder: options.Folder = RESULTS,
) -> None:
    from benchmarks.gpu.absent import worker

    names = [(UNQUANTIZED, "–")]
    names += [
        (name, quantizer_code)
        for name in options.policies_of(policies)
        if name != UNQUANTIZED
        for quantizer_code in options.choices(quantizers, ("kernels", "tensor code"))
    ]
    results = Results("gpu_plan", context, torch.device("cpu"), folder)
    chosen = product(
        options.choices(blocks, BLOCKS), options.choices(dtypes, options.DTYPES), options.choices(cards, RATES)
    )
    with worker() as pool:
        for block, dtype, card in chosen:
            rates, counted = _rates(card, bandwidth, gemm_rate), dict[str, dict[str, Any]]()
            for policy, quantizer_code in names:
                case = {"block": block, "dtype": dtype, "card": card, "policy": policy, "quantizers": quantizer_code}
                if missing and (figures_on_file := results.known(case)) is not None:
                    counted[policy] = figures_on_file
                    continue
                row = attempt(case, partial(_counted, pool, case, linears, rates, counted))
                results.add(row)
                if largest and "largest" in row.figures:
                    _print_largest(f"{policy}, {quantizer_code}", row.figures["largest"])
    results.close(TITLE, COLUMNS)


def _counted(
    pool: ProcessPoolExecutor, case: dict[str, str], linears: bool, rates: Rates, counted: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the figures of a case; ``counted`` holds those of the unquantized program, which comes first."""
    arguments = case["block"], case["policy"], case["card"], case["dtype"], linears, case["quantizers"]
    program = pool.submit(figures, *arguments).result()
    if case["policy"] == UNQUANTIZED:
        counted[UNQUANTIZED] = program
    return compared(program, counted[UNQUANTIZED], rates)


def _rates(card: str, bandwidth: float | None, gemm_rate: float | None) -> Rates:
    assumed = RATES[card]
    flops = assumed.flops if gemm_rate is None else dict.fromkeys(assumed.flops, gemm_rate * 1e12)
    return Rates(assumed.bytes if bandwidth is None else bandwidth * 1e12, flops)


def _print_largest(policy: str, kernels: list[dict[str, Any]]) -> None:
    print(f"{policy}: the largest kernels")
    for kernel in kernels:
        moved = f"{', '.join(kernel['reads'][:3])} → {', '.join(kernel['writes'][:3])}"
        place = f"{'backward' if kernel['backward'] else 'forward'} {kernel['kind']} {kernel['site']}"
        print(f"  {kernel['bytes'] / 1e6:7.1f} MB  {place}: {moved}: {kernel['what'][:90]}")


if __name__ == "__main__":
    app()
