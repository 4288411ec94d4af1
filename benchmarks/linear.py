"""One linear, forward and backward, under policies and in other libraries, beside the same linear unquantized.

Inductor compiles the unquantized linear and ours; the peers run both compiled and eager. All have the same weight and
dY and no bias (torchao computes no gradient for a bias), and compute dX and dW.
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
from fp4graph.model.explanation import Explanation
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
#: The largest relative difference of compiled from eager results: sums, also those of rotations, are rounded in another
#: order before they are quantized. A quantizer left out makes a difference of a tenth and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Linear:
    """One contender: ``run`` is a forward and a backward, ``floor`` a lower bound of the ratio, None if unknown."""

    name: str
    run: Callable[[], object]
    quantizes: str
    floor: float | None = None


def of_inner_blocks(policy: str) -> fp4graph.Policy:
    """Return ``policy`` without its rules for the first or last blocks: a single linear stands for an inner block's."""
    loaded = fp4graph.load_policy(policy)
    return replace(loaded, rules=tuple(r for r in loaded.rules if not (r.match.first_blocks or r.match.last_blocks)))


class Case:
    """One shape and dtype: the data, and the contenders built from one linear."""

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
        """Return a function that runs forward and backward of ``module``, without earlier gradients."""

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
        """Return the linear under a policy; its floor follows from the time of the unquantized linear."""
        module, explanation = self.applied(policy, self.backend)
        self.check(module, policy)
        (site,) = explanation.sites
        quantized = [operand for operand, spec in site.operands.items() if spec is not None]
        nbytes = floor.quantizer_bytes(self.m, self.k, self.n, self.dtype.itemsize, quantized)
        lower_bound = 1 + nbytes / self.bandwidth / baseline_seconds
        names = ", ".join(f"Q{number}" for number, operand in enumerate(Operand, 1) if operand in quantized)
        all_six = len(quantized) == len(Operand)
        return Linear(policy, self.run(module), "Q1 to Q6" if all_six else names or "nothing", lower_bound)

    def applied(self, policy: str, backend: str) -> tuple[nn.Module, Explanation]:
        module, inner = copy.deepcopy(self.linear), of_inner_blocks(policy)
        explanation = fp4graph.explain(module, inner, (self.x,))
        if explanation.problem:
            raise Inapplicable(explanation.problem.partition(";")[0])
        fp4graph.apply(module, inner, backend=backend, dynamic=False, total_forwards=TOTAL_STEPS)
        fp4graph.prepare_optimizer(module, torch.optim.AdamW(module.parameters()))
        return module, explanation

    def check(self, module: nn.Module, policy: str) -> None:
        """Raise RuntimeError unless ``module``, fresh, computes the same as the policy run eagerly.

        This ensures that the timed code does all the work of the policy.
        """
        expected = self.outcome(self.applied(policy, "eager")[0])
        for name, computed, reference in zip(("Y", "dX", "dW"), self.outcome(module), expected, strict=True):
            error = ((computed - reference).float().norm() / reference.float().norm()).item()
            if not error <= TOLERANCE[self.dtype]:
                raise RuntimeError(f"{policy}: compiled {name} differs from eager's by {error:.1e} of its norm")

    def outcome(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        y = module(self.x)
        dx, dw = torch.autograd.grad(y, (self.x, *module.parameters()), self.dy)
        return y.detach(), dx, dw

    def peer(self, name: str, *, compiled: bool) -> Linear:
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
    """Measure one shape and dtype: each contender beside the unquantized linear, then the policies beside a peer."""
    torch._dynamo.reset()
    baseline = case.unquantized()
    baseline_seconds = seconds_of(baseline.run, case.device)

    def beside(base: Linear, name: str, build: Callable[[], Linear]) -> Row:
        def figures() -> dict[str, Any]:
            contender = build()
            comparison = compare(base.run, contender.run, case.device, patience)
            return {
                **figures_of(comparison),
                "quantizes": contender.quantizes,
                "floor": contender.floor if base is baseline else None,
                "gemm_rate": 6 * case.m * case.k * case.n / baseline_seconds,
                "machine_gemm_rate": floor.gemm_rate(case.dtype, case.device),
                "bandwidth": case.bandwidth,
            }

        dtype = str(case.dtype).removeprefix("torch.")
        row_case = {"shape": case.shape, "dtype": dtype, "linear": name, "to": base.name, "backend": case.backend}
        return attempt(row_case, figures)

    yield beside(baseline, f"{UNQUANTIZED}, eager", lambda: case.unquantized(compiled=False))
    measured = []
    for policy in policies:
        yield (row := beside(baseline, policy, partial(case.under, policy, baseline_seconds)))
        measured += [policy] if "ratio" in row.figures else []
    for peer in peers:
        for compiled in (False, True):
            yield beside(baseline, peer_name(peer, compiled=compiled), partial(case.peer, peer, compiled=compiled))
    if against is not None and PEERS[against].installed:
        peer_linear = case.peer(against, compiled=True)
        for policy in measured:
            yield beside(peer_linear, policy, partial(case.under, policy, baseline_seconds))


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    context: typer.Context,
    shapes: Annotated[str, typer.Option(help=f"Any of {', '.join(SHAPES)}; all.")] = "1024,deit-tiny fc1,llama-60m up",
    dtypes: options.Dtypes = "float32,bfloat16",
    policies: options.Policies = "bf16,tetrajet,microscaling,nvfp4,tetrajet-qema",
    peers: Annotated[str, typer.Option(help=f"Any of {', '.join(PEERS)}; all; '' for none.")] = "all",
    against: Annotated[str, typer.Option(help="A peer, compiled, with which policies are compared too.")] = "torchao",
    device: options.Device = "cpu",
    backend: options.Backend = "inductor",
    seconds: options.Seconds = 30,
    repeats: options.Repeats = 11,
    folder: options.Folder = RESULTS,
) -> None:
    chosen, names, patience = options.choices(peers, PEERS), options.policies_of(policies), Patience(seconds, repeats)
    torch_device = options.device_of(device)
    results = Results("linear", context, torch_device, folder)
    for shape in options.choices(shapes, SHAPES):
        for dtype in options.choices(dtypes, options.DTYPES):
            case = Case(shape, options.DTYPES[dtype], torch_device, backend)
            for row in measure(case, names, chosen, against or None, patience):
                results.add(row)
    results.close(TITLE, COLUMNS)


if __name__ == "__main__":
    app()
