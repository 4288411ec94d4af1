"""One linear, forward and backward, under policies and in other libraries, beside the same linear unquantized.

Inductor compiles the unquantized linear and ours; the peers run both compiled and eager. All have the same weight and
dY and no bias (torchao computes no gradient for a bias), and compute dX and dW.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import fp4graph
from benchmarks import command, floor, tables
from benchmarks.command import Cases, Settings
from benchmarks.models import DTYPES, UNQUANTIZED, Inapplicable, fitting, under
from benchmarks.peers import PEERS, peer_name
from benchmarks.timing import compare, seconds_of
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
    """One contender: ``run`` is a forward and a backward, ``floor`` a lower bound of the ratio, None if unknown."""

    name: str
    run: Callable[[], object]
    quantizes: str
    floor: float | None = None


def of_inner_blocks(policy: str) -> fp4graph.Policy:
    """Return ``policy`` without its rules for the first or last blocks: a single linear stands for an inner block's."""
    loaded = fp4graph.load_policy(policy)
    return replace(loaded, rules=tuple(r for r in loaded.rules if not (r.match.first_blocks or r.match.last_blocks)))


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
    def bandwidth(self) -> float:
        """Bytes per second of a copy of the largest of X, W and dY."""
        largest = max(self.m * self.k, self.n * self.k, self.m * self.n)
        return floor.bandwidth(largest * self.dtype.itemsize, self.device)

    def unquantized(self, *, compiled: bool = True) -> Linear:
        name = UNQUANTIZED if compiled else f"{UNQUANTIZED}, eager"
        return self._plain(copy.deepcopy(self.linear), name, "nothing", compiled)

    def under(self, policy: str, baseline_seconds: float) -> Linear:
        """Return the linear under a policy; its floor follows from the time of the unquantized linear."""
        site = fitting(fp4graph.explain(self.linear, of_inner_blocks(policy), (self.x,))).sites[0]
        module = self.applied(policy, self.backend)
        self.check(module, policy)
        quantized = [operand for operand, spec in site.operands.items() if spec is not None]
        nbytes = floor.quantizer_bytes(self.m, self.k, self.n, self.dtype.itemsize, quantized)
        lower_bound = 1 + nbytes / self.bandwidth / baseline_seconds
        names = ", ".join(f"Q{number}" for number, operand in enumerate(Operand, 1) if operand in quantized)
        words = "Q1 to Q6" if len(quantized) == len(Operand) else names or "nothing"
        return Linear(policy, running(module, self.x, self.dy), words, lower_bound)

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
        peer = PEERS[name]
        if not peer.installed:
            raise Inapplicable(f"not installed: pip install {peer.package}")
        module = peer.build(copy.deepcopy(self.linear))
        return self._plain(module, peer_name(name, compiled=compiled), peer.quantizes, compiled)

    def _plain(self, module: nn.Module, name: str, quantizes: str, compiled: bool) -> Linear:
        if compiled:
            module.compile(backend=self.backend, dynamic=False)
        return Linear(name, running(module, self.x, self.dy), quantizes)


def of_case(case: Case, policies: list[str], peers: list[str], against: str, settings: Settings) -> Cases:
    """Yield one shape and dtype: each contender beside the unquantized linear, then the policies beside a peer."""
    torch._dynamo.reset()
    baseline, measured = case.unquantized(), list[str]()
    baseline_seconds = seconds_of(baseline.run, case.device)

    def figures(base: Linear, build: Callable[[], Linear]) -> dict[str, Any]:
        contender = build()
        comparison = compare(base.run, contender.run, case.device, settings.patience)
        measured.append(contender.name)
        return {
            **comparison.figures,
            "quantizes": contender.quantizes,
            "floor": contender.floor if base is baseline else None,
            "gemm_rate": 6 * case.m * case.k * case.n / baseline_seconds,
            "machine_gemm_rate": floor.gemm_rate(case.dtype, case.device),
            "bandwidth": case.bandwidth,
        }

    def beside(base: Linear, builders: Mapping[str, Callable[[], Linear]]) -> Cases:
        for name, build in builders.items():
            about = {"shape": case.shape, "dtype": str(case.dtype).removeprefix("torch."), "linear": name}
            yield {**about, "to": base.name, "backend": case.backend}, partial(figures, base, build)

    ours = {policy: partial(case.under, policy, baseline_seconds) for policy in policies}
    yield from beside(baseline, {f"{UNQUANTIZED}, eager": partial(case.unquantized, compiled=False), **ours})
    builders = ((peer, compiled) for peer in peers for compiled in (False, True))
    yield from beside(
        baseline, {peer_name(peer, compiled=c): partial(case.peer, peer, compiled=c) for peer, c in builders}
    )
    if against and PEERS[against].installed:
        ours = {policy: build for policy, build in ours.items() if policy in measured}
        yield from beside(case.peer(against, compiled=True), ours)


def cases(
    settings: Settings,
    shapes: Annotated[str, typer.Option(help=f"Any of {', '.join(SHAPES)}; all.")] = "1024,deit-tiny fc1,llama-60m up",
    dtypes: command.Dtypes = "float32,bfloat16",
    policies: command.Policies = "bf16,tetrajet,microscaling,nvfp4,tetrajet-qema",
    peers: Annotated[str, typer.Option(help=f"Any of {', '.join(PEERS)}; all; '' for none.")] = "all",
    against: Annotated[str, typer.Option(help="A peer, compiled, with which policies are compared too.")] = "torchao",
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
