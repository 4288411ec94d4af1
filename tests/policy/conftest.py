"""Toy techniques, and a registry without other techniques: these tests need no plugin and no model."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest
from pydantic import Field

from fp4graph.numerics.formats import ElementFormat, ScaleFormat
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique import OptimizerHook, Overhead, Part, Technique
from fp4graph.technique.operands import Operand
from fp4graph.technique.registry import Registry
from fp4graph.technique.site import SiteView
from tests.helpers.techniques import offering


class Toy(Technique):
    """A technique that acts on every operand, so that the loader does not warn that it has no effect."""

    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    weight: ClassVar[float] = 1.0

    @property
    def complexity(self) -> float:
        return self.weight

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (OptimizerHook(options=self, operands=frozenset(Operand)),)


class Dither(Toy):
    """Implied by stochastic rounding; its weight depends on an option."""

    name: ClassVar[str] = "dither"

    scope: Literal["backward", "all"] | tuple[str, ...] = "backward"
    bits: int = Field(24, ge=1, le=24)

    @property
    def complexity(self) -> float:
        return 0.5 if self.bits == 24 else 0.25

    @classmethod
    def implied_by(cls, spec: QuantSpec) -> Dither | None:
        return cls(bits=spec.random_bits) if spec.rounding == "stochastic" else None


class Average(Toy):
    name: ClassVar[str] = "average"
    weight: ClassVar[float] = 1.5
    conflicts: ClassVar[frozenset[str]] = frozenset({"ramp"})

    beta: float = Field(0.998, gt=0, lt=1)


class Ramp(Toy):
    name: ClassVar[str] = "ramp"
    weight: ClassVar[float] = 3.0

    steps_: int = Field(alias="steps")


class Echo(Toy):
    name: ClassVar[str] = "echo"
    requires: ClassVar[frozenset[str]] = frozenset({"dither"})


class Mutable(Toy):
    """Breaks the contract: its option cannot be hashed."""

    name: ClassVar[str] = "mutable"

    items: list[int] = Field(default_factory=list)


@pytest.fixture(scope="session")
def registry() -> Registry:
    formats = [
        ElementFormat("e1m2", exponent_bits=1, mantissa_bits=2, bias=1, max=3.5),
        ScaleFormat("ue4m2", exponent_bits=4, mantissa_bits=2, bias=7, max=448.0),
    ]
    toys = offering(techniques=[Dither, Average, Ramp, Echo, Mutable], formats=formats)
    registry = Registry(plugins=[("toys", toys)], entry_point_group=None)
    assert not registry.failures
    return registry
