"""Results as HTML, which notebooks show for the last line of a cell."""

from __future__ import annotations

from functools import partial
from html import escape

from rich.table import Table

_text = partial(escape, quote=False)


def html(*parts: Table | str) -> str:
    """Return tables and paragraphs of text as HTML; a table without rows is left out."""
    return "\n".join(
        _table(part) if isinstance(part, Table) else f"<p>{_text(part)}</p>"
        for part in parts
        if isinstance(part, str) or part.row_count
    )


def _table(table: Table) -> str:
    """Return a table with its title and caption; a table that is wider than the page scrolls."""
    styles = [f"text-align:{c.justify};white-space:{'nowrap' if c.no_wrap else 'pre-line'}" for c in table.columns]

    def row(cells: tuple[object, ...], tag: str) -> str:
        pairs = zip(styles, cells, strict=True)
        return "".join(f'<{tag} style="{style}">{_text(str(cell))}</{tag}>' for style, cell in pairs)

    head = row(tuple(column.header for column in table.columns), "th")
    lines = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in lines)
    title, caption = (f"<p>{_text(str(text))}</p>" if text else "" for text in (table.title, table.caption))
    rows = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'{title}<div style="overflow-x:auto">{rows}</div>{caption}'
