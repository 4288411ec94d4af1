"""Bytes that a forward keeps for its backward, under policies beside the unquantized model.

What is counted are the tensors that autograd holds once the compiled forward has returned, each piece of memory once;
a compiled graph saves as one autograd function what its forward hands to its backward.

``linears``: every linear that the policy quantizes, each kind compiled alone at the model's shapes, with bf16 weight
and input: all that is kept is kept because of the linear, which unquantized keeps its input and its weight. ``model``:
the whole model, compiled, under autocast to bf16. Parameters are counted too; a weight kept as it is costs nothing,
since it exists anyway, and ``without parameters`` leaves them out. Deterministic: nothing is repeated.
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
    """(bytes that the graph of ``forward()`` holds, those of them that are not memory of ``owned``).

    Call the compiled function once before, with a backward, so that nothing is compiled in here.
    """
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # alive until all is counted, so that no memory is used twice
    own = {tensor.untyped_storage().data_ptr() for tensor in owned}
    both = sum(held.values()), sum(size for place, size in held.items() if place not in own)
    del result
    return both


def of_linear(m: int, k: int, n: int, policy: str, device: torch.device, backend: str) -> tuple[int, int]:
    """What one linear of ``[M, K]`` to ``[M, N]`` keeps, in bf16 and without a bias."""
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
    """Figures of all linears of ``model`` that ``policy`` quantizes."""
    explanation = explained(model, policy, size)
    if explanation.problem:
        raise Inapplicable(explanation.problem.partition(";")[0])
    kinds = Counter(floor.extents(site)[:3] for site in explanation.sites if site.quantized and site.op == "linear")
    totals = dict.fromkeys((UNQUANTIZED, policy), (0, 0))
    for (m, k, n), count in kinds.items():
        for name, (whole, besides) in totals.items():
            own = of_linear(m, k, n, name, device, backend)
            totals[name] = whole + count * own[0], besides + count * own[1]
    return _figures(totals[policy], totals[UNQUANTIZED])


def of_model(model: Model, size: int, policy: str, device: torch.device, backend: str) -> dict[str, Any]:
    """Figures of the whole model."""
    counts = []
    for name in (policy, UNQUANTIZED):
        torch._dynamo.reset()
        training = Training(model, name, size, torch.bfloat16, device, backend)
        training.compile()
        training.step()
        counts.append(saved(training.forward, training.model.parameters()))
    return _figures(*counts)


def _figures(own: tuple[int, int], baseline: tuple[int, int]) -> dict[str, Any]:
    return {
        "ratio": own[0] / baseline[0],
        "bytes": own[0],
        "baseline_bytes": baseline[0],
        "activation_ratio": own[1] / baseline[1],
        "activation_bytes": own[1],
        "activation_baseline_bytes": baseline[1],
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:.4g}"


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    context: typer.Context,
    models: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "deit-tiny",
    policies: options.Policies = "tetrajet",
    batch: Annotated[int | None, typer.Option(min=1, help="Images or sequences. [16 images, 8 sequences]")] = None,
    device: options.Device = "cpu",
    backend: options.Backend = "inductor",
    whole: Annotated[bool, typer.Option(help="Whole models too, each compiled twice.")] = True,
    folder: options.Folder = RESULTS,
) -> None:
    names, on = options.policies_of(policies), options.device_of(device)
    results = Results("memory", context, on, folder)
    for name in options.choices(models, MODELS):
        model = MODELS[name]
        size = batch or model.size
        for policy in names:
            for of, count in (("linears", of_linears), ("model", of_model))[: 1 + whole]:
                about = {"model": name, "batch": size, "policy": policy, "of": of, "backend": backend}
                results.add(attempt(about, partial(count, model, size, policy, on, backend)))
    results.close(TITLE, COLUMNS)


if __name__ == "__main__":
    app()
