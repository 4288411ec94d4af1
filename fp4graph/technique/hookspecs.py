"""The hooks that a plugin may implement: a module or object named by an entry point of group ``fp4graph``."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike

import pluggy

from fp4graph.numerics.formats import ElementFormat, ScaleFormat
from fp4graph.technique.product import ProductOperation
from fp4graph.technique.technique import Technique

hookspec = pluggy.HookspecMarker("fp4graph")
hookimpl = pluggy.HookimplMarker("fp4graph")


@hookspec
def fp4graph_techniques() -> Iterable[type[Technique]]:
    """Return the technique classes this plugin adds."""
    return ()


@hookspec
def fp4graph_formats() -> Iterable[ElementFormat | ScaleFormat]:
    """Return the element and scale formats this plugin adds."""
    return ()


@hookspec
def fp4graph_policies() -> Iterable[str | PathLike[str]]:
    """Return the policy files this plugin ships, each reachable by its file's stem."""
    return ()


@hookspec
def fp4graph_products() -> Iterable[ProductOperation]:
    """Return the operators that this plugin teaches the graph pass to read as products."""
    return ()
