"""Measures the figures of docs/performance.md that have a target, and prints them beside the targets.

Runs a few commands of the other benchmarks, each in a separate process; with ``--everything``, all of them at length.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import command, tables
from benchmarks.models import UNQUANTIZED
from benchmarks.peers import peer_name
from benchmarks.processes import ROOT
from benchmarks.results import RESULTS, file_of, load, machine


@dataclass(frozen=True)
class Target:
    """An upper ``limit`` of the ratio in the row of a benchmark whose case has the entries of ``case``."""

    what: str
    benchmark: str
    case: Mapping[str, Any]
    limit: float
    on: str = "cpu"

    def row(self, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the row that the target limits, or None."""
        wanted = {**self.case, "backend": "inductor"}
        return next((row for row in rows if wanted.items() <= row["case"].items()), None)


_CUBE = {"shape": "1024", "linear": "tetrajet"}
_TINY = {"model": "deit-tiny", "batch": 16, "policy": "tetrajet"}
_TORCHAO = peer_name("torchao", compiled=True)
TARGETS = (
    Target("tetrajet linear 1024³, fp32", "linear", {**_CUBE, "dtype": "float32", "to": UNQUANTIZED}, 1.35),
    Target("the same in bf16", "linear", {**_CUBE, "dtype": "bfloat16", "to": UNQUANTIZED}, 2.2),
    Target("fp32, to torchao's MX QAT, compiled", "linear", {**_CUBE, "dtype": "float32", "to": _TORCHAO}, 1.0),
    Target("bf16, to torchao's MX QAT, compiled", "linear", {**_CUBE, "dtype": "bfloat16", "to": _TORCHAO}, 1.0),
    Target("DeiT-Tiny 224, batch 16, tetrajet, step, fp32", "step", {**_TINY, "dtype": "float32"}, 1.45),
    Target("the same, bf16 autocast", "step", {**_TINY, "dtype": "bfloat16"}, 1.45),
    Target("time to first step, DeiT-Tiny, cold", "first_step", {**_TINY, "dtype": "float32", "cache": "cold"}, 2.0),
    Target("the same, warm cache", "first_step", {**_TINY, "dtype": "float32", "cache": "warm"}, 1.5),
    Target("bytes kept for the backward by the linears", "memory", {**_TINY, "of": "linears"}, 0.29),
    Target(
        "DeiT-Base 224, batch 256, bf16 autocast, tetrajet, step", "step",
        {"model": "deit-base", "batch": 256, "dtype": "bfloat16", "policy": "tetrajet"}, 1.3, on="cuda",
    ),
)  # fmt: skip
#: The commands that measure the targets, by the type of device.
COMMANDS = {
    device: (
        ("linear", "--shapes=1024", "--policies=tetrajet", "--peers=torchao"),
        ("step", "--policies=tetrajet", *step),
        ("first_step",),
        ("memory",),
    )
    for device, step in {
        "cpu": ("--models=deit-tiny", "--seconds=90"),
        "cuda": ("--models=deit-base", "--batch=256", "--dtypes=bfloat16"),
    }.items()
}
EVERYTHING = (
    ("linear", "--shapes=1024,deit-tiny fc1,deit-tiny fc2,deit-small fc1,llama-60m up,llama-60m down"),
    ("linear", "--shapes=1024", "--policies=all", "--peers=", "--against="),
    ("memory", "--models=deit-tiny,llama-60m", "--policies=tetrajet,microscaling,nvfp4-best"),
    ("quantizers",),
    ("step",),
)
COLUMNS = (
    tables.Column("what", lambda row: row["what"], of_case=True),
    tables.Column("target", lambda row: f"≤ {row['limit']:g}" if row["limit"] != 1.0 else "faster: < 1"),
    tables.Column("measured", lambda row: row["measured"]),
    tables.Column("quartiles", lambda row: row["quartiles"]),
    tables.Column("", lambda row: row["verdict"]),
)
TITLE = "Targets"


def held_against(results: Mapping[str, list[dict[str, Any]]], device_type: str) -> Iterator[dict[str, Any]]:
    """Yield the targets for a type of device with the figures of ``results`` (rows, by benchmark), as :data:`COLUMNS`
    show them."""
    for target in TARGETS:
        if target.on not in ("cpu", device_type):
            continue
        row = target.row(results.get(target.benchmark, []))
        figures = {} if row is None else row["figures"]
        result = {"measured": "–", "quartiles": "", "verdict": "not measured"}
        if "ratio" in figures:
            met = figures["ratio"] < 1.0 if target.limit == 1.0 else figures["ratio"] <= target.limit
            result = {
                "measured": f"{figures['ratio']:.3g}",
                "quartiles": "{:.2f}–{:.2f}".format(*figures["quartiles"]) if "quartiles" in figures else "",
                "verdict": "met" if met else "missed",
            }
        yield {"what": target.what, "limit": target.limit, **result, "figures": {}}


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    device: command.Device = "cpu",
    everything: Annotated[bool, typer.Option("--everything", help="All benchmarks at length: many hours.")] = False,
    folder: command.Folder = RESULTS,
) -> None:
    torch_device, folder = command.device_of(device), folder.absolute()  # the commands run in the root of the clone
    failed, begin = False, time.perf_counter()
    for name, *arguments in (*COMMANDS[torch_device.type], *(EVERYTHING if everything else ())):
        words = [sys.executable, "-m", f"benchmarks.{name}", *arguments, f"--device={device}", f"--folder={folder}"]
        print(f"\n{' '.join(words[1:])}", flush=True)
        failed |= subprocess.run(words, cwd=ROOT, check=False).returncode != 0
        print(f"{(time.perf_counter() - begin) / 60:.1f} minutes so far", flush=True)
    rows = rows_of(folder, machine(torch_device))
    tables.show(TITLE, COLUMNS, list(held_against(rows, torch_device.type)))
    raise typer.Exit(1 if failed else 0)


def rows_of(folder: Path, machine: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of a machine, by benchmark."""
    files = {target.benchmark: file_of(target.benchmark, machine, folder) for target in TARGETS}
    return {benchmark: load(file)["rows"] for benchmark, file in files.items() if file.exists()}


if __name__ == "__main__":
    app()
