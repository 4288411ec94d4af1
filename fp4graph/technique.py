"""What a technique is: one class whose fields are its options and whose methods are the stages it acts at.

A technique is frozen data (a pydantic model), so that equal options mean equal compiled code. Planning methods see
the site; tensor methods see tensors only and must be pure functions of them, because one compiled operand program
serves every site of the same plan. A class overrides the stages it needs and inherits the identity for the rest.
docs/techniques.md says which technique uses which stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from fp4graph.operands import Gemm, Operand
from fp4graph.site import SiteView

if TYPE_CHECKING:
    import torch

    from fp4graph.numerics.noise import Noise
    from fp4graph.numerics.spec import QuantSpec
    from fp4graph.ops.program import Quantization
    from fp4graph.training.optimizer import WeightUpdate

#: Specs of one site's six operands; None is high precision.
OperandSpecs = Mapping[Operand, "QuantSpec | None"]


@dataclass(frozen=True)
class Overhead:
    """A row of "Elucidating the design space of FP4 training", Table 2: the cost on a tensor of n elements, block l."""

    compute: str
    memory: str
    fusable: bool


@dataclass(frozen=True)
class StateEntry:
    """A tensor that a technique keeps for each weight it acts on, as a buffer ``<owner>._fp4graph.<name>``.

    Attributes:
        name: of the buffer, after the technique's name.
        operand: whose stages receive it.
        init: makes the first value from the weight (shape of the weight); called again when a plain checkpoint
            without the entry is loaded.
        writer: who changes it: the ``optimizer``'s step, or the ``backward`` pass.
    """

    name: str
    operand: Operand
    init: Callable[[torch.Tensor], torch.Tensor]
    writer: Literal["optimizer", "backward"] = "optimizer"


class Technique(BaseModel):
    """Base of every technique; subclass it, set ``name`` and ``overhead``, declare options as fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    name: ClassVar[str]
    #: Row of the paper's Table 2, shown by ``fp4graph techniques``.
    overhead: ClassVar[Overhead]
    #: Names of techniques that cannot share a site with this one, and of those it cannot do without.
    conflicts: ClassVar[frozenset[str]] = frozenset()
    requires: ClassVar[frozenset[str]] = frozenset()
    #: Whether training needs torch's dynamic loss scaling (``fp4graph.grad_scaler``).
    scales_loss: ClassVar[bool] = False

    # ------------------------------------------------------------------ accounting

    @property
    def complexity(self) -> float:
        """The weight added to a policy's Ω (paper Table 9); may depend on the options."""
        raise NotImplementedError(f"{type(self).__name__} declares no complexity")

    @classmethod
    def implied_by(cls, spec: QuantSpec) -> Technique | None:
        """The technique with the options that ``spec`` amounts to when a policy spells it as a spec, or None.

        Keeps Ω the same however the policy is written: ``rounding: stochastic`` costs what the technique costs.
        """
        return None

    # ------------------------------------------------------------------ planning

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        """Choose or change the specs of a site's operands. Raise ValueError where the options do not fit the site."""
        return specs

    def acts_on(self, site: SiteView) -> frozenset[Operand]:
        """The operands whose tensor stages (split ... after, gradient_factor) this technique takes part in."""
        return frozenset()

    def pairs(self, site: SiteView) -> frozenset[Gemm]:
        """The GEMMs whose two operands this technique transforms together."""
        return frozenset()

    def state(self, site: SiteView) -> tuple[StateEntry, ...]:
        """What is kept for the weight of ``site``."""
        return ()

    @property
    def draws(self) -> bool:
        """Whether a tensor stage of this technique uses ``noise``."""
        return False

    # ------------------------------------------------------------------ pair transform

    def pair_context(self, left: torch.Tensor, right: torch.Tensor, noise: Noise) -> tuple[torch.Tensor, ...]:
        """Tensors both operands of a GEMM share (random signs, channel scales). ``left``, ``right``: ``[..., K]``."""
        return ()

    def transform(
        self, x: torch.Tensor, side: Literal["left", "right"], context: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """One operand in the new basis, contraction axis last: ``transform(l) @ transform(r)ᵀ = l @ rᵀ``."""
        return x

    def inverse(
        self, x: torch.Tensor, side: Literal["left", "right"], context: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Undo :meth:`transform` on one operand, contraction axis last."""
        return x

    # ------------------------------------------------------------------ one operand

    def split(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``x`` as (part to quantize, residual kept in high precision or None), multiplied apart and summed."""
        return x, None

    def statistic(self, values: torch.Tensor, axes: tuple[int, ...], z: torch.Tensor) -> torch.Tensor:
        """The block statistic Z, fp32, shape of ``z`` (kept axes of size 1), ``z`` being the one chosen so far."""
        return z

    def normalizer(self, z: torch.Tensor, spec: QuantSpec) -> torch.Tensor | None:
        """γ, fp32, broadcastable to ``z``: the operand is quantized as γ·f(x/γ). None is 1."""
        return None

    def scale(self, z: torch.Tensor, spec: QuantSpec, noise: Noise) -> torch.Tensor | None:
        """Decode scale S per block, fp32, shape of ``z``; None leaves it to the spec."""
        return None

    def round(
        self, ratio: torch.Tensor, scale: torch.Tensor, spec: QuantSpec, noise: Noise, state: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Element rounding: values of the element format for ``ratio = x/S``; None leaves it to the spec.

        ``ratio``, and every tensor of ``state``, are fp32 in the blocked layout; ``scale`` broadcasts against them.
        """
        return None

    def around(self, quantize: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Wrap the composed quantizer: call ``quantize`` on tensors of the shape of ``x`` as often as needed."""
        return quantize(x)

    def after(self, x: torch.Tensor, noise: Noise) -> torch.Tensor:
        """Change the dequantized operand, shape and dtype of ``x``."""
        return x

    def gradient_factor(self, quantization: Quantization) -> torch.Tensor | None:
        """Diagonal of the Jacobian of the fprop quantizer, shape of the operand, in its transformed basis."""
        return None

    # ------------------------------------------------------------------ optimizer

    def before_step(self, update: WeightUpdate) -> None:
        """Runs before ``optimizer.step()`` for each weight this technique keeps state for (or acts on)."""

    def after_step(self, update: WeightUpdate) -> None:
        """Runs after ``optimizer.step()``, likewise."""


def overrides(technique: Technique, stage: str) -> bool:
    """Whether ``technique`` acts at ``stage``, i.e. replaces the method of that name."""
    return getattr(type(technique), stage) is not getattr(Technique, stage)
