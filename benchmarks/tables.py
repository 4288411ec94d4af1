"""Tables of stored rows, for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.timing import Patience

#: A row as it is stored: case and figures, and the number of its run.
Stored = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column: the ``text`` of a row under ``header``. A row without figures has only the columns of its case."""

    header: str
    text: Callable[[Stored], str]
    of_case: bool = False


def cases(*names: str, **headers: str) -> tuple[Column, ...]:
    """Return columns with entries of the case, under their names or other headers."""

    def column(name: str, header: str) -> Column:
        return Column(header, lambda row: str(row["case"][name]), of_case=True)

    return tuple(column(name, header) for name, header in {**dict(zip(names, names, strict=True)), **headers}.items())


def figure(name: str, header: str, form: str | None = None, unit: float = 1.0) -> Column:
    """Return a column with a figure in a unit, as text of Python's ``form`` or with three digits; a dash for None."""

    def text(row: Stored) -> str:
        value = row["figures"].get(name)
        if value is None or isinstance(value, str):
            return value or "–"
        return _three_digits(value / unit) if form is None else format(value / unit, form)

    return Column(header, text)


def milliseconds(name: str, header: str) -> Column:
    """Return a column with a figure in seconds, shown in milliseconds."""
    return figure(name, header, unit=1e-3)


def _quartiles(row: Stored) -> str:
    figures = row["figures"]
    (low, high), ratio = figures["quartiles"], figures["ratio"]
    # Rows that were stored before rows said so are judged by their quartiles.
    settled = figures.get("settled", max(high - ratio, ratio - low) <= Patience.within * ratio)
    return f"{low:.2f}–{high:.2f}" + ("" if settled else " ~")


#: The ratio with its quartiles and the number of pairs. ~ marks quartiles that did not settle within the time limit.
RATIO = (
    figure("ratio", "ratio", ".2f"),
    Column("quartiles", _quartiles),
    figure("repeats", "n", ".0f"),
)


def reason(row: Stored) -> str | None:
    """Return why a row has no figures, or None if it has some."""
    missing: str | None = row["figures"].get("inapplicable") or row["figures"].get("failed")
    return missing


def show(title: str, columns: Sequence[Column], rows: Sequence[Stored]) -> None:
    """Print the table to the terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log has no width of its own
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column.header, justify="left" if column.of_case else "right", overflow="fold")
    for row in rows:
        if reason(row) is None:
            table.add_row(*(column.text(row) for column in columns))
    console.print(table)
    for line in not_measured(columns, rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def markdown(columns: Sequence[Column], rows: Sequence[Stored]) -> str:
    """Return the table in Markdown, and under it the rows that could not be measured."""
    lines = [[column.header for column in columns], ["---" if c.of_case else "---:" for c in columns]]
    lines += [[column.text(row) for column in columns] for row in rows if reason(row) is None]
    table = "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)
    missing = "\n".join(f"- {line}" for line in not_measured(columns, rows))
    return f"{table}\n\n{missing}" if missing else table


def not_measured(columns: Sequence[Column], rows: Sequence[Stored]) -> list[str]:
    """Return a sentence for each row without figures."""
    labels = [column for column in columns if column.of_case]
    return [
        f"{', '.join(column.text(row) for column in labels)}: not measured: {why}"
        for row in rows
        if (why := reason(row))
    ]


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
