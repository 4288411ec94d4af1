"""Loads plugins: a :class:`Registry` has its own pluggy manager, loads plugins when it is made, skips broken ones."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pluggy
from pydantic import ValidationError

from fp4graph.errors import PluginError
from fp4graph.numerics import formats
from fp4graph.technique import hookspecs
from fp4graph.technique.facts import Overhead
from fp4graph.technique.parts import STAGES
from fp4graph.technique.product import ProductOperation
from fp4graph.technique.technique import Technique

GROUP = "fp4graph"
#: Members that technique classes of an earlier version had, and that parts have today.
_FORMER = (
    *STAGES, "state", "acts_on", "pairs", "for_operand", "mixes", "counts", "draws", "draws_in_evaluation",
    "group_granularity", "normalizes", "block_rotation", "on_experts", "by_block", "by_expert", "divides_by",
)  # fmt: skip


class Registry:
    """The techniques, formats, policies and product operations that a set of plugins offers.

    Args:
        plugins: (name, object with hook implementations) pairs beyond those found by entry point.
        entry_point_group: the group of entry points of installed plugins; None looks for none.

    Attributes:
        techniques: name to class.
        elements, scales: name to format, built-in and added.
        policies: name to file, shipped and added.
        products: qualified name of an operator to the :class:`ProductOperation` that reads its calls.
        failures: plugin name to the error that kept the plugin out; the others stay usable.
        contested: techniques and formats that two plugins claim, with the error. A policy that names one is refused,
            because nobody can tell which of the two is meant.
    """

    def __init__(self, plugins: Iterable[tuple[str, Any]] = (), *, entry_point_group: str | None = GROUP) -> None:
        self._manager = pluggy.PluginManager("fp4graph")
        self._manager.add_hookspecs(hookspecs)
        self._techniques: dict[str, type[Technique]] = {}
        self._elements: dict[str, formats.ElementFormat] = dict(formats.ELEMENTS)
        self._scales: dict[str, formats.ScaleFormat] = dict(formats.SCALES)
        self._policies: dict[str, Path] = {path.stem: path for path in _shipped_policies()}
        self._products: dict[str, ProductOperation] = {}
        self.products: Mapping[str, ProductOperation] = MappingProxyType(self._products)
        self.techniques: Mapping[str, type[Technique]] = MappingProxyType(self._techniques)
        self.elements: Mapping[str, formats.ElementFormat] = MappingProxyType(self._elements)
        self.scales: Mapping[str, formats.ScaleFormat] = MappingProxyType(self._scales)
        self.policies: Mapping[str, Path] = MappingProxyType(self._policies)
        self._origin: dict[str, str] = {}
        self._offers: dict[str, set[str]] = {}  # the names that each plugin offers, if it could be asked
        self.failures: dict[str, PluginError] = {}
        self.contested: dict[str, PluginError] = {}
        installed = entry_points(group=entry_point_group) if entry_point_group else ()
        for name, candidate in [*((point.name, point) for point in installed), *plugins]:
            try:
                # Entry points are of importlib's class or of importlib_metadata's.
                loads = hasattr(candidate, "load") and hasattr(candidate, "group")
                self._add(name, candidate.load() if loads else candidate)
            except Exception as error:  # noqa: BLE001  # whatever a plugin raises, the others stay usable
                unloaded = PluginError(f"cannot be loaded: {type(error).__name__}: {error}", plugin=name)
                self.failures[name] = error if isinstance(error, PluginError) else unloaded

    def _add(self, name: str, plugin: object) -> None:
        """Register one plugin's offers, all or none of them."""
        if self._manager.has_plugin(name):
            error = PluginError("another plugin has this name", plugin=name)
            self.contested |= {technique: error for technique, origin in self._origin.items() if origin == name}
            self._offers.pop(name, None)
            raise error
        try:
            self._manager.register(plugin, name=name)
            self._manager.check_pending()
            others = [other for other in self._manager.get_plugins() if other is not plugin]
            techniques, number_formats, policies, products = (
                [item for batch in self._manager.subset_hook_caller(hook, others)() for item in batch]
                for hook in ("fp4graph_techniques", "fp4graph_formats", "fp4graph_policies", "fp4graph_products")
            )
            named = [getattr(item, "name", None) for item in (*techniques, *number_formats)]
            paths = [Path(path) for path in policies]
            if all(isinstance(each, str) for each in named):
                self._offers[name] = {*map(str, named), *(path.stem for path in paths)}
            self._check(name, techniques, number_formats, products)
            self._check_policies(name, paths)
        except BaseException:
            if self._manager.get_plugin(name) is plugin:  # registering stops halfway at a bad signature
                self._manager.unregister(plugin)
            raise
        for technique in techniques:
            self._techniques[technique.name] = technique
            technique.plugin = name
            self._origin[technique.name] = name
        for number_format in number_formats:
            if isinstance(number_format, formats.ElementFormat):
                self._elements[number_format.name] = number_format
            else:
                self._scales[number_format.name] = number_format
        self._policies.update((path.stem, path) for path in paths)
        self._products.update((product.operator, dataclasses.replace(product, plugin=name)) for product in products)

    def _check(self, plugin: str, techniques: list[Any], number_formats: list[Any], products: list[Any]) -> None:
        """Raise PluginError for an offer that is not of its kind, or whose name is taken."""
        error = functools.partial(PluginError, plugin=plugin)
        offered: set[str] = set()
        for technique in techniques:
            if not (isinstance(technique, type) and issubclass(technique, Technique)):
                raise error(f"{technique!r} is not a subclass of fp4graph.Technique")
            missing = [field for field in ("name", "overhead") if not getattr(technique, field, None)]
            if missing or technique.complexity is Technique.complexity:
                raise error(f"{technique.__name__} must declare {', '.join(missing) or 'complexity'}")
            if (name := technique.name) in self._techniques or name in offered:
                origin = self._origin.get(name, plugin)
                self.contested[name] = error(f"technique {name!r} is already offered by plugin {origin!r}")
                raise self.contested[name]
            if (former := next((member for member in _FORMER if hasattr(technique, member)), None)) is not None:
                moved = "move it to a part that parts() returns; see docs/techniques.md"
                raise error(f"{technique.__name__} has {former} itself, as in an earlier version; {moved}")
            if problem := _wrong_declaration(technique):
                raise error(f"{technique.__name__}: {problem}")
            offered.add(name)
        for number_format in number_formats:
            if not isinstance(number_format, formats.ElementFormat | formats.ScaleFormat):
                raise error(f"{number_format!r} is neither an ElementFormat nor a ScaleFormat")
            if (name := number_format.name) in self._elements or name in self._scales:
                self.contested[name] = error(f"format {name!r} already exists")
                raise self.contested[name]
        for product in products:
            if not isinstance(product, ProductOperation):
                raise error(f"{product!r} is not a ProductOperation")
            library, _, name = product.operator.partition("::")
            if not (library and name and name.isidentifier()):
                raise error(f"operator {product.operator!r} is not of the form 'library::name'")
            if (other := self._products.get(product.operator)) is not None:
                raise error(f"operator {product.operator!r} is already read by plugin {other.plugin!r}")

    def _check_policies(self, plugin: str, paths: list[Path]) -> None:
        for path in paths:
            if not path.is_file():
                raise PluginError(f"policy file {str(path)!r} does not exist", plugin=plugin)
            if (other := self._policies.get(path.stem)) is not None:
                raise PluginError(f"policy {path.stem!r} is already shipped as {str(other)!r}", plugin=plugin)

    def why_missing(self, name: str) -> str:
        """Return, in parentheses, the failures that may be why no technique, format or policy has ``name``; or "".

        They are the failures of plugins that offer the name, or else of plugins that failed before they could be asked.
        """
        offering = [error for plugin, error in self.failures.items() if name in self._offers.get(plugin, ())]
        unasked = [error for plugin, error in self.failures.items() if plugin not in self._offers]
        causes = offering or unasked
        more = f", and {len(causes) - 3} more plugins" if causes[3:] else ""
        return f" ({'; '.join(map(str, causes[:3]))}{more})" if causes else ""

    def origin(self, technique: str) -> str:
        """Return the name of the plugin that offers ``technique``."""
        return self._origin[technique]


