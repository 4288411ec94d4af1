"""Writes results as HTML, for the last line of a notebook's cell and as pages that need no other file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from html import escape

from rich.table import Table

_text = partial(escape, quote=False)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
body {{ margin: 0 auto; max-width: 1200px; padding: 24px 16px; font: 15px/1.5 system-ui, sans-serif; color: #1d2733; }}
h1 {{ font-size: 24px; margin: 0 0 12px; }}
p {{ max-width: 80ch; margin: 8px 0; }}
table {{ border-collapse: collapse; font-size: 13px; }}
th, td {{ padding: 4px 10px 4px 0; border-bottom: 1px solid #e3e8ee; vertical-align: top; }}
td:first-child {{ font-weight: 600; overflow-wrap: anywhere; min-width: 13em; }}
td:last-child {{ min-width: 20em; }}
details {{ margin-top: 16px; }}
summary {{ cursor: pointer; color: #0072b2; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(title: str, body: str, folded: Mapping[str, str]) -> str:
    """Return an HTML page with ``body``, and below it a section that opens by a click for each title in ``folded``."""
    sections = (f"<details><summary>{escape(name)}</summary>{text}</details>" for name, text in folded.items())
    return _PAGE.format(title=escape(title), body="\n".join([body, *sections]))


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
