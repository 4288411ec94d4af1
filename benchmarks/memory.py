"""Bytes that a forward keeps for its backward, under policies beside the unquantized model.

docs/performance.md, "Bytes for the backward", defines the figures: the tensors that autograd holds when the compiled
forward has returned, each storage once. They are deterministic, so nothing is repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks import command, tables
from benchmarks.command import Cases, Settings
from benchmarks.models import MODELS, UNQUANTIZED, Training, explained, of_inner_blocks, under
from benchmarks.processes import Inapplicable

MIB = 2**20
COLUMNS = (
    *tables.cases("model", "batch", "policy", "of"),
    tables.figure("ratio", "ratio", ".3f"),
    tables.figure("bytes", "MiB", ".4g", MIB),
    tables.figure("baseline_bytes", "unquantized", ".4g", MIB),
    tables.figure("activation_ratio", "without parameters", ".3f"),
    tables.figure("activation_bytes", "MiB of these", ".4g", MIB),
    tables.figure("activation_baseline_bytes", "unquantized, of these", ".4g", MIB),
)


def saved(forward: Callable[[], Tensor], owned: Iterable[Tensor]) -> tuple[int, int]:
    """Return the bytes that the graph of ``forward()`` holds, and those of them that are not memory of ``owned``.

    Call the compiled function with a backward once before, so that this function compiles nothing.
    """
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # alive until everything is counted, so that no address is used twice
    owned_storages = {tensor.untyped_storage().data_ptr() for tensor in owned}
    counts = sum(held.values()), sum(size for place, size in held.items() if place not in owned_storages)
    del result
    return counts


def of_linear(m: int, k: int, n: int, policy: str, device: torch.device, backend: str) -> tuple[int, int]:
    """Return the bytes that one linear of ``[M, K]`` to ``[M, N]`` keeps, in bf16 and without a bias."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    under(linear, of_inner_blocks(policy), backend, dynamic=False)
    linear(x).sum().backward()
    return saved(lambda: linear(x), linear.parameters())


def of_linears(model: str, size: int, policy: str, device: torch.device, backend: str) -> dict[str, Any]:
    """Return the figures of all linears of ``model`` that ``policy`` quantizes."""
    sites = explained(MODELS[model], policy, size).sites
    kinds = Counter(site.sizes for site in sites if site.quantized and site.op == "linear" and site.sizes)
    if not kinds:
        raise Inapplicable("the policy quantizes no linear")
    totals = dict.fromkeys((UNQUANTIZED, policy), (0, 0))
    for (m, k, n), count in kinds.items():
        for name, (total, activations) in totals.items():
            nbytes = of_linear(m, k, n, name, device, backend)
            totals[name] = total + count * nbytes[0], activations + count * nbytes[1]
    return _figures(totals[policy], totals[UNQUANTIZED])


def of_model(model: str, size: int, policy: str, device: torch.device, backend: str) -> dict[str, Any]:
    counts = []
    explained(MODELS[model], policy, size)
    for name in (policy, UNQUANTIZED):
        torch._dynamo.reset()
        training = Training(MODELS[model], name, size, torch.bfloat16, device, backend)
        training.compile()
        training.step()
        counts.append(saved(training.forward, training.model.parameters()))
    return _figures(*counts)


def _figures(policy_bytes: tuple[int, int], baseline: tuple[int, int]) -> dict[str, Any]:
    return {
        f"{prefix}{name}": value
        for prefix, own, plain in zip(("", "activation_"), policy_bytes, baseline, strict=True)
        for name, value in (("ratio", own / plain), ("bytes", own), ("baseline_bytes", plain))
    }


def cases(
    settings: Settings,
    models: command.Models = "deit-tiny",
    policies: command.Policies = "tetrajet",
    batch: command.Batch = None,
    whole: Annotated[bool, typer.Option(help="Whole models too, each compiled twice.")] = True,
) -> Cases:
    for model, size, _ in command.trainings(models, "bfloat16", batch):
        for policy in command.policies_of(policies):
            for part, count in (("linears", of_linears), ("model", of_model))[: 1 + whole]:
                case = {"model": model, "batch": size, "policy": policy, "of": part, "backend": settings.backend}
                yield case, partial(count, model, size, policy, settings.device, settings.backend)


benchmark = command.Benchmark(
    "memory",
    "Bytes kept for the backward, to those of the unquantized model",
    COLUMNS,
    cases,
    without=("seconds", "repeats"),
)
app = benchmark.app

if __name__ == "__main__":
    app()
