"""One training step of many image models under `tetrajet` and `tetrajet-qema`: which work, which are refused, and why.

    python -m benchmarks.zoo                      # measures missing models, and writes docs/models.md
    python -m benchmarks.zoo --models swin_t,vgg  # measures these again; takes libraries and parts of names too

The models are those of benchmarks/families.py, untrained, small, on a batch of two random images. The backend is
``eager``: Dynamo captures, nothing is compiled. Each model runs in a separate process with a time limit. The results
are in benchmarks/results/zoo.jsonl, a line for each model. The command fails if a model neither works nor is refused.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import torch._dynamo  # imported once, before processes start
import torchvision
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

import fp4graph
from benchmarks import command
from benchmarks.families import TIMM, TORCHVISION
from benchmarks.processes import ROOT
from benchmarks.results import RESULTS, write_text
from fp4graph.model.runtime import require_runtime

POLICIES = ("tetrajet", "tetrajet-qema")
BATCH, CLASSES = 2, 10
VERSIONS = {library.__name__: library.__version__.partition("+")[0] for library in (torch, timm, torchvision)}
#: Of the rows that were stored before rows had versions.
UNRECORDED = {"torch": "2.15.0", "timm": "1.0.31", "torchvision": "0.29.2"}
HEAD = """# Image models

One architecture of each family of timm {timm}, and every classification model of torchvision {torchvision}, trained for
one step under `tetrajet` and `tetrajet-qema`. `python -m benchmarks.zoo` wrote this page (torch {torch}, backend
`eager`). The models are untrained and small: images of 28 to 299 pixels, a batch of two, and mostly fewer blocks than
usual (`benchmarks/families.py`).

- **sites**: the quantized products, of all matrix work of the graph, convolutions included.
- **works**: the loss is finite and differs from the plain model's, and the step changes every quantized weight of 32
  elements or more that it changes in the plain model.
- **refused**: the model's first call raises an `fp4graph.Error`, whose first sentence is the remark. Both policies are
  written for repeated blocks with linear layers. A model of convolutions has none: leave it unquantized, or write a
  policy that names its layers.
"""


def cases() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Return library, name and options of every model, by the name in the table."""
    modules = sorted(timm.models.list_modules())
    families = [name for module in modules for name in timm.list_models(module=module) if name in TIMM]
    others = torchvision.models.list_models(module=torchvision.models)
    timm_cases = {f"timm/{name}": ("timm", name, TIMM[name]) for name in families}
    return timm_cases | {f"torchvision/{name}": ("torchvision", name, TORCHVISION.get(name, {})) for name in others}


def build(library: str, name: str, settings: dict[str, Any]) -> tuple[nn.Module, str, Tensor]:
    """Return the model, the name of its family and a batch of images."""
    torch.manual_seed(0)
    arguments = {key: value for key, value in settings.items() if key not in ("size", "shorten")}
    if library == "timm":
        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **arguments)
    else:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # googlenet, on its initialization
            model = torchvision.models.get_model(name, num_classes=CLASSES, **arguments)
    if settings.get("shorten", True):
        for stack in [module for module in model.modules() if isinstance(module, nn.Sequential)]:
            signatures = [(type(block), [p.shape for p in block.parameters()]) for block in stack]
            for index in range(len(stack) - 1, 1, -1):
                if signatures[index][1] and signatures[index] == signatures[index - 1] == signatures[index - 2]:
                    del stack[index]
    for parameter in model.parameters():
        if parameter.abs().max() < 0.01:  # a branch that begins at zero would neither count nor train
            nn.init.normal_(parameter, std=0.1)
    size = settings.get("size", 64)
    return model.train(), type(model).__module__.rpartition(".")[2], torch.randn(BATCH, 3, size, size)


