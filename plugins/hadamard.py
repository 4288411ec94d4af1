"""Block Hadamard rotation of both operands of a GEMM: spreads outliers over their block, cancels in the product."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import field_validator

from fp4graph.hookspecs import hookimpl
from fp4graph.numerics.hadamard import rotate, unrotate
from fp4graph.numerics.noise import hash_bits
from fp4graph.operands import Gemm
from fp4graph.site import SiteView
from fp4graph.technique import Context, Overhead, Technique


class Hadamard(Technique):
    """X·S·H on both operands of a GEMM along its contraction axis, in blocks of g: (X·S·H)(W·S·H)ᵀ = X·Wᵀ.

    H is the orthonormal Sylvester-Hadamard matrix of size g, S a diagonal of random signs (``kind: random``, Tseng et
    al. 2025: Q(HSX)) or the identity (``kind: deterministic``, "Pretraining LLMs with MXFP4 on native FP4 hardware").
    ``scope``: ``all``, ``backward`` (dgrad and wgrad) or a list of GEMMs. ``block``: g, a power of two; axes that it
    does not divide are zero-padded in both operands, which leaves the product alone. Random signs are drawn anew at
    every forward, the same for all blocks of a GEMM.

    Stage: pair transform, in fp32. Costs a g-point butterfly per element. Use it where blocks hold outliers.
    """

    name: ClassVar[str] = "hadamard"
    overhead: ClassVar[Overhead] = Overhead("O(n log l)", "O(1)", fusable=True)

    scope: Literal["all", "backward"] | tuple[Gemm, ...] = "all"
    block: int = 32
    kind: Literal["deterministic", "random"] = "random"
    resample: Literal["step", "never"] = "step"

    @field_validator("block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 2 or value & (value - 1):
            raise ValueError(f"a Hadamard block is a power of two, at least 2; got {value}")
        return value

    @property
    def complexity(self) -> float:
        """1.0 (design-space paper, Table 9)."""
        return 1.0

    @property
    def draws(self) -> bool:
        return self.kind == "random"

    def pairs(self, site: SiteView) -> frozenset[Gemm]:
        """The GEMMs of ``scope``."""
        if isinstance(self.scope, str):
            return frozenset(Gemm) if self.scope == "all" else frozenset((Gemm.DGRAD, Gemm.WGRAD))
        return frozenset(self.scope)

    def pair_context(self, left: torch.Tensor, right: torch.Tensor, context: Context) -> tuple[torch.Tensor, ...]:
        """The signs, fp32 ``[g]``."""
        if self.kind == "deterministic":
            return ()
        noise = context.noise if self.resample == "step" else context.constant
        if noise.key is None:
            raise ValueError("random signs need a key")
        bits = hash_bits(noise.key, torch.arange(self.block, dtype=torch.int32, device=left.device))
        return (1.0 - 2.0 * (bits & 1).to(torch.float32),)

    def transform(
        self, x: torch.Tensor, side: Literal["left", "right"], shared: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """x·S·H, fp32: 1/√g is not exact in shorter dtypes."""
        return rotate(x.to(torch.float32), self.block, shared[0] if shared else None)

    def inverse(
        self, x: torch.Tensor, side: Literal["left", "right"], shared: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """x·H·S, fp32, still padded."""
        return unrotate(x.to(torch.float32), self.block, shared[0] if shared else None)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [Hadamard]
