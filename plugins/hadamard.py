"""Block Hadamard rotation: rotates both operands of a GEMM, which spreads outliers and cancels in the product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator

from fp4graph import Context, Gemm, Overhead, Technique, hookimpl
from fp4graph.kernels import rotation
from fp4graph.numerics.blocking import block_length
from fp4graph.technique import OperandSpecs, PairTransform, Part, SiteView

if TYPE_CHECKING:
    from torch import Tensor


class Hadamard(Technique):
    """Rotates both operands of a GEMM along its contraction axis, which cancels: (A·S·H)(B·S·H)ᵀ = A·Bᵀ.

    A is [I, K] and B is [J, K]. H is block-diagonal; each block is the orthonormal Sylvester-Hadamard matrix of size g
    with the entries (-1)^popcount(i & j)/√g. S is a diagonal of g random signs, the same in every block and in both
    operands (``kind: random``), or the identity (``deterministic``); ``random_backward`` draws signs in dgrad and
    wgrad, but not in fprop. Each value of a block becomes the sum of all g values times ±1/√g, so that outliers are
    spread and the values become nearly Gaussian. Signs precede H, because after H they would change no magnitude. Axes
    that g does not divide are zero-padded in both operands. If g is a power of four, 1/√g is a power of two, and the
    rotations cancel exactly where their sums are exact; otherwise they cancel up to rounding.

    Source: "Elucidating the design space of FP4 training", sec. 3.1 and Table 9 (g is the length of the scales' blocks;
    random; all GEMMs or backward); Tseng et al. 2025, "Training LLMs with MXFP4" (random, g = 64, backward);
    NVIDIA 2025, "Pretraining LLMs with NVFP4" (random, g = 16, wgrad); "Pretraining LLMs with MXFP4 on native FP4
    hardware" (deterministic); Castro et al. 2025, "Quartet" (random_backward; their code applies signs after H, which
    is not offered).

    Stage: pair transform, in fp32. An operand with ``source: fprop`` reads the fprop operand after the rotation is
    undone, and surrogate gradients act in the rotated basis.

    Cost: a product with a g×g matrix per block on both operands. Two GEMMs that read one tensor can no longer share its
    quantization. The complexity weight is from Table 9 of the design-space paper.

    Use it where blocks hold outliers: E8M0 scales in blocks of 32, gradients, activations of large models. 2-D blocks
    profit less, because H mixes one axis only.
    """

    name: ClassVar[str] = "hadamard"
    overhead: ClassVar[Overhead] = Overhead("O(n log l)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 1.0

    scope: Literal["all", "backward"] | tuple[Gemm, ...] = Field(
        "all", description="The GEMMs whose operands are rotated: all, dgrad and wgrad (backward), or a list of GEMMs."
    )
    block: int = Field(32, description="g, a power of two; a divisor or a multiple of the scales' block length.")
    kind: Literal["deterministic", "random", "random_backward"] = Field(
        "random", description="Whether random signs precede H: in no GEMM, in every GEMM, or only in dgrad and wgrad."
    )
    resample: Literal["step", "never"] = Field(
        "step", description="When signs are drawn: anew at every training forward, or once."
    )

    @field_validator("block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 2 or value & (value - 1):
            raise ValueError(f"a Hadamard block is a power of two, at least 2; got {value}")
        return value

    @field_validator("scope")
    @classmethod
    def _scope_not_empty(cls, value: str | tuple[Gemm, ...]) -> str | tuple[Gemm, ...]:
        if not value:
            raise ValueError("scope is empty; leave it out for all GEMMs, or drop the technique")
        return value

    @model_validator(mode="after")
    def _signs_are_drawn(self) -> Hadamard:
        if self.kind == "random_backward" and not self.rotated - {Gemm.FPROP}:
            raise ValueError("kind: random_backward draws signs in dgrad and wgrad, and scope has neither; add one")
        if self.kind == "deterministic" and "resample" in self.model_fields_set:
            raise ValueError("kind: deterministic draws no signs; leave resample out")
        return self

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse Hadamard blocks unless they divide scale blocks or consist of whole ones; outliers would spread."""
        for operand, spec in specs.items():
            if spec is None or operand.gemm not in self.rotated or isinstance(spec.block, str):
                continue
            length = block_length(spec.block)
            if self.block % length and length % self.block:
                raise ValueError(
                    f"the Hadamard block {self.block} and the block of {operand}, {length} elements, do not divide one "
                    "another; make them equal, or one a multiple of the other"
                )

    @property
    def rotated(self) -> frozenset[Gemm]:
        """The GEMMs of ``scope``."""
        if isinstance(self.scope, str):
            return frozenset(Gemm) if self.scope == "all" else frozenset((Gemm.DGRAD, Gemm.WGRAD))
        return frozenset(self.scope)

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        draws = self.kind != "deterministic"
        return (BlockHadamard(options=self, gemms=self.rotated, block_rotation=self.block, draws=draws),)


class BlockHadamard(PairTransform):
    """Rotates both operands of a GEMM."""

    mixes = "none"
    options: Hadamard

    def pair_context(self, left: Tensor, right: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the signs, fp32 ``[g]``; an empty tuple if none are drawn."""
        options = self.options
        if options.kind == "deterministic" or (options.kind == "random_backward" and context.gemm is Gemm.FPROP):
            return ()
        bits = context.bits(options.block, constant=options.resample == "never")
        return (1.0 - 2.0 * (bits & 1).to(torch.float32),)

    def transform(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        """Return x·S·H in fp32, because 1/√g is not exact in narrower dtypes."""
        return rotation.rotate(x, self.options.block, shared[0] if shared else None)

    def inverse(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        """Return x·H·S in fp32, still padded."""
        return rotation.unrotate(x, self.options.block, shared[0] if shared else None)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [Hadamard]
