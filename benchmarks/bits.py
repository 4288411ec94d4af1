"""Compares the results of every shipped policy before and after a change of the code, to the bit.

    python -m benchmarks.bits record before.jsonl
    python -m benchmarks.bits compare before.jsonl after.jsonl

Both recordings must come from one machine, because the products of libraries differ between processors. A case is a
policy, a dtype, a backend, linears or experts, with kernels or without. It records two training steps of three blocks:
digests of the output, of the gradients of the input and of every parameter, and of the parameters at the end, and the
number of bytes kept for the backward.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import fp4graph
from benchmarks import command
from benchmarks.models import DTYPES
from fp4graph.kernels import operators
from tests.helpers.models import grouped_mm

app = typer.Typer(add_completion=False)
#: With 48 tokens and widths of 160 and 96, blocks of 32 and more do not divide every axis.
TOKENS, WIDTH, HIDDEN, EXPERTS = 48, 160, 96, 3
KINDS = ("linear", "experts")
BACKENDS = ("eager", "aot_eager", "inductor")


class Linears(nn.Module):
    """The gated feed-forward of LLaMA, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """The gated feed-forward of experts, for tokens sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = grouped_mm(x, self.gate_up, offs=ends).chunk(2, -1)
        return grouped_mm(nn.functional.silu(gate) * up, self.down, offs=ends)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Linears() if kind == "linear" else Experts()

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x), ends)
        return y


class Blocks(nn.Module):
    """Three blocks, because policies treat the first and the last differently."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, ends)
        return x


def digest(tensors: Any) -> str:
    """Return a digest of the tensors' dtypes, shapes and bits."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().contiguous()
        hasher.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        hasher.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


def measured(policy: str, dtype: torch.dtype, backend: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each quantity of two training steps."""
    torch.manual_seed(0)
    model = Blocks(kind).to(dtype)
    model = fp4graph.apply(model, policy, backend=backend, seed=1, total_forwards=8)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    ends = torch.tensor([7, 31, TOKENS], dtype=torch.int32)  # the third expert has 17 tokens
    for step in range(2):
        x = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
        dy = torch.randn(TOKENS, WIDTH).to(dtype)
        saved: list[Tensor] = []

        def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = model(x, ends)
        y.backward(dy)
        assert x.grad is not None
        yield f"y {step}", digest([y])
        yield f"dx {step}", digest([x.grad])
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                yield f"grad {name} {step}", digest([parameter.grad])
        yield f"bytes kept {step}", str(sum(t.numel() * t.element_size() for t in saved))
        optimizer.step()
        optimizer.zero_grad()
    yield "state", digest(model.state_dict().values())


def _case(policy: str, dtype: str, backend: str, kind: str, kernels: bool) -> dict[str, str]:
    torch._dynamo.reset()
    try:
        with nullcontext() if kernels else operators.tensor_code():
            return dict(measured(policy, DTYPES[dtype], backend, kind))
    except fp4graph.Error as error:  # such as a policy that refuses experts
        return {"error": f"{type(error).__name__}: {error}"}


@app.command()
def record(
    file: Path,
    policies: command.Policies = "all",
    backends: Annotated[str, typer.Option(help=f"Any of {', '.join(BACKENDS)}.")] = "eager,aot_eager",
    kinds: Annotated[str, typer.Option(help=f"Any of {', '.join(KINDS)}.")] = ",".join(KINDS),
    kernels: Annotated[str, typer.Option(help="on, off or both.")] = "on,off",
) -> None:
    """Add the digests of all cases to FILE, a line each; skip cases that FILE already has."""
    torch.set_num_threads(1)
    recorded = {line["case"] for line in _lines(file)} if file.exists() else set[str]()
    chosen = (
        command.policies_of(policies), DTYPES, command.choices(backends, BACKENDS),
        command.choices(kinds, KINDS), command.choices(kernels, ("on", "off")),
    )  # fmt: skip
    for policy, dtype, backend, kind, switch in itertools.product(*chosen):
        case = " ".join((policy, dtype, backend, kind, f"kernels {switch}"))
        if case not in recorded:
            digests = _case(policy, dtype, backend, kind, switch == "on")
            with file.open("a") as stream:
                stream.write(json.dumps({"case": case, **digests}) + "\n")


@app.command()
def compare(before: Path, after: Path) -> None:
    """Print every quantity that differs; exit with status 1 if one does, or if a case is missing."""
    expected_cases, actual_cases = ({line.pop("case"): line for line in _lines(file)} for file in (before, after))
    differing = 0
    for case in expected_cases | actual_cases:
        expected, actual = expected_cases.get(case, {}), actual_cases.get(case, {})
        if names := [name for name in expected | actual if expected.get(name) != actual.get(name)]:
            differing += 1
            print(f"{case}: {', '.join(names)}")
    print(f"{len(expected_cases | actual_cases)} cases, {differing} differ")
    sys.exit(bool(differing))


def _lines(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    app()
