"""Element choice: each block takes the element format, such as E2M1 or INT4, with the smaller error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from pydantic import Field, field_validator

from fp4graph import Overhead, Technique, hookimpl
from fp4graph.numerics.formats import ElementFormat, element_format
from fp4graph.numerics.spec import QuantSpec, Selector
from fp4graph.technique import Operands, OperandSpecs, SiteView


class ElementChoice(Technique):
    """Each block chooses between the spec's element format and ``others``, by the error of rounding to nearest.

    The scale S of a block is the scale of the first format, whose largest value is Q_0. Format k, whose largest value
    is Q_k, is stretched to the same maximum: u = x/S rounds to x̂_k = round_k(u·Q_k/Q_0)·Q_0/Q_k. A block takes the
    format with the least error Σ(x̂_k − u)² (``mse``), Σabs(x̂_k − u) (``mae``) or max abs(x̂_k − u) (``amax``); of
    formats with equal errors it takes the first. Beside E2M1, INT4 has the values 6/7·{0, ±1, ..., ±7}, whose steps are
    all narrower than the step of E2M1 from 4 to 6. Blocks that round stochastically also choose by rounding to nearest.
    The mean of their values is then x; choosing the draw with the smaller error would shift the mean.

    A quantize block with ``element: [e2m1, int4]`` and ``selector: mse`` does the same.

    Source: Cook et al. 2026, "Adaptive Block-Scaled Data Types" (IF4, arXiv 2603.28765; we read the abstract), and the
    authors' code, which offers the same three measures of error. If their code rounds stochastically, it chooses by the
    drawn values.
    IF4 stores the choice in the sign bit of the E4M3 scale, so that the choice takes no memory.

    Stage: plan.

    Cost: every block is rounded once for each format. The complexity weight is ours: 0.5, by Table 2 of the
    design-space paper for fusable O(n) work, because a block and its errors stay in registers. No hardware multiplies
    such blocks yet, and they cannot be packed or exported. On a CPU one operator rounds and chooses between two
    formats; tensor code computes the block scales.

    Use it with scales that have mantissa bits, instead of ``four_over_six``.
    """

    name: ClassVar[str] = "element_choice"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5

    others: tuple[str, ...] = Field(("int4",), min_length=1, description="Formats to choose from beside the spec's.")
    selector: Selector = Field("mse", description="Error by which a block chooses.")
    operands: Operands = Field(("forward", "backward"), description="Operands, or groups of them, whose blocks choose.")

    @field_validator("others")
    @classmethod
    def _exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            element_format(name)
        return names

    @classmethod
    def implied_by(cls, spec: QuantSpec) -> ElementChoice | None:
        """Return the technique of a spec with several elements."""
        if not spec.others:
            return None
        assert spec.selector is not None
        return cls.model_construct(others=tuple(each.name for each in spec.others), selector=spec.selector)

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Return a reason if blocks have only one element format to choose from."""
        listed = self.specs_listed(specs).values()
        if not listed or any(spec.others for spec in listed):
            return None
        names = " and ".join(sorted({spec.element_name for spec in listed}))
        return f"option others lists no format beside {names}, so that no block has a choice"

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        """Let the blocks of all listed and quantized operands choose.

        Raises:
            ValueError: the spec of an operand lists elements and has another selector.
        """
        others = tuple(map(element_format, self.others))
        for operand, spec in self.specs_listed(specs).items():
            if spec.others and spec.selector != self.selector:
                raise ValueError(
                    f"its selector is {self.selector}, but the quantize block of {operand} lists elements and has "
                    f"selector {spec.selector}; write the same selector in both places"
                )
        return {**specs} | {
            operand: replace(spec, others=united, selector=self.selector)
            for operand, spec in self.specs_listed(specs).items()
            if (united := _united(spec, others))
        }


def _united(spec: QuantSpec, others: tuple[ElementFormat, ...]) -> tuple[ElementFormat, ...]:
    """Return the other formats of ``spec``, then the formats of ``others`` that ``spec`` does not have."""
    return (*spec.others, *(each for each in others if each not in spec.elements))


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [ElementChoice]
