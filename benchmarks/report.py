"""Write the tables of docs/figures.md from benchmarks/results, so that no figure is copied by hand.

python -m benchmarks.report            # writes between the marks of the document
python -m benchmarks.report --check    # only checks that the document is up to date
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import experts, first_step, linear, memory, quantizers, step, tables, targets
from benchmarks.gpu import plan
from benchmarks.models import UNQUANTIZED
from benchmarks.processes import ROOT
from benchmarks.results import RESULTS, load, plans, write_text

DOCUMENT = ROOT / "docs" / "figures.md"
BEGIN = "<!-- From here to the next mark written by `python -m benchmarks.report`. -->"
END = "<!-- End of what `python -m benchmarks.report` wrote. -->"
PLAN_BEGIN = "<!-- From here to the next mark written by `python -m benchmarks.report` from `make gpu-plan`. -->"
PLAN_END = "<!-- End of what was written from `make gpu-plan`. -->"
BENCHMARKS = {
    module.benchmark.name: module.benchmark for module in (linear, experts, quantizers, step, first_step, memory)
}


def generated(folder: Path) -> str:
    """Return the tables of every machine that has results in ``folder``."""
    machines: dict[str, dict[str, Any]] = defaultdict(dict)
    for file in sorted(folder.glob("*.json")):
        benchmark, _, name = file.stem.partition(".")
        if benchmark in BENCHMARKS:
            machines[name][benchmark] = load(file)
    sections = [section(contents) for _, contents in sorted(machines.items())]
    return "\n\n".join(sections) or "Nothing has been measured yet."


def predicted(folder: Path) -> str:
    """Return the table of predictions for GPUs, from whatever machine made them."""
    contents = plans(folder)
    rows = [row for content in contents for row in content["rows"]]
    if not rows:
        return "Nothing has been predicted yet."
    return "\n\n".join(
        [tables.markdown(plan.benchmark.columns, rows), *(measured(c["runs"], c["rows"]) for c in contents)]
    )


def section(contents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the section of one machine: its description, the targets, a table for each benchmark.

    Args:
        contents: the machine's files of results, by benchmark.
    """
    machine = next(iter(contents.values()))["machine"]
    device_type = "cuda" if machine["gpu"] else "cpu"
    rows = {benchmark: list(content["rows"]) for benchmark, content in contents.items()}
    parts = [f"### {machine['gpu'] or machine['cpu']}, {threads(machine)}", described(machine)]
    verdicts = list(targets.held_against(rows, device_type))
    if any(target["verdict"] != "not measured" for target in verdicts):
        parts += ["#### Targets", tables.markdown(targets.COLUMNS, verdicts)]
    for name, benchmark in BENCHMARKS.items():
        compiled = [row for row in rows.get(name, []) if row["case"].get("backend", "inductor") == "inductor"]
        if compiled:
            runs = contents[name]["runs"]
            parts += [f"#### {benchmark.title}", tables.markdown(benchmark.columns, compiled)]
            parts += [rates(compiled)] if name == "linear" else []
            parts += [measured(runs, compiled)]
    return "\n\n".join(parts)


def described(machine: Mapping[str, Any]) -> str:
    gpu = f"{machine['gpu']} with {machine['gpu_ram_gib']} GiB; " if machine["gpu"] else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores, {threads(machine)} used, "
        f"{', '.join(machine['instructions'])}; {machine['ram_gib']} GiB; {machine['system']}."
    )


def threads(machine: Mapping[str, Any]) -> str:
    return "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"


def rates(rows: Sequence[tables.Stored]) -> str:
    """Return the table of the machine's rates in the runs of the linears: operations and bytes per second."""
    plain = [row for row in rows if row["case"]["linear"].startswith(UNQUANTIZED) and "ratio" in row["figures"]]
    columns = (
        *tables.cases("shape", "dtype"),
        tables.figure("machine_gemm_rate", "GEMM 2048³, GFLOP/s", ".3g", 1e9),
        tables.figure("gemm_rate", "unquantized linear, GFLOP/s", ".3g", 1e9),
        tables.figure("bandwidth", "copy, GB/s", ".3g", 1e9),
    )
    return tables.markdown(columns, plain)


def measured(runs: Mapping[str, Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the date, commit and versions of the runs that measured ``rows``, a line each."""
    lines = []
    for number in sorted({row["run"] for row in rows}, key=int):
        run = runs[number]
        commit = "no commit" if run["commit"] is None else f"commit {run['commit'][:10]}"
        changes = " with uncommitted changes" if run["dirty"] else ""
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version is not None)
        kernels = "" if run["cpu_kernels"] else ", without CPU kernels"
        count = sum(row["run"] == number for row in rows)
        lines.append(
            f"{count} of {len(rows)} rows: {run['date'][:10]}, {commit}{changes}; {versions}; "
            f"{run['compiler']}{kernels}; load before {run['load_average']:.2f}."
        )
    return "\n".join(f"- {line}" for line in lines)


def updated(document: str, tables: str, first: str = BEGIN, last: str = END) -> str:
    """Return ``document`` with ``tables`` between two marks."""
    head, begin, remainder = document.partition(first)
    _, end, tail = remainder.partition(last)
    if not begin or not end:
        raise typer.BadParameter(f"{DOCUMENT.name} lacks the marks {first} and {last}: put them around the tables")
    return f"{head}{first}\n\n{tables}\n\n{last}{tail}"


def whole(document: str, folder: Path) -> str:
    """Return ``document`` with all tables of the results in ``folder``."""
    return updated(updated(document, generated(folder)), predicted(folder), PLAN_BEGIN, PLAN_END)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    check: Annotated[bool, typer.Option("--check", help="Fail if the document is not up to date.")] = False,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    document: Annotated[Path, typer.Option(help="Document with the tables.")] = DOCUMENT,
) -> None:
    current = document.read_text(encoding="utf-8")
    text = whole(current, folder)
    if check:
        print("up to date" if text == current else f"out of date: run python -m benchmarks.report for {document.name}")
        raise typer.Exit(int(text != current))
    write_text(document, text)


if __name__ == "__main__":
    app()
