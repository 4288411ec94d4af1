"""``pyproject.toml`` names every folder with files as a package; setuptools warns at length about others."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_of_the_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    found = set()
    for package, folder in settings["package-dir"].items():
        files = [file.relative_to(ROOT / folder) for file in (ROOT / folder).rglob("*") if file.is_file()]
        found |= {".".join((package, *file.parts[:-1])) for file in files if "__pycache__" not in file.parts}
    assert set(settings["packages"]) == found