def step(model: nn.Module, images: Tensor, weights: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> Any:
    """Train one step; return the loss and the names of ``weights`` that it did not change."""
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    torch.manual_seed(1)
    outputs = [output for output in pytree.tree_leaves(model(images)) if output.is_floating_point()]
    loss = sum((cross_entropy(output.flatten(1), torch.arange(BATCH)) for output in outputs), torch.zeros(()))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    # In a weight of a few elements the stochastic gradients of one step may cancel.
    compared = {name: weight for name, weight in weights.items() if weight.numel() >= 32}
    return loss.item(), {name for name, weight in compared.items() if torch.equal(weight, before[name])}


def under(policy: str, case: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """Train one step under ``policy``, and the same step without; return the outcome."""
    model, family, images = build(*case)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result: dict[str, Any] = {"family": family}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fp4graph.apply(model, policy, backend="eager")
            optimizer = fp4graph.prepare_optimizer(model, optimizer)
            runtime = require_runtime(model, "zoo")
            names = [f"{weight.fqn}.{weight.parameter_name}".lstrip(".") for weight in runtime.weights]
            loss, unmoved = step(model, images, {name: model.get_parameter(name) for name in names}, optimizer)
    except Exception as error:  # noqa: BLE001
        outcome = "refused" if isinstance(error, fp4graph.Error) else "fails"
        return result | {"outcome": outcome, "remark": sentence(error)}
    result |= {"graphs": runtime.capture.graphs, "loss": loss}
    result |= {"sites": sum(site.quantized for site in runtime.sites), "of": len(runtime.sites)}
    del model, optimizer, runtime
    gc.collect()
    plain, _, _ = build(*case)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected, untrained = step(plain, images, {name: plain.get_parameter(name) for name in names}, reference)
    oddities = [f"{w.category.__name__}: {w.message}" for w in caught if w.category is fp4graph.PolicyWarning]
    oddities += [f"{', '.join(sorted(unmoved - untrained))} did not move"] if unmoved - untrained else []
    oddities += ["the loss is not finite"] if not torch.tensor(loss).isfinite() else []
    oddities += ["the loss is that of the plain model"] if loss == expected else []
    remark = "; ".join(oddities) or (f"{result['graphs']} graphs" if result["graphs"] > 1 else "")
    return result | {"outcome": "odd" if oddities else "works", "remark": remark}


def sentence(error: Exception) -> str:
    """Return the first sentence of an error's text; for an error that is not ours, its class comes first."""
    text = " ".join(str(getattr(error, "message", error)).split())
    site = f"{error.site}: " if isinstance(error, fp4graph.CaptureError) and error.site else ""
    kind = "" if isinstance(error, fp4graph.Error) else f"{type(error).__name__}: "
    return f"{kind}{site}{re.split(r'(?<=[.!?]) (?=[A-Z])', text)[0]}"


def measure(case: tuple[str, str, dict[str, Any]], limit: float) -> dict[str, Any]:
    """Return the outcomes of a model under both policies, from a separate process."""
    context = multiprocessing.get_context("fork")  # imports once
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        sender.send({policy: under(policy, case) for policy in POLICIES})
        os._exit(0)  # at a normal exit imported libraries complain about the fork

    child = context.Process(target=work)
    child.start()
    sender.close()
    try:
        if receiver.poll(limit):
            result: dict[str, Any] = receiver.recv()
            return result
        reason = f"not done after {limit:.0f} seconds"
    except EOFError:
        reason = "the process died"
    finally:
        child.kill()
        child.join()
    return {policy: {"family": "?", "outcome": "fails", "remark": reason} for policy in POLICIES}


def page(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    known = {name: {row.get("versions", UNRECORDED)[name] for row in rows.values()} for name in VERSIONS}
    yield HEAD.format(**{name: " and ".join(sorted(found)) for name, found in known.items()})
    for library in ("timm", "torchvision"):
        library_rows = {name.partition("/")[2]: row for name, row in rows.items() if name.startswith(f"{library}/")}
        counts = [f"{sum(row[p]['outcome'] == 'works' for row in library_rows.values())} under `{p}`" for p in POLICIES]
        yield f"## {library}\n\nOf {len(library_rows)} models, {' and '.join(counts)} work.\n"
        yield "| model | family | sites | tetrajet | tetrajet-qema | remark |\n| --- | --- | --- | --- | --- | --- |"
        for name, row in library_rows.items():
            first = row[POLICIES[0]]
            sites = f"{first['sites']} of {first['of']}" if "sites" in first else "–"
            outcomes = [row[policy]["outcome"] for policy in POLICIES]
            texts = (row[policy]["remark"].replace(f"policy {policy!r}", "the policy") for policy in POLICIES)
            remarks = "; ".join(dict.fromkeys(filter(None, texts)))
            cells = (name, first["family"], sites, *outcomes, remarks.replace("|", "\\|").replace("*", "\\*"))
            yield f"| {' | '.join(cells)} |"
        yield ""


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    models: Annotated[str, typer.Option(help="Parts of names; these are measured again. [missing models]")] = "",
    limit: Annotated[float, typer.Option(min=1, help="Seconds for one model under both policies.")] = 300,
    folder: command.Folder = RESULTS,
    document: Annotated[Path, typer.Option(help="The page to write.")] = ROOT / "docs" / "models.md",
) -> None:
    file, all_cases, wanted = folder / "zoo.jsonl", cases(), command.split(models)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows: dict[str, dict[str, Any]] = {row.pop("model"): row for row in map(json.loads, lines)}
    if unknown := [part for part in wanted if not any(part in name for name in all_cases)]:
        raise typer.BadParameter(f"{', '.join(unknown)}: no model has this in its name")
    chosen = [name for name in all_cases if (any(part in name for part in wanted) if wanted else name not in rows)]
    for name in chosen:
        rows[name] = measure(all_cases[name], limit) | {"versions": VERSIONS}
        outcomes = [f"{policy}: {rows[name][policy]['outcome']} {rows[name][policy]['remark']}" for policy in POLICIES]
        print("\n  ".join((name, *outcomes)), flush=True)
        rows = {key: rows[key] for key in (*all_cases, *rows) if key in rows}
        write_text(file, "".join(f"{json.dumps({'model': key, **row})}\n" for key, row in rows.items()))
        write_text(document, "\n".join(page(rows)).rstrip() + "\n")
    ended = {rows[name][policy]["outcome"] for name in chosen for policy in POLICIES}
    raise typer.Exit(0 if ended <= {"works", "refused"} else 1)


if __name__ == "__main__":
    app()
