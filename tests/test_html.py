"""Results as HTML: tables and text for notebooks, and whole pages."""

from __future__ import annotations

from rich.table import Table

from fp4graph.model.html import html, page


def test_text_and_cells_are_escaped_and_empty_tables_are_left_out():
    table = Table("a<b", title="sites", caption="c&d")
    table.add_row("1 > 0")
    style = 'style="text-align:left;white-space:pre-line"'
    rows = f"<thead><tr><th {style}>a&lt;b</th></tr></thead><tbody><tr><td {style}>1 &gt; 0</td></tr></tbody>"
    shown = f'<p>sites</p><div style="overflow-x:auto"><table>{rows}</table></div><p>c&amp;d</p>'
    assert html("x < y", table, Table("empty")) == f"<p>x &lt; y</p>\n{shown}"


def test_a_page_holds_its_parts_and_links_to_nothing():
    made = page("a < b", html("text"), {"more & more": html("hidden")})
    assert "<title>a &lt; b</title>" in made
    assert "<details><summary>more &amp; more</summary><p>hidden</p></details>" in made
    assert "http" not in made
