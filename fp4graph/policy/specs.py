"""Resolves a quantize block and its exceptions to the specs of the six operands; formats are looked up by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fp4graph.errors import suggest
from fp4graph.numerics.formats import ElementFormat, ScaleFormat
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.policy.document import Node
from fp4graph.policy.dump import REPLACES_TIES, BaseFormats
from fp4graph.policy.rule import Specs
from fp4graph.policy.schema import OperandException, QuantizeSection, ScaleSection
from fp4graph.policy.validation import Path, refuse_contested
from fp4graph.policy.words import dotted
from fp4graph.technique.operands import ADDRESSES, GROUPS, Operand
from fp4graph.technique.registry import Registry

#: The fields that blocks write, each with its path.
_Written = dict[str, tuple[Any, Path]]


@dataclass(frozen=True)
class Exceptions:
    """Exceptions for operands, by address, and the path where they are written."""

    by_address: Mapping[str, OperandException]
    path: Path


@dataclass(frozen=True)
class _Layer:
    """One quantize block and its path; ``section`` None stands for ``keep``, or for ``fprop`` if it ``reuses``."""

    section: QuantizeSection | None
    path: Path
    reuses: bool = False


class SpecResolver:
    """Resolves the quantize blocks of one document; a phase's exceptions, ``late``, apply after those of each rule.

    ``base_formats`` maps each scale format made with ``max`` to the name of the format that it was made from.
    """

    def __init__(self, document: Node, registry: Registry, late: Exceptions | None = None) -> None:
        self.base_formats: BaseFormats = {}
        self._document = document
        self._registry = registry
        self._late = late

    def resolve(self, base: QuantizeSection, path: Path, exceptions: Exceptions) -> tuple[Specs, frozenset[Operand]]:
        """Return the six specs, and the operands in high precision that read fprop's dequantized operand.

        Exceptions for groups of operands apply in the order in which they are written, then those for single operands.
        """
        layers = {operand: [_Layer(base, path)] for operand in Operand}
        for address, exception, where in self._ordered(exceptions):
            section = exception if isinstance(exception, QuantizeSection) else None
            for operand in ADDRESSES[address]:
                if section is None or layers[operand][-1].section is None:
                    del layers[operand][1:]  # keep drops earlier exceptions; later ones start from the base
                layers[operand].append(_Layer(section, where, exception == "fprop"))
                if exception == "fprop" and operand.fprop is None:
                    raise self._document.error(
                        where,
                        f"fprop has no meaning for {operand}. Only dgrad.weight and wgrad.input are tensors that fprop "
                        "has multiplied before; write keep for the others",
                    )
        specs = Specs(tuple(self._spec(operand, layers[operand]) for operand in Operand))
        if not any(specs.values()):
            last = self._late if self._late and self._late.by_address else exceptions
            raise self._document.error(
                last.path, "all six operands are kept; write keep: with a reason instead of quantize"
            )
        return specs, frozenset(operand for operand in Operand if layers[operand][-1].reuses)

    def _ordered(self, exceptions: Exceptions) -> Iterator[tuple[str, OperandException, Path]]:
        for each in (exceptions, *([self._late] if self._late else [])):
            # The sort is stable: groups keep their order.
            for address in sorted(each.by_address, key=lambda address: address not in GROUPS):
                yield address, each.by_address[address], (*each.path, address)

    def _spec(self, operand: Operand, layers: list[_Layer]) -> QuantSpec | None:
        if layers[-1].section is None:
            return None
        written: _Written = {}
        scale: _Written = {}
        for layer in layers:
            if layer.section is None:
                continue
            if layer.section.element is not None:
                written.pop("selector", None)  # it chose among the elements replaced here
            written.update(_fields(layer.section, layer.path, without=("scale", "operands")))
            if layer.section.scale is not None:
                if layer.section.scale.format is not None:
                    scale.pop("max", None)  # it limited the format replaced here
                if layer.section.scale.model_fields_set & REPLACES_TIES:
                    scale.pop("ties", None)  # they went with the rounding replaced here
                scale.update(_fields(layer.section.scale, (*layer.path, "scale")))
        if "element" in written:
            names, path = written["element"]
            written["element"] = (tuple(self._format(name, path, "element") for name in names), path)
        scale_spec = self._scale(scale, layers[-1].path)
        source, source_path = written.get("source", ("original", ()))
        if source == "fprop" and operand.fprop is None:
            raise self._document.error(
                source_path,
                f"source: fprop has no meaning for {operand}. Only dgrad.weight and wgrad.input are tensors that fprop "
                "has quantized before; remove it",
            )
        try:
            return QuantSpec(scale=scale_spec, **{name: value for name, (value, _) in written.items()})
        except (TypeError, ValueError) as error:
            raise self._document.error(layers[-1].path, f"{dotted(layers[-1].path)}: {error}") from None

    def _scale(self, written: _Written, fallback: Path) -> ScaleSpec:
        values = {name: value for name, (value, _) in written.items() if name not in ("format", "max")}
        name, path = written.get("format", ("e8m0", fallback))
        number_format = self._format(name, path, "scale")
        if "max" in written:
            largest, path = written["max"]
            number_format = self._with_max(number_format, largest, path)
        try:
            return ScaleSpec(format=number_format, **values)
        except ValueError as error:
            causes = [written[name] for name in ("ties", "rounding", "convention") if name in written]
            _, path = causes[0] if causes else ("", fallback)
            raise self._document.error(path, f"{dotted(path[:-1])}: {error}") from None

    def _with_max(self, number_format: ScaleFormat, largest: float, path: Path) -> ScaleFormat:
        if largest == number_format.max:
            return number_format
        try:
            variant = number_format.with_max(largest)
        except ValueError as error:
            raise self._document.error(path, f"{dotted(path)}: {error}{_below(number_format, largest)}") from None
        if self._registry.scales.get(variant.name) != variant:
            self.base_formats[variant] = number_format.name
        return variant

    def _format(self, name: str, path: Path, kind: str) -> Any:
        elements: Mapping[str, ElementFormat | ScaleFormat] = self._registry.elements
        tables = {"element": elements, "scale": self._registry.scales}
        table, other_kind = tables[kind], "scale" if kind == "element" else "element"
        if name in table:
            refuse_contested(self._document, self._registry, name, path)
            return table[name]
        if name in tables[other_kind]:
            names = ", ".join(sorted(table))
            wrong = f"{name!r} is a format of {other_kind}s, not of {kind}s; known: {names}"
        else:
            cause = self._registry.why_missing(name)
            wrong = f"unknown {kind} format {name!r}{cause}; {suggest(name.lower(), table)}"
        raise self._document.error(path, f"{dotted(path)}: {wrong}")


def _fields(section: QuantizeSection | ScaleSection, path: Path, without: tuple[str, ...] = ()) -> _Written:
    """Return the fields that a block writes, each with its path."""
    return {name: (getattr(section, name), (*path, name)) for name in section.model_fields_set if name not in without}


def _below(number_format: ScaleFormat, largest: float) -> str:
    try:
        below = max((value for value in number_format.values() if 0 < value <= largest), default=None)
    except ValueError:  # a format with too many values to list takes only its own max
        return "; leave max out"
    return f"; the nearest below is {below:g}" if below is not None else ""
