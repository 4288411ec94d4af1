"""``fp4graph search``: find the policy with the least loss increase within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4graph.commands.models import imported
from fp4graph.commands.output import AsJson, print_json, say, wide_console
from fp4graph.errors import Error


def search(
    model: Annotated[str, typer.Option(help="pkg.module:factory, which returns the model.")],
    loss: Annotated[str, typer.Option(help="pkg.module:function, called with (model, batch).")],
    batches: Annotated[str, typer.Option(help="pkg.module:function, which returns the batches.")],
    formats: Annotated[
        str, typer.Option(help="Uniform policies, by name or file, separated by commas.")
    ] = "nvfp4,mxfp4,mxfp8,fp8-block,bf16",
    bits: Annotated[float | None, typer.Option(help="The most bits per weight.")] = None,
    fp4_flops: Annotated[float | None, typer.Option(help="The least share of FLOPs in FP4.")] = None,
    complexity: Annotated[float | None, typer.Option(help="The largest Ω.")] = None,
    overhead: Annotated[float | None, typer.Option(help="The largest measured ratio of step times.")] = None,
    by: Annotated[str, typer.Option(help="What gets its own format: site,gemm (each GEMM) or site.")] = "site,gemm",
    backend: Annotated[str, typer.Option(help="The backend under which --overhead is measured.")] = "inductor",
    folder: Annotated[Path | None, typer.Option(help="Folder of scores, to resume a stopped search.")] = None,
    output: Annotated[Path, typer.Option(help="The policy file to write; none may be there.")] = Path("searched.yaml"),
    as_json: AsJson = False,
) -> None:
    """Write the policy that increases a model's loss least within a budget.

    fp4graph search --model mypkg.train:model --loss mypkg.train:loss --batches mypkg.train:batches --bits 5
    """
    from fp4graph.lab.search import search as searching

    if output.exists():  # before hours of measurements
        raise Error(f"{output} already exists; give another --output, or remove it")
    names, kinds = ([name.strip() for name in text.split(",")] for text in (formats, by))
    result = searching(
        imported(model)(), imported(loss), imported(batches)(), formats=names, bits=bits, fp4_flops=fp4_flops,
        complexity=complexity, overhead=overhead, by=kinds, backend=backend, folder=folder, name=output.stem,
    )  # fmt: skip
    result.save(output)
    if as_json:
        budgets = {name: {"bound": bound, "reached": reached} for name, bound, reached in result.budgets}
        choices = [each._asdict() for each in result.choices]
        numbers = {"predicted": result.predicted, "measured": result.measured}
        print_json({"policy": str(output), "budgets": budgets, **numbers, "choices": choices})
        return
    wide_console().print(result.table())
    say(f"policy: {output}")
