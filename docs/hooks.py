"""Hooks of ``mkdocs build``: pages that are made of files outside of docs/, so that the site is whole offline.

README is the front page, CHANGELOG a page, every public name has an entry on the API page, each notebook is a page with
its outputs, and each file of the repository that a page links to is a page with its text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbclient
import nbformat
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

import fp4graph
from fp4graph import integrations

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")
_LANGUAGE = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "sh"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that docs/ does not have."""
    made = {
        "index.md": (ROOT / "README.md").read_text("utf-8"),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text("utf-8"),
        "api.md": _api(),
    }
    sources = {"index.md": ROOT / "README.md", "changelog.md": ROOT / "CHANGELOG.md"}
    pages = {file.src_uri: Path(file.abs_src_path) for file in files.documentation_pages()}
    for place, text in made.items():
        files.append(
            File.generated(config, place, content=_linked(text, sources.get(place, ROOT / "docs" / place), place))
        )
    for path in NOTEBOOKS:
        for place, content in _notebook(path):
            files.append(File.generated(config, f"notebooks/{place}", content=content))
    waiting, shown = [*pages.values(), *sources.values(), *NOTEBOOKS], set[Path]()
    while waiting:
        path = waiting.pop()
        for target in sorted(_outside(path) - shown):
            shown.add(target)
            files.append(File.generated(config, _page_of(target), content=_shown(target)))
            waiting += [page for page in (target, target / "README.md") if page.suffix == ".md" and page.is_file()]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to files outside of docs/ to their pages."""
    path = page.file.abs_src_path
    return markdown if path is None else _linked(markdown, Path(path), page.file.src_uri)


def _outside(path: Path) -> set[Path]:
    """Return the files of the repository outside of docs/ that the page at ``path`` links to."""
    targets = {(path.parent / found[1]).resolve() for found in _LINK.finditer(path.read_text("utf-8"))}
    own = {ROOT / "README.md", ROOT / "CHANGELOG.md", *NOTEBOOKS}
    return {t for t in targets if t.exists() and t.is_relative_to(ROOT) and not t.is_relative_to(ROOT / "docs")} - own


def _page_of(target: Path) -> str:
    return f"files/{target.relative_to(ROOT).as_posix()}.md"


def _linked(text: str, path: Path, place: str) -> str:
    """Return ``text`` of the page ``place``, written as the file ``path``, with links that hold on the site."""

    def link(found: re.Match[str]) -> str:
        target = (path.parent / found[1]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return found[0]
        if target in (ROOT / "README.md", ROOT / "CHANGELOG.md"):
            there = "index.md" if target.name == "README.md" else "changelog.md"
        elif target.is_relative_to(ROOT / "docs"):
            there = target.relative_to(ROOT / "docs").as_posix()
        elif target in NOTEBOOKS:
            there = f"notebooks/{target.stem}.md"
        else:
            there = _page_of(target)
        return f"]({os.path.relpath(there, Path(place).parent)}{found[2] or ''})"

    return _LINK.sub(link, text)


def _notebook(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the names and contents of a notebook's page, of its pictures, and of the executed notebook."""
    executed = _executed(path)
    resources = {"unique_key": path.stem}  # begins the names of pictures
    page, resources = MarkdownExporter().from_notebook_node(executed, resources)
    page = page.replace('<table border="1" class="dataframe">', "<table>")  # the theme styles plain tables
    title, _, text = _linked(page, path, f"notebooks/{path.stem}.md").partition("\n")
    yield f"{path.stem}.md", f"{title}\n\n[Download this notebook]({path.name})\n{text}"
    yield path.name, nbformat.writes(executed)
    yield from resources["outputs"].items()


def _executed(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with its outputs, from runs/notebooks if neither it nor the package has changed since."""
    kept = ROOT / "runs/notebooks" / path.name
    package = (file for name in ("fp4graph", "plugins", "policies") for file in (ROOT / name).rglob("*"))
    sources = (file for file in package if file.is_file() and "__pycache__" not in file.parts)
    changed = max(file.stat().st_mtime for file in (path, *sources))
    if not kept.exists() or kept.stat().st_mtime < changed:
        notebook = nbformat.read(path, 4)
        with TemporaryDirectory() as folder:
            # The kernel warns of ports on this machine.
            nbclient.execute(notebook, folder, coalesce_streams=True, extra_arguments=["--log-level=ERROR"])
        for cell in notebook.cells:  # progress, and notes of libraries that are imported, are no results
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        kept.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, kept)
    return nbformat.read(kept, 4)


def _shown(target: Path) -> str:
    """Return a page with the text of a file; of a folder, its README and the names of its files."""
    name = target.relative_to(ROOT).as_posix()
    readme = target / "README.md" if target.is_dir() else target
    text = readme.read_text("utf-8") if readme.is_file() else f"# {name}\n"
    if readme.suffix == ".md":
        text = _linked(text, readme, _page_of(target))
    if target.is_dir():
        paths = (path for path in sorted(target.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
        return f"{text}\n## Files\n\n" + "\n".join(f"- `{path.relative_to(target)}`" for path in paths)
    return (
        text if target.suffix == ".md" else f"# {name}\n\n`````{_LANGUAGE.get(target.suffix, 'text')}\n{text}\n`````\n"
    )


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Show names of Python's roles, ``:class:`~module.Name```, as code."""
    return re.sub(r":(?:class|func|meth|mod|data|attr):<code>~?([^<]+)</code>", r"<code>\1</code>", html)


def _api() -> str:
    """Return the page of all public names, each rendered from its docstring."""
    values = {name: getattr(fp4graph, name) for name in fp4graph.__all__ if name not in fp4graph._MODULES}
    functions_first = sorted(values, key=lambda name: (isinstance(values[name], type), name))
    entries = [f"::: {values[name].__module__}.{name}" for name in functions_first if name != "hookimpl"]
    # Not getattr: pages are rendered from the source, and importing a callback needs its Trainer's library.
    joined = [f"::: {integrations.__name__}.{integrations._HOME[name]}.{name}" for name in integrations.__all__]
    text = "# API\n\nEvery name is an attribute of `fp4graph`, those at the end of `fp4graph.integrations`.\n\n"
    return text + "\n\n".join([*entries, *joined]) + "\n"
