"""The product of eight experts with their own tokens, forward and backward, beside the same product unquantized.

    python -m benchmarks.experts [--policies tetrajet,nvfp4] [--tokens 64]

Both have the same weights ``[E, N, K]``, dY and tokens sorted by expert, and compute dX and dW. Inductor compiles both,
except the unquantized product in fp32, for which it has no code: torch's own runs there.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import fp4graph
from benchmarks import command, tables
from benchmarks.command import Cases, Settings
from benchmarks.linear import running
from benchmarks.models import DTYPES, UNQUANTIZED, fitting, under
from benchmarks.processes import Inapplicable
from benchmarks.timing import compare

COLUMNS = (
    *tables.cases("shape", "dtype", "experts"),
    *tables.RATIO,
    tables.milliseconds("seconds", "ms"),
)


class Experts(nn.Module):
    def __init__(self, count: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, n, k, dtype=dtype, device=device) / k**0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.mT, offs=ends)


def of_any_experts(policy: str) -> fp4graph.Policy:
    """Return ``policy`` with its first rule that quantizes alone, for experts wherever they stand."""
    loaded = fp4graph.load_policy(policy)
    rule = next((rule for rule in loaded.rules if rule.quantizes), None)
    if rule is None:
        raise Inapplicable("the policy quantizes nothing")
    rule = dataclasses.replace(rule, match=type(rule.match)(op=("grouped",)))
    return dataclasses.replace(loaded, rules=(rule,))


def of_dtype(dtype: str, shape: tuple[int, int, int], policies: list[str], settings: Settings) -> Cases:
    """Yield each policy beside the experts unquantized."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    (count, tokens, features), device, backend = shape, settings.device, settings.backend
    experts = Experts(count, features, features, DTYPES[dtype], device)
    x, dy = (torch.randn(count * tokens, features, dtype=DTYPES[dtype], device=device) for _ in range(2))
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=device) * tokens
    baseline = copy.deepcopy(experts)
    if dtype == "bfloat16":
        baseline.compile(backend=backend, dynamic=False)

    def measure(policy: str) -> dict[str, Any]:
        fitting(fp4graph.explain(experts, of_any_experts(policy), (x, ends)))
        module = under(copy.deepcopy(experts), of_any_experts(policy), backend, dynamic=False)
        plain, quantized = (running(each, x.requires_grad_(), dy, ends) for each in (baseline, module))
        return compare(plain, quantized, device, settings.patience).figures

    for policy in policies:
        words = f"{count} × {tokens} × {features} × {features}"
        case = {"shape": words, "dtype": dtype, "experts": policy, "to": UNQUANTIZED, "backend": backend}
        yield case, partial(measure, policy)


def cases(
    settings: Settings,
    experts: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each expert.")] = 64,
    features: Annotated[int, typer.Option(min=1, help="K and N.")] = 512,
    dtypes: command.Dtypes = "float32,bfloat16",
    policies: command.Policies = "microscaling,tetrajet,nvfp4,nvfp4-te,mxfp4-best",
) -> Cases:
    for dtype in command.choices(dtypes, DTYPES):
        yield from of_dtype(dtype, (experts, tokens, features), command.policies_of(policies), settings)


benchmark = command.Benchmark("experts", "Experts, forward and backward", COLUMNS, cases)
app = benchmark.app

if __name__ == "__main__":
    app()
