"""The product of eight experts with their own tokens, forward and backward, beside the same product unquantized.

    python -m benchmarks.experts [--policies tetrajet,nvfp4] [--tokens 64]

Inductor compiles both. Both have the same weights ``[E, N, K]``, dY and tokens sorted by expert, and compute dX and dW.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import fp4graph
from benchmarks import options, tables
from benchmarks.models import TOTAL_STEPS, UNQUANTIZED
from benchmarks.results import RESULTS, Results, attempt, figures_of
from benchmarks.timing import Patience, compare

COLUMNS = (
    tables.case("shape"),
    tables.case("dtype"),
    tables.case("experts"),
    *tables.RATIO,
    tables.milliseconds("seconds", "ms"),
)
TITLE = "Experts, forward and backward"


class Experts(nn.Module):
    def __init__(self, count: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, n, k, dtype=dtype, device=device) / k**0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.mT, offs=ends)


class Case:
    """One shape and dtype: the data, and the contenders built from the experts."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, backend: str
    ) -> None:
        count, tokens, k, n = shape
        torch.manual_seed(0)
        self.experts, self.backend = Experts(count, k, n, dtype, device), backend
        self.x = torch.randn(count * tokens, k, dtype=dtype, device=device, requires_grad=True)
        self.dy = torch.randn(count * tokens, n, dtype=dtype, device=device)
        self.ends = torch.arange(1, count + 1, dtype=torch.int32, device=device) * tokens

    def run(self, module: nn.Module) -> Callable[[], object]:
        """Return a function that runs forward and backward of ``module``, without earlier gradients."""

        def call() -> None:
            module.zero_grad(set_to_none=True)
            self.x.grad = None
            module(self.x, self.ends).backward(self.dy)

        return call

    def unquantized(self) -> Callable[[], object]:
        """Return the unquantized experts. Inductor compiles no grouped product in fp32, so torch's own runs there."""
        module = copy.deepcopy(self.experts)
        if self.x.dtype is torch.bfloat16:
            module.compile(backend=self.backend, dynamic=False)
        return self.run(module)

    def under(self, name: str) -> Callable[[], object]:
        """Return the experts under the first rule of a policy that quantizes."""
        policy = fp4graph.load_policy(name)
        rule = next(rule for rule in policy.rules if rule.quantizes)
        match = type(rule.match)(op=("grouped",))  # wherever the experts stand
        policy = dataclasses.replace(policy, rules=(dataclasses.replace(rule, match=match),))
        module = copy.deepcopy(self.experts)
        fp4graph.apply(module, policy, backend=self.backend, dynamic=False, total_forwards=TOTAL_STEPS)
        fp4graph.prepare_optimizer(module, torch.optim.AdamW(module.parameters()))
        return self.run(module)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    context: typer.Context,
    experts: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each expert.")] = 64,
    features: Annotated[int, typer.Option(min=1, help="K and N.")] = 512,
    dtypes: options.Dtypes = "float32,bfloat16",
    policies: options.Policies = "microscaling,tetrajet,nvfp4,nvfp4-te,mxfp4-best",
    device: options.Device = "cpu",
    backend: options.Backend = "inductor",
    seconds: options.Seconds = 30,
    repeats: options.Repeats = 11,
    folder: options.Folder = RESULTS,
) -> None:
    names, patience, torch_device = options.policies_of(policies), Patience(seconds, repeats), options.device_of(device)
    results = Results("experts", context, torch_device, folder)
    for dtype in options.choices(dtypes, options.DTYPES):
        torch._dynamo.reset()
        case = Case((experts, tokens, features, features), options.DTYPES[dtype], torch_device, backend)
        baseline = case.unquantized()
        for policy in names:

            def figures(policy: str = policy, case: Case = case, baseline: Callable[[], object] = baseline) -> Any:
                return figures_of(compare(baseline, case.under(policy), torch_device, patience))

            shape = f"{experts} × {tokens} × {features} × {features}"
            row_case = {"shape": shape, "dtype": dtype, "experts": policy, "to": UNQUANTIZED, "backend": backend}
            results.add(attempt(row_case, figures))
    results.close(TITLE, COLUMNS)


if __name__ == "__main__":
    app()