def _shipped_policies() -> list[Path]:
    directory = files("fp4graph_policies")
    return sorted(Path(str(item)) for item in directory.iterdir() if item.name.endswith(".yaml"))


def _wrong_declaration(technique: Any) -> str | None:
    """Return what is wrong with the declarations of a technique, as far as no policy is needed to see it, or None."""
    if not isinstance(technique.name, str) or not re.fullmatch(r"[\w-]+", technique.name):
        return f"name {technique.name!r} must be a word: policies write it, and names of buffers contain it"
    if not isinstance(technique.overhead, Overhead):
        return f"overhead must be an Overhead; got {technique.overhead!r}"
    for field in ("conflicts", "requires"):
        if isinstance(names := getattr(technique, field), str):
            return f"{field} must be a set of names, as frozenset({{{names!r}}}); got {names!r}"
    technique.model_rebuild()  # raises where the type of an option cannot be found
    try:
        technique()
    except ValidationError as invalid:
        for each in invalid.errors():
            if each["loc"] and each["type"] != "missing":
                return f"default of option {each['loc'][0]}: {each['msg']}; got {each['input']!r}"
    except Exception:  # noqa: BLE001  # a validator of several options, which may need values that only policies give
        pass
    return None


@functools.cache
def default_registry() -> Registry:
    """Return the registry of everything installed, built at first use."""
    return Registry()
