"""HTML pages that refer to nothing outside: Jinja templates with one style (``page.html.jinja``)."""

from __future__ import annotations

from datetime import date
from importlib.metadata import version
from typing import Any

from fp4graph.lab.data.extras import needs


def rendered(template: str, **values: Any) -> str:
    """Return a page of this package, filled with ``values``.

    Raises:
        Error: jinja2 is not installed.
    """
    needs("jinja2", "reports need jinja2", "analysis")
    import jinja2

    loader = jinja2.PackageLoader("fp4graph", "lab")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made = f"Written on {date.today():%Y-%m-%d} by fp4graph {version('fp4graph')} with torch {version('torch')}"
    return environment.get_template(template).render(made=made, **values)
