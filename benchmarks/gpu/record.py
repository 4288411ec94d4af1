"""The JSON file of ``make gpu-validate``, and the Markdown page of its rows."""

from __future__ import annotations

import json
import math
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import results, tables
from benchmarks.gpu.run import Case
from benchmarks.gpu.steps import PREDICTED, SWITCHES
from benchmarks.processes import Figures
from benchmarks.results import GIB

Row = Mapping[str, Any]
LEGEND = (
    "*ratio*: time of a step relative to the unquantized model under the same mode, measured in alternation. *busy*: "
    "the same of the time in which the card computed, which is shorter where the host is slower. *predicted*: `make "
    "gpu-plan`'s estimate for one block of the model, without head and optimizer, on the card in brackets. *peak*: the "
    "most that steps allocate, parameters and optimizer included; not counted under CUDA graphs, whose memory is "
    "allocated at their capture. *compiling*: the first step with empty caches; under `--jobs`, while other cases "
    "compile too."
)
#: The largest allowed difference of losses of a short training, as a multiple of an ulp's effect.
WITHIN = 3


class Record:
    """The JSON file and the page of one device; a case measured again replaces its earlier row."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.machine = _machine(device)
        name = f"gpu_validate.{results.slug(self.machine['device'])}"
        self.file, self.page = folder / f"{name}.json", folder / f"{name}.md"
        self.rows: list[dict[str, Any]] = results.load(self.file)["rows"] if self.file.exists() else []
        self._commit = results.commit()["commit"]

    def failure(self, case: Case) -> str | None:
        """Return why the case is not done, or None if it succeeded at this commit with these versions."""
        row = self._row(case)
        if row is None:
            return "never tried"
        if row["commit"] != self._commit or row.get("versions") != self.machine["versions"]:
            return "done at another commit, or with other versions"
        return failure(row)

    def tried(self, case: Case) -> str:
        """Return when the case was last tried, as text that sorts by time; "" if never, which sorts first."""
        row = self._row(case)
        return "" if row is None else row.get("begun", row["date"])

    def longest(self, part: str) -> float:
        """Return the seconds of the longest case of ``part`` so far."""
        rows = (row for row in self.rows if row["case"]["part"] == part)
        return max((row["figures"].get("took_seconds", 0.0) for row in rows), default=0.0)

    def begin(self, case: Case) -> None:
        """Mark the case as begun. The mark stays if the process is killed, and earlier figures until the case ends."""
        self._write({**(self._row(case) or self._made(case, {})), "begun": results.now()})

    def add(self, case: Case, figures: Figures) -> None:
        """Add the figures of a case that has ended to both files."""
        self._write(self._made(case, figures))

    def _made(self, case: Case, figures: Figures) -> dict[str, Any]:
        about = {"commit": self._commit, "versions": self.machine["versions"], "date": results.now()}
        return {"case": case.name, **about, "figures": figures}

    def _write(self, row: dict[str, Any]) -> None:
        self.rows = [*(other for other in self.rows if other["case"] != row["case"]), row]
        content = {"benchmark": "gpu_validate", "machine": self.machine, "rows": self.rows}
        results.write_text(self.file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        results.write_text(self.page, markdown(content, predictions(results.RESULTS)))

    def _row(self, case: Case) -> dict[str, Any] | None:
        return next((row for row in self.rows if row["case"] == case.name), None)


def predictions(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``make gpu-plan`` in ``folder`` that have an estimate."""
    return [row for content in results.plans(folder) for row in content["rows"] if "estimate" in row["figures"]]


def _machine(device: torch.device) -> dict[str, Any]:
    """Return the properties of the machine on which the figures depend."""
    machine: dict[str, Any] = {"device": f"{platform.machine()} {torch.get_num_threads()} threads"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine = {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / GIB, 1),
        }
    return {
        **machine,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": results.versions(("torch", "triton", "timm", "transformers")),
        "environment": results.environment(("FP4GRAPH_", "TORCHINDUCTOR_")),
    }


def failure(row: Row) -> str | None:
    """Return why the case of ``row`` failed, or None if it succeeded."""
    part, figures = row["case"]["part"], row["figures"]
    if "begun" in row:
        return "begun and not ended: it runs, or was killed"
    if missing := tables.reason(row):
        return missing
    if part in ("kernels", "quantizers"):
        return None if figures["equal"] or figures.get("exempt", False) else "other bits than expected"
    if part == "parity":
        if not all(map(math.isfinite, (*figures["eager"], *figures["compiled"]))):
            return "losses are not finite"
        return None if figures["ratio"] <= WITHIN else f"{figures['ratio']:.2f} times an ulp's effect, above {WITHIN}"
    return None


