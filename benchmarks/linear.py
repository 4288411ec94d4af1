"""One linear, forward and backward, under policies and in other libraries, beside the same linear unquantized.

Inductor compiles the unquantized linear and ours; the peers run both compiled and eager. All have the same weight and
dY and no bias (torchao computes no gradient for a bias), and compute dX and dW.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn

import fp4graph
from benchmarks import command, floor, tables
from benchmarks.command import Cases, Settings
from benchmarks.models import DTYPES, UNQUANTIZED, fitting, of_inner_blocks, under
from benchmarks.peers import PEERS, QUANTIZES, installed, peer_name
from benchmarks.processes import Inapplicable
from benchmarks.timing import compare
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
    *tables.cases("shape", "dtype", "linear", to="ratio to"),
    *tables.RATIO,
    tables.milliseconds("seconds", "ms"),
    tables.figure("floor", "floor"),
    tables.figure("quantizes", "quantized"),
)
#: The largest relative difference of compiled from eager results: sums, also those of rotations, are rounded in another
#: order before they are quantized. A quantizer left out makes a difference of a tenth and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Linear:
    """One contender: ``run`` is a forward and a backward."""

    run: Callable[[], object]
    quantizes: str
    nbytes: int | None = None  # the least that its quantizers move; None if unknown


Builder = Callable[[], Linear]


def running(module: nn.Module, x: Tensor, dy: Tensor, *others: Tensor) -> Callable[[], object]:
    """Return a function that runs forward and backward of ``module(x, *others)``, without earlier gradients."""

    def call() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x, *others).backward(dy)

    return call


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
    def numel(self) -> tuple[int, int, int]:
        """Numbers of elements of X, W and dY."""
        return self.m * self.k, self.n * self.k, self.m * self.n

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a copy of the largest of X, W and dY."""
        return floor.bandwidth(max(self.numel) * self.dtype.itemsize, self.device)

    def unquantized(self, *, compiled: bool = True) -> Linear:
        return self._plain(copy.deepcopy(self.linear), "nothing", compiled)

    def under(self, policy: str) -> Linear:
        """Return the linear under a policy."""
        site = fitting(fp4graph.explain(self.linear, of_inner_blocks(policy), (self.x,))).sites[0]
        module = self.applied(policy, self.backend)
        self.check(module, policy)
        quantized = [operand for operand, spec in site.operands.items() if spec is not None]
        nbytes = floor.quantizer_bytes(*self.numel, self.dtype.itemsize, quantized)
        names = ", ".join(f"Q{number}" for number, operand in enumerate(Operand, 1) if operand in quantized)
        words = "Q1 to Q6" if len(quantized) == len(Operand) else names or "nothing"
        return Linear(running(module, self.x, self.dy), words, nbytes)

    def applied(self, policy: str, backend: str) -> nn.Module:
        return under(copy.deepcopy(self.linear), of_inner_blocks(policy), backend, dynamic=False)

    def check(self, module: nn.Module, policy: str) -> None:
        """Raise RuntimeError unless ``module``, fresh, computes the same as the policy run eagerly.

        This ensures that the timed code does all the work of the policy.
        """
        expected = self.outcome(self.applied(policy, "eager"))
        for name, computed, reference in zip(("Y", "dX", "dW"), self.outcome(module), expected, strict=True):
            error = ((computed - reference).float().norm() / reference.float().norm()).item()
            if not error <= TOLERANCE[self.dtype]:
                raise RuntimeError(f"{policy}: compiled {name} differs from eager's by {error:.1e} of its norm")

    def outcome(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        y = module(self.x)
        dx, dw = torch.autograd.grad(y, (self.x, *module.parameters()), self.dy)
        return y.detach(), dx, dw

    def peer(self, name: str, *, compiled: bool) -> Linear:
        if not installed(name):
            raise Inapplicable(f"not installed: pip install {name}")
        return self._plain(PEERS[name](copy.deepcopy(self.linear)), QUANTIZES, compiled)

    def _plain(self, module: nn.Module, quantizes: str, compiled: bool) -> Linear:
        if compiled:
            module.compile(backend=self.backend, dynamic=False)
        return Linear(running(module, self.x, self.dy), quantizes)


def of_case(case: Case, policies: list[str], peers: list[str], against: str, settings: Settings) -> Cases:
    """Yield one shape and dtype: each contender beside the unquantized linear, then the policies beside a peer."""
    torch._dynamo.reset()

    def figures(to: str, base: Builder, build: Builder) -> dict[str, Any]:
        baseline, contender = base(), build()
        comparison = compare(baseline.run, contender.run, case.device, settings.patience)
        nbytes = contender.nbytes if to == UNQUANTIZED else None
        return {
            **comparison.figures,
            "quantizes": contender.quantizes,
            "floor": None if nbytes is None else 1 + nbytes / case.bandwidth / comparison.baseline,
            "gemm_rate": 6 * case.m * case.k * case.n / comparison.baseline,
            "machine_gemm_rate": floor.gemm_rate(case.dtype, case.device),
            "bandwidth": case.bandwidth,
        }

    def beside(to: str, base: Builder, builders: Mapping[str, Builder]) -> Cases:
        built_once = cache(base)  # in the first case, whose figures say so if it fails
        for name, build in builders.items():
            about = {"shape": case.shape, "dtype": str(case.dtype).removeprefix("torch."), "linear": name}
            yield {**about, "to": to, "backend": case.backend}, partial(figures, to, built_once, build)

    ours: dict[str, Builder] = {policy: partial(case.under, policy) for policy in policies}
    eager: dict[str, Builder] = {f"{UNQUANTIZED}, eager": partial(case.unquantized, compiled=False)}
    theirs: dict[str, Builder] = {
        peer_name(peer, compiled=compiled): partial(case.peer, peer, compiled=compiled)
        for peer in peers
        for compiled in (False, True)
    }
    yield from beside(UNQUANTIZED, case.unquantized, {**eager, **ours, **theirs})
    if against:
        yield from beside(peer_name(against, compiled=True), partial(case.peer, against, compiled=True), ours)


def cases(
    settings: Settings,
    shapes: Annotated[str, typer.Option(help=f"Any of {', '.join(SHAPES)}; all.")] = "1024,deit-tiny fc1,llama-60m up",
    dtypes: command.Dtypes = "float32,bfloat16",
    policies: command.Policies = "bf16,tetrajet,microscaling,nvfp4,tetrajet-qema",
    peers: Annotated[str, typer.Option(help=f"Any of {', '.join(PEERS)}; all; '' for none.")] = "all",
    against: Annotated[
        Literal["torchao", "brevitas", ""], typer.Option(help="A peer, compiled, beside which policies run too.")
    ] = "torchao",
) -> Cases:
    names = command.policies_of(policies), command.choices(peers, PEERS)
    for shape in command.choices(shapes, SHAPES):
        for dtype in command.choices(dtypes, DTYPES):
            case = Case(shape, DTYPES[dtype], settings.device, settings.backend)
            yield from of_case(case, *names, against, settings)


benchmark = command.Benchmark("linear", "One linear, forward and backward", COLUMNS, cases)
app = benchmark.app

if __name__ == "__main__":
    app()
