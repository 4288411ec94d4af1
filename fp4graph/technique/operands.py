"""The six quantizer positions of a site, and the addresses by which a policy names them.

A site is one matrix product ``Y = A @ B`` with ``A [..., M, K]`` (the *input*) and ``B [..., K, N]`` (the
*weight*, or the *other* activation). Training it takes three GEMMs, each with two operands::

    fprop   Y  = A  @ B      A blocked along K (1),  B blocked along K (2)
    dgrad   dA = dY @ Bᵀ     dY blocked along N (3), B blocked along N (4)
    wgrad   dB = Aᵀ @ dY     dY blocked along M (5), A blocked along M (6)

Numbering: Q1 to Q6 of TetraJet (Chen et al. 2025, Eq. 3-5). Blocks run along the contraction axis of their GEMM.
"""

from __future__ import annotations

from enum import StrEnum


class Gemm(StrEnum):
    """One of the three matrix products of a site."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """The left and the right operand."""
        left, right = GROUPS[self.value]
        return left, right


class Operand(StrEnum):
    """One of the six quantizer positions, in TetraJet's order Q1 to Q6."""

    FPROP_INPUT = "fprop.input"
    FPROP_WEIGHT = "fprop.weight"
    DGRAD_GRAD_OUTPUT = "dgrad.grad_output"
    DGRAD_WEIGHT = "dgrad.weight"
    WGRAD_GRAD_OUTPUT = "wgrad.grad_output"
    WGRAD_INPUT = "wgrad.input"

    @property
    def gemm(self) -> Gemm:
        """The GEMM this operand belongs to."""
        return Gemm(self.value.split(".")[0])

    @property
    def fprop(self) -> Operand | None:
        """The fprop operand that holds the same tensor and that ``source: fprop`` reads; None for gradients."""
        return {Operand.DGRAD_WEIGHT: Operand.FPROP_WEIGHT, Operand.WGRAD_INPUT: Operand.FPROP_INPUT}.get(self)


#: Named groups of operands.
GROUPS: dict[str, tuple[Operand, ...]] = {
    **{gemm.value: tuple(o for o in Operand if o.gemm is gemm) for gemm in Gemm},
    "forward": (Operand.FPROP_INPUT, Operand.FPROP_WEIGHT),
    "backward": tuple(o for o in Operand if o.gemm is not Gemm.FPROP),
    "inputs": (Operand.FPROP_INPUT, Operand.WGRAD_INPUT),
    "weights": (Operand.FPROP_WEIGHT, Operand.DGRAD_WEIGHT),
    "gradients": (Operand.DGRAD_GRAD_OUTPUT, Operand.WGRAD_GRAD_OUTPUT),
}
#: Everything by which a policy may address operands: groups, and single operands under both names of the second factor
#: (a product of two activations calls it ``other``, a product with a parameter ``weight``).
ADDRESSES: dict[str, tuple[Operand, ...]] = {
    **GROUPS,
    **{operand.value: (operand,) for operand in Operand},
    "fprop.other": (Operand.FPROP_WEIGHT,),
    "dgrad.other": (Operand.DGRAD_WEIGHT,),
}