def markdown(content: Mapping[str, Any], predicted: Sequence[Row]) -> str:
    """Return the page; ``predicted`` are the rows of ``make gpu-plan``."""
    machine, rows = content["machine"], content["rows"]
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["figures"] and tables.reason(row) is None:
            parts[row["case"]["part"]].append(row)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    commits = sorted({row["commit"][:10] for row in rows if row["commit"]})
    dates = sorted(row["date"] for row in rows)
    lines = [
        f"# Validated on: {machine['device']}",
        "",
        f"{len(rows)} cases, {dates[0]} to {dates[-1]}, commit {', '.join(commits) or 'unknown'}; Python "
        f"{machine['python']}, CUDA {machine['cuda']}, {versions}. Written by `python -m benchmarks.gpu.validate`.",
        "",
    ]
    for part, write in (("kernels", _kernels), ("quantizers", _quantizers), ("parity", _parity)):
        if part in parts:
            lines += write(parts[part])
    if timed := [*parts.get("steps", []), *parts.get("switches", [])]:
        lines += _steps(timed, predicted, machine["device"])
    failed = [(row, reason) for row in rows if (reason := failure(row)) is not None]
    if failed:
        lines += ["## Failed", "", *(f"- {_name(row)}: {reason}" for row, reason in failed), ""]
    return "\n".join(lines)


def _kernels(rows: Sequence[Row]) -> list[str]:
    said = f"{_equal(rows)} cases have the same bits in every operator."
    return ["## Kernels beside tensor code", "", said, "", *_different(rows)]


def _quantizers(rows: Sequence[Row]) -> list[str]:
    ordered = sorted(rows, key=lambda row: row["figures"]["exempt"])
    exact, exempt = ([row for row in rows if row["figures"]["exempt"] is value] for value in (False, True))
    said = (
        f"{_equal(exact)} cases have the same bits with kernels and as tensor code.",
        f"So do {_equal(exempt)} cases whose last bit depends on the machine (docs/parity.md).",
    )
    return ["## Quantizers that Inductor compiled, beside eager mode", "", *said, "", *_different(ordered)]


def _equal(rows: Sequence[Row]) -> str:
    return f"{sum(row['figures']['equal'] for row in rows)} of {len(rows)}"


def _different(rows: Sequence[Row]) -> list[str]:
    """Return a line for each of the cases with other bits: how many elements differ, by operator or code."""
    lines = []
    for row in rows:
        if counts := [f"{code} {count}" for code, count in row["figures"]["differs"].items() if count]:
            lines.append(f"- {_name(row)}: {', '.join(counts)}")
    return ["Elements that differ:", "", *lines, ""] if lines else []


def _parity(rows: Sequence[Row]) -> list[str]:
    def difference(row: Row) -> str:
        ratio = row["figures"]["ratio"]
        return f"{ratio:.2f}" if ratio <= WITHIN else f"{ratio:.2f} **above {WITHIN}**"

    columns = (
        *tables.cases("model", "dtype", "policy"),
        tables.Column("difference to an ulp's", difference),
        tables.Column("first loss", lambda row: f"{row['figures']['eager'][0]:.6g}"),
        tables.Column("last loss, eager", lambda row: f"{row['figures']['eager'][-1]:.6g}"),
        tables.Column("compiled", lambda row: f"{row['figures']['compiled'][-1]:.6g}"),
    )
    return ["## Short trainings beside eager mode", "", tables.markdown(columns, rows), ""]


def _steps(rows: Sequence[Row], predicted: Sequence[Row], device: str) -> list[str]:
    columns = (
        *tables.cases("model", "dtype", "policy", "switch"),
        *tables.RATIO,
        tables.Column("busy", lambda row: _busy(row["figures"])),
        tables.Column("predicted", lambda row: _predicted(row["case"], predicted, device)),
        tables.milliseconds("seconds", "ms"),
        _peak("peak_bytes", "peak, GiB"),
        _peak("baseline_peak_bytes", "unquantized"),
        tables.figure("compile_seconds", "compiling, s", ".0f"),
        tables.figure("baseline_compile_seconds", "unquantized", ".0f"),
    )
    switches = [f"- `{name}`: {switch.why}" for name, switch in SWITCHES.items()]
    return ["## Training steps", "", LEGEND, "", *switches, "", tables.markdown(columns, rows), ""]


def _peak(name: str, header: str) -> tables.Column:
    """Return a column of peaks, without those that were stored under CUDA graphs, which lack what a step computes."""
    counted = tables.figure(name, header, ".2f", GIB)
    graphs = {switch for switch, settings in SWITCHES.items() if settings.mode == "reduce-overhead"}
    return tables.Column(header, lambda row: "–" if row["case"]["switch"] in graphs else counted.text(row))


def _predicted(case: Mapping[str, str], predicted: Sequence[Row], device: str) -> str:
    quantizers = {"default": "kernels", "FP4GRAPH_KERNELS=0": "tensor code"}.get(case["switch"])
    wanted = {"block": PREDICTED.get(case["model"]), "quantizers": quantizers}
    wanted |= {name: case[name] for name in ("dtype", "policy")}
    for row in sorted(predicted, key=lambda row: row["case"]["card"] not in device):  # this card's first
        if wanted.items() <= row["case"].items():
            card = row["case"]["card"]
            return f"{row['figures']['estimate']:.2f}" + ("" if card in device else f" ({card})")
    return "–"


def _busy(figures: Mapping[str, Any]) -> str:
    busy, baseline = figures.get("busy_seconds"), figures.get("baseline_busy_seconds")
    return f"{busy / baseline:.2f}" if busy and baseline else "–"


def _name(row: Row) -> str:
    return ", ".join(value for key, value in row["case"].items() if key != "part")
