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

import fp4graph
from benchmarks import floor, options, tables
from benchmarks.models import MODELS, TOTAL_STEPS, UNQUANTIZED, Model, Training, explained
from benchmarks.results import RESULTS, Inapplicable, Results, attempt

COLUMNS = (
    tables.case("model"),
    tables.case("batch"),
    tables.case("policy"),
    tables.case("of"),
    tables.Column("ratio", lambda row: f"{row['figures']['ratio']:.3f}"),
    tables.Column("MiB", lambda row: _mib(row["figures"]["bytes"])),
    tables.Column("unquantized", lambda row: _mib(row["figures"]["baseline_bytes"])),
    tables.Column("without parameters", lambda row: f"{row['figures']['activation_ratio']:.3f}"),
    tables.Column("MiB of these", lambda row: _mib(row["figures"]["activation_bytes"])),
    tables.Column("unquantized, of these", lambda row: _mib(row["figures"]["activation_baseline_bytes"])),
)
TITLE = "Bytes kept for the backward, to those of the unquantized model"


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
    if policy == UNQUANTIZED:
        linear.compile(backend=backend, dynamic=False)
    else:
        fp4graph.apply(linear, policy, backend=backend, dynamic=False, total_forwards=TOTAL_STEPS)
        fp4graph.prepare_optimizer(linear, torch.optim.AdamW(linear.parameters()))
    linear(x).sum().backward()
    return saved(lambda: linear(x), linear.parameters())


def of_linears(model: Model, size: int, policy: str, device: torch.device, backend: str) -> dict[str, Any]:
    """Return the figures of all linears of ``model`` that ``policy`` quantizes."""
    explanation = explained(model, policy, size)
    if explanation.problem:
        raise Inapplicable(explanation.problem.partition(";")[0])
    kinds = Counter(floor.extents(site)[:3] for site in explanation.sites if site.quantized and site.op == "linear")
    totals = dict.fromkeys((UNQUANTIZED, policy), (0, 0))
    for (m, k, n), count in kinds.items():
        for name, (total, activations) in totals.items():
            nbytes = of_linear(m, k, n, name, device, backend)
            totals[name] = total + count * nbytes[0], activations + count * nbytes[1]
    return _figures(totals[policy], totals[UNQUANTIZED])


def of_model(model: Model, size: int, policy: str, device: torch.device, backend: str) -> dict[str, Any]:
    counts = []
    for name in (policy, UNQUANTIZED):
        torch._dynamo.reset()
        training = Training(model, name, size, torch.bfloat16, device, backend)
        training.compile()
        training.step()
        counts.append(saved(training.forward, training.model.parameters()))
    return _figures(*counts)


def _figures(policy_bytes: tuple[int, int], baseline: tuple[int, int]) -> dict[str, Any]:
    return {
        "ratio": policy_bytes[0] / baseline[0],
        "bytes": policy_bytes[0],
        "baseline_bytes": baseline[0],
        "activation_ratio": policy_bytes[1] / baseline[1],
        "activation_bytes": policy_bytes[1],
        "activation_baseline_bytes": baseline[1],
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:.4g}"


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    context: typer.Context,
    models: Annotated[str, typer.Option(help=f"Any of {', '.join(MODELS)}.")] = "deit-tiny",
    policies: options.Policies = "tetrajet",
    batch: Annotated[int | None, typer.Option(min=1, help="Images or sequences. [16 images, 8 sequences]")] = None,
    device: options.Device = "cpu",
    backend: options.Backend = "inductor",
    whole: Annotated[bool, typer.Option(help="Whole models too, each compiled twice.")] = True,
    folder: options.Folder = RESULTS,
) -> None:
    names, torch_device = options.policies_of(policies), options.device_of(device)
    results = Results("memory", context, torch_device, folder)
    for name in options.choices(models, MODELS):
        model = MODELS[name]
        size = batch or model.size
        for policy in names:
            for part, count in (("linears", of_linears), ("model", of_model))[: 1 + whole]:
                row_case = {"model": name, "batch": size, "policy": policy, "of": part, "backend": backend}
                results.add(attempt(row_case, partial(count, model, size, policy, torch_device, backend)))
    results.close(TITLE, COLUMNS)


if __name__ == "__main__":
    app()
