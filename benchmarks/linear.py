"""One linear, forward and backward, under policies and in other libraries, beside the same linear unquantized.

The unquantized linear is compiled by Inductor, ours too, the peers both compiled and eager. All have the same weight,
no bias (torchao computes no gradient for one), a given dY, and compute dX and dW.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import fp4graph
from benchmarks import floor, options, tables
from benchmarks.models import TOTAL_STEPS, UNQUANTIZED
from benchmarks.peers import PEERS, peer_name
from benchmarks.results import RESULTS, Inapplicable, Results, Row, attempt, figures_of
from benchmarks.timing import Patience, compare, seconds_of
from fp4graph.model.explain import Explanation
from fp4graph.technique.operands import Operand

#: M, K, N: rows of X, in_features, out_features. ViTs: 16 images of 197 tokens; LLaMA: 8 sequences of 256.
SHAPES = {
    "1024": (1024, 1024, 1024),
    "deit-tiny qkv": (3152, 192, 576),
    "deit-tiny fc1": (3152, 192, 768),
    "deit-tiny fc2": (3152, 768, 192),
    "deit-small fc1": (3152, 384, 1536),
    "llama-60m q": (2048, 512, 512),
    "llama-60m up": (2048, 512, 1376),
    "llama-60m down": (2048, 1376, 512),
    "trial": (64, 64, 96),
}
COLUMNS = (
    tables.case("shape"),
    tables.case("dtype"),
    tables.case("linear"),
    tables.case("to", "ratio to"),
    *tables.RATIO,
    tables.milliseconds("seconds", "ms"),
    tables.number("floor", "floor"),
    tables.text("quantizes", "quantized"),
)
TITLE = "One linear, forward and backward"
#: How far compiled results may be from eager ones: sums are rounded in another order, those of rotations too, before
#: they are quantized. A quantizer left out makes a difference of a tenth and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Linear:
    """One contender. ``run`` is a forward and a backward; ``floor`` the least ratio there could be, None if unknown."""

    name: str
    run: Callable[[], object]
    quantizes: str
    floor: float | None = None


def of_inner_blocks(policy: str) -> fp4graph.Policy:
    """Return ``policy`` without its rules for the first or last blocks: a linear by itself stands for one between."""
    whole = fp4graph.load_policy(policy)
    return replace(whole, rules=tuple(r for r in whole.rules if not (r.match.first_blocks or r.match.last_blocks)))


class Case:
    """One shape and dtype: the data, and what is made of one linear."""

    def __init__(self, shape: str, dtype: torch.dtype, device: torch.device, backend: str) -> None:
        self.shape, self.dtype, self.device, self.backend = shape, dtype, device, backend
        self.m, self.k, self.n = SHAPES[shape]
        torch.manual_seed(0)
        self.linear = nn.Linear(self.k, self.n, bias=False, device=device, dtype=dtype)
        self.x = torch.randn(self.m, self.k, device=device, dtype=dtype, requires_grad=True)
        self.dy = torch.randn(self.m, self.n, device=device, dtype=dtype)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a copy of the largest of X, W and dY."""
        largest = max(self.m * self.k, self.n * self.k, self.m * self.n)
        return floor.bandwidth(largest * self.dtype.itemsize, self.device)

    def run(self, module: nn.Module) -> Callable[[], object]:
        """A forward and a backward of ``module``, gradients begun anew."""

        def call() -> None:
            module.zero_grad(set_to_none=True)
            self.x.grad = None
            module(self.x).backward(self.dy)

        return call

    def unquantized(self, *, compiled: bool = True) -> Linear:
        module = copy.deepcopy(self.linear)
        if compiled:
            module.compile(backend=self.backend, dynamic=False)
        return Linear(UNQUANTIZED if compiled else f"{UNQUANTIZED}, eager", self.run(module), "nothing")

    def under(self, policy: str, baseline_seconds: float) -> Linear:
        """The linear under a policy; its floor follows from what the unquantized one takes."""
        module, explanation = self.applied(policy, self.backend)
        self.check(module, policy)
        (site,) = explanation.sites
        quantized = [operand for operand, spec in site.operands.items() if spec is not None]
        moved = floor.quantizer_bytes(self.m, self.k, self.n, self.dtype.itemsize, quantized)
        least = 1 + moved / self.bandwidth / baseline_seconds
        names = ", ".join(f"Q{number}" for number, operand in enumerate(Operand, 1) if operand in quantized)
        all_six = len(quantized) == len(Operand)
        return Linear(policy, self.run(module), "Q1 to Q6" if all_six else names or "nothing", least)

    def applied(self, policy: str, backend: str) -> tuple[nn.Module, Explanation]:
        """A copy of the linear under ``policy``."""
        module, inner = copy.deepcopy(self.linear), of_inner_blocks(policy)
        explanation = fp4graph.explain(module, inner, (self.x,))
        if explanation.problem:
            raise Inapplicable(explanation.problem.partition(";")[0])
        fp4graph.apply(module, inner, backend=backend, dynamic=False, total_forwards=TOTAL_STEPS)
        fp4graph.prepare_optimizer(module, torch.optim.AdamW(module.parameters()))
        return module, explanation

    def check(self, module: nn.Module, policy: str) -> None:
        """That ``module``, fresh, computes what the policy does in eager: nothing cheaper is timed under its name."""
        expected = self.outcome(self.applied(policy, "eager")[0])
        for name, ours, theirs in zip(("Y", "dX", "dW"), self.outcome(module), expected, strict=True):
            error = ((ours - theirs).float().norm() / theirs.float().norm()).item()
            if not error <= TOLERANCE[self.dtype]:
                raise RuntimeError(f"{policy}: compiled {name} differs from eager's by {error:.1e} of its norm")

    def outcome(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Y, dX, dW."""
        y = module(self.x)
        dx, dw = torch.autograd.grad(y, (self.x, *module.parameters()), self.dy)
        return y.detach(), dx, dw

    def peer(self, name: str, *, compiled: bool) -> Linear:
        """Another library's form of the linear."""
        peer = PEERS[name]
        if not peer.installed:
            raise Inapplicable(f"not installed: pip install {peer.package}")
        module = peer.build(copy.deepcopy(self.linear))
        if compiled:
            module.compile(backend=self.backend, dynamic=False)
        return Linear(peer_name(name, compiled=compiled), self.run(module), peer.quantizes)


def measure(
    case: Case, policies: list[str], peers: list[str], against: str | None, patience: Patience
) -> Iterator[Row]:
    """Everything at one shape and dtype: each beside the unquantized linear, then the policies beside a peer."""
    torch._dynamo.reset()
    baseline = case.unquantized()
    baseline_seconds = seconds_of(baseline.run, case.device)

    def beside(base: Linear, name: str, build: Callable[[], Linear]) -> Row:
        def figures() -> dict[str, Any]:
            own = build()
            comparison = compare(base.run, own.run, case.device, patience)
            return {
                **figures_of(comparison),
                "quantizes": own.quantizes,
                "floor": own.floor if base is baseline else None,
                "gemm_rate": 6 * case.m * case.k * case.n / baseline_seconds,
                "machine_gemm_rate": floor.gemm_rate(case.dtype, case.device),
                "bandwidth": case.bandwidth,
            }

        dtype = str(case.dtype).removeprefix("torch.")
        about = {"shape": case.shape, "dtype": dtype, "linear": name, "to": base.name, "backend": case.backend}
        return attempt(about, figures)

    yield beside(baseline, f"{UNQUANTIZED}, eager", lambda: case.unquantized(compiled=False))
    measured = []
    for policy in policies:
        yield (row := beside(baseline, policy, partial(case.under, policy, baseline_seconds)))
        measured += [policy] if "ratio" in row.figures else []
    for peer in peers:
        for compiled in (False, True):
            yield beside(baseline, peer_name(peer, compiled=compiled), partial(case.peer, peer, compiled=compiled))
    if against is not None and PEERS[against].installed:
        other = case.peer(against, compiled=True)
        for policy in measured:
            yield beside(other, policy, partial(case.under, policy, baseline_seconds))


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    context: typer.Context,
    shapes: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}; all.")] = "1024,deit-tiny fc1,llama-60m up",
    dtypes: options.Dtypes = "float32,bfloat16",
    policies: options.Policies = "bf16,tetrajet,microscaling,nvfp4,tetrajet-qema",
    peers: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}; all; '' for none.")] = "all",
    against: Annotated[str, typer.Option(help="A peer, compiled, to hold policies against directly.")] = "torchao",
    device: options.Device = "cpu",
    backend: options.Backend = "inductor",
    seconds: options.Seconds = 30,
    repeats: options.Repeats = 11,
    folder: options.Folder = RESULTS,
) -> None:
    chosen, names, patience = options.choices(peers, PEERS), options.policies_of(policies), Patience(seconds, repeats)
    on = options.device_of(device)
    results = Results("linear", context, on, folder)
    for shape in options.choices(shapes, SHAPES):
        for dtype in options.choices(dtypes, options.DTYPES):
            case = Case(shape, options.DTYPES[dtype], on, backend)
            for row in measure(case, names, chosen, against or None, patience):
                results.add(row)
    results.close(TITLE, COLUMNS)


if __name__ == "__main__":
    app()
