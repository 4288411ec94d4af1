"""The Markdown page of ``make gpu-validate``, from the rows of its JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.steps import PREDICTED, SWITCHES

Row = Mapping[str, Any]
#: The largest allowed difference of losses of a short training, as a multiple of an ulp's effect.
WITHIN = 3


def failure(row: Row) -> str | None:
    """Return why the case of ``row`` failed, or None if it succeeded."""
    part, figures = row["case"]["part"], row["figures"]
    if "failed" in figures:
        return str(figures["failed"])
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
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["case"]["part"], []).append(row)
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
    timed = [*parts.get("steps", []), *parts.get("switches", [])]
    lines += _steps(timed, predicted, machine["device"]) if timed else []
    failed = [(row, reason) for row in rows if (reason := failure(row)) is not None]
    if failed:
        lines += ["## Failed", "", *(f"- {_name(row)}: {reason}" for row, reason in failed), ""]
    return "\n".join(lines)


def _kernels(rows: Sequence[Row]) -> list[str]:
    done = [row for row in rows if "equal" in row["figures"]]
    lines = ["## Kernels beside tensor code", "", f"{_equal(done)} cases have the same bits in every operator.", ""]
    return lines + _different(done)


def _quantizers(rows: Sequence[Row]) -> list[str]:
    exact = [row for row in rows if not row["figures"].get("exempt", True)]
    exempt = [row for row in rows if row["figures"].get("exempt", False)]
    lines = ["## Quantizers that Inductor compiled, beside eager mode", ""]
    lines += [f"{_equal(exact)} cases have the same bits with kernels and as tensor code."]
    lines += [f"So do {_equal(exempt)} cases whose last bit depends on the machine (docs/parity.md).", ""]
    return lines + _different([*exact, *exempt])


def _equal(rows: Sequence[Row]) -> str:
    return f"{sum(row['figures']['equal'] for row in rows)} of {len(rows)}"


def _different(rows: Sequence[Row]) -> list[str]:
    unequal = [row for row in rows if not row["figures"]["equal"]]
    lines = [
        f"- {_name(row)}: " + ", ".join(f"{code} {count}" for code, count in row["figures"]["differs"].items() if count)
        for row in unequal
    ]
    return ["Elements that differ:", "", *lines, ""] if lines else []


def _parity(rows: Sequence[Row]) -> list[str]:
    header = ("model", "dtype", "policy", "difference to an ulp's", "first loss", "last loss, eager", "compiled")
    cells = []
    for row in rows:
        figures = row["figures"]
        if "ratio" in figures:
            losses = figures["eager"][0], figures["eager"][-1], figures["compiled"][-1]
            within = "" if figures["ratio"] <= WITHIN else f" **above {WITHIN}**"
            case = row["case"]["model"], row["case"]["dtype"], row["case"]["policy"]
            cells.append((*case, f"{figures['ratio']:.2f}{within}", *(f"{loss:.6g}" for loss in losses)))
    return ["## Short trainings beside eager mode", "", *_table(header, cells, 3), ""]


def _steps(rows: Sequence[Row], predicted: Sequence[Row], device: str) -> list[str]:
    header = ("model", "dtype", "policy", "switch", "step", "quartiles", "busy", "predicted", "ms", "peak, GiB",
              "unquantized", "compiling, s", "unquantized")  # fmt: skip
    cells = []
    for row in rows:
        case, figures = row["case"], row["figures"]
        if "ratio" not in figures:
            continue
        cells.append(
            (
                case["model"],
                case["dtype"],
                case["policy"],
                case["switch"],
                f"{figures['ratio']:.2f}",
                "{:.2f}–{:.2f}".format(*figures["quartiles"]),
                _busy(figures),
                _predicted(case, predicted, device),
                f"{1e3 * figures['seconds']:.3g}",
                _gib(figures["peak_bytes"]),
                _gib(figures["baseline_peak_bytes"]),
                f"{figures['compile_seconds']:.0f}",
                f"{figures['baseline_compile_seconds']:.0f}",
            )
        )
    lines = [
        "## Training steps",
        "",
        "*step*: time relative to the unquantized model under the same mode, measured in alternation. *busy*: the same "
        "of the time in which the card computed, which is shorter where the host is slower. *predicted*: `make "
        "gpu-plan`'s estimate for one block of the model, without head and optimizer, on the card in brackets. "
        "*compiling*: the first step with empty caches; under `--jobs`, while other cases compile too.",
    ]
    lines += ["", *(f"- `{name}`: {switch.why}" for name, switch in SWITCHES.items())]
    return [*lines, "", *_table(header, cells, 4), ""]


def _predicted(case: Mapping[str, str], predicted: Sequence[Row], device: str) -> str:
    quantizers = {"default": "kernels", "FP4GRAPH_KERNELS=0": "tensor code"}.get(case["switch"])
    wanted = {"block": PREDICTED.get(case["model"]), "dtype": case["dtype"], "policy": case["policy"]}
    for row in predicted:
        row_case = row["case"]
        if row_case["quantizers"] == quantizers and all(row_case[name] == value for name, value in wanted.items()):
            return f"{row['figures']['estimate']:.2f}" + (
                "" if row_case["card"] in device else f" ({row_case['card']})"
            )
    return "–"


def _busy(figures: Mapping[str, Any]) -> str:
    busy, baseline = figures.get("busy_seconds"), figures.get("baseline_busy_seconds")
    return f"{busy / baseline:.2f}" if busy and baseline else "–"


def _gib(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**30:.2f}"


def _table(header: Sequence[str], cells: Iterable[Sequence[str]], of_case: int) -> list[str]:
    rule = ["---" if place < of_case else "---:" for place in range(len(header))]
    return ["| " + " | ".join(line) + " |" for line in (header, rule, *cells)]


def _name(row: Row) -> str:
    return ", ".join(value for key, value in row["case"].items() if key != "part")
