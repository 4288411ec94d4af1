"""``fp4graph doctor``: what is installed here, which kernels are used, and what is missing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from rich.table import Table

from fp4graph.commands.output import AsJson, installed_registry, show
from fp4graph.errors import install

if TYPE_CHECKING:
    from packaging.requirements import Requirement

#: Extras for users; the others are for working on the project.
EXTRAS = ("vision", "tasks", "analysis", "sweep", "hf", "export", "wandb", "mlflow", "clients")


def doctor(as_json: AsJson = False) -> None:
    """Show versions, compiler, kernels, device, plugins, and what is missing with the command that installs it."""
    facts = dict(_facts())
    missing = dict(_missing())
    found = Table("what", "here")
    for name, value in facts.items():
        found.add_row(name, value)
    extras = Table("extra", "missing", "install")
    for extra, packages in missing.items():
        extras.add_row(extra, ", ".join(packages), install(extra))
    tables = [found, extras] if missing else [found, "Every extra is installed."]
    show({"facts": facts, "missing": missing}, *tables, as_json=as_json)


def _facts() -> Iterator[tuple[str, str]]:
    yield "fp4graph", metadata.version("fp4graph")
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    try:
        import torch
    except Exception as error:  # noqa: BLE001  # a broken installation may raise anything
        yield "torch", f"fails: {type(error).__name__}: {error}; install it again, and run this command again"
        return
    from fp4graph.commands.catalogue import shipped_registry
    from fp4graph.kernels import machine

    yield "torch", torch.__version__
    yield from machine.report().items()
    registry = installed_registry()
    shipped = shipped_registry()
    added = {
        f"{name} (plugin {registry.origin(name)})" for name in registry.techniques if name not in shipped.techniques
    }
    yield "techniques", ", ".join([f"{len(shipped.techniques)} shipped", *sorted(added)])
    yield (
        "policies",
        ", ".join([f"{len(shipped.policies)} shipped", *sorted(registry.policies.keys() - shipped.policies)]),
    )
    for plugin, failure in registry.failures.items():
        yield f"plugin {plugin}", f"fails: {failure}"


def _missing() -> Iterator[tuple[str, list[str]]]:
    """Yield each extra that lacks packages, with what is missing or too old."""
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in metadata.requires("fp4graph") or ()]
    for extra in EXTRAS:
        wanted = (r for r in requirements if r.marker is not None and r.marker.evaluate({"extra": extra}))
        lacking = [f"{r.name}{r.specifier}" for r in wanted if not _satisfied(r)]
        if lacking:
            yield extra, lacking


def _satisfied(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False
