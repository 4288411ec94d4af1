"""OutControl: multiplies the input channels with the largest activations in a wider format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, field_validator

from fp4graph import Context, Error, Gemm, Operand, Overhead, StateEntry, Technique, hookimpl
from fp4graph.numerics import exact
from fp4graph.numerics.formats import ELEMENTS
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.technique import (
    ChannelSplit,
    OperandSpecs,
    OptimizerHook,
    Part,
    Partition,
    Quantization,
    SiteView,
    WeightUpdate,
    acts_at,
    gemms_at,
    operands_at,
)

if TYPE_CHECKING:
    from torch import Tensor

#: The operands whose chosen channels have another quantizer. In dgrad all channels have the same.
_APART = (Operand.FPROP_INPUT, Operand.FPROP_WEIGHT, Operand.WGRAD_GRAD_OUTPUT, Operand.WGRAD_INPUT)
_RECENT = f"{Operand.FPROP_INPUT.replace('.', '_')}_recent"  # the entry as the optimizer's stages know it
_MOST_TOKENS = 1 << 24


class OutControl(Technique):
    """Multiplies a share of a linear layer's input channels, those with the largest activations, in MXFP8.

    The modes are phases of a policy. ``wait`` computes nothing; it gives checkpoints of all phases the same keys. In
    ``measure`` every call of the layer with gradients adds over its tokens t, for each input channel k,

        s_k ← s_k + √(Σ_t X_tk²),

    but nothing for a channel with NaN or Inf; each step of the optimizer adds up the sums of all ranks. End the phase
    at a step: sums measured after its last step are lost. In ``split`` C are the channels with the largest s and R the
    others, both in falling order of s. X and W are gathered, and

        Y = Q(X_R)·Q(W_R)ᵀ + M(X_C)·M(W_C)ᵀ,   dW_R = Q(dYᵀ)·Q(X_R),   dW_C = M(dYᵀ)·M(X_C),

    with Q the site's quantizers and techniques and M ``element`` in blocks of ``block`` under E8M0 scales, amax/Qmax
    rounded up, to nearest, and not rotated. dX is one product with all channels in the layer's order, under the site's
    quantizers. An operand with ``source: fprop`` reads Q(·) or M(·), as fprop multiplied it. The number of channels in
    C is ``channels``·K to the nearest whole number, rounded up to a multiple of ``multiple``, and at least
    ``multiple``. Frozen weights, which no step changes, are refused if other weights train beside them.

    Source: Chen et al. 2025, "TetraJet-v2: Accurate NVFP4 Training for Large Language Models with Oscillation
    Suppression and Outlier Control" (a tenth of the channels), and the authors' code, which takes whole 128s
    (``multiple: 128``) and measures for 50 steps from step 501 on.

    Stages: partition, state, observe, optimizer after the step.

    Cost: a gather of X and W and a scatter of dW; GEMMs take as many FLOPs as before, a share of them in FP8. Measuring
    takes a pass over X. The complexity weight is ours: 1.5, the middle of what Table 2's rules give for unfusable work
    with O(1) memory.

    Use it where a few channels of the activations hold outliers for the whole training, as in language models.
    """

    name: ClassVar[str] = "out_control"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=False)
    complexity: ClassVar[float] = 1.5

    mode: Literal["wait", "measure", "split"] = Field(
        description="Whether channels are left alone, measured, or multiplied separately."
    )
    channels: float = Field(0.1, gt=0, lt=1, description="Share of the input channels that is multiplied separately.")
    multiple: int = Field(1, ge=1, description="The number of channels is rounded up to whole multiples of this.")
    element: str = Field("e4m3", description="Element format of the chosen channels.")
    block: int = Field(32, ge=1, description="Elements that share a scale in the chosen channels.")

    @field_validator("element")
    @classmethod
    def _exists(cls, value: str) -> str:
        if value not in ELEMENTS:
            raise ValueError(f"unknown element format {value!r}; choose from {', '.join(ELEMENTS)}")
        return value

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse rules in which the channels of fprop are not those of X."""
        for name, technique in techniques.items():
            if Gemm.FPROP in gemms_at(technique):
                raise ValueError(
                    f"{name} transforms the operands of fprop, whose channels are then no longer those of X; take "
                    f"fprop out of the scope of {name}, or drop one of the two"
                )
            if acts_at(technique, "split") and Operand.FPROP_INPUT in operands_at(technique):
                raise ValueError(f"{name} takes outliers out of X before they are measured; drop one of the two")

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Return a reason if an operand of fprop is not quantized: then no channels are chosen."""
        kept = [operand for operand in Gemm.FPROP.operands if specs.get(operand) is None]
        return f"{kept[0]} stays in high precision" if kept else None

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        """Refuse products of two activations, and layers with too few channels to split."""
        if not site.multiplies_weight:
            raise ValueError(
                f"it chooses input channels of linear layers, and this product ({site.op}) has no weight; give it to "
                "rules with op: linear only"
            )
        if site.in_features is not None:
            self.count(site.in_features)
        return specs

    def count(self, channels: int) -> int:
        """Return k, the number of ``channels`` input channels that are chosen; raise ValueError if no other is left."""
        wanted = max(1, round(self.channels * channels))
        count = -(-wanted // self.multiple) * self.multiple
        if count >= channels:
            raise ValueError(
                f"of {channels} input channels {count} would be chosen, in whole multiples of {self.multiple}; lower "
                "channels or multiple, or keep the layer by a rule"
            )
        return count

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        measures, channels = self.mode == "measure" and site.multiplies_weight, site.in_features
        operands = frozenset({Operand.FPROP_INPUT} if measures else ())
        state: tuple[StateEntry, ...] = ()
        if channels is not None:  # s, the same on all ranks, and the sums of this rank since the last step; fp32 [K]
            norms = StateEntry("norms", Operand.FPROP_WEIGHT, _Zeros(channels), weight_like=False)
            recent = StateEntry("recent", Operand.FPROP_INPUT, _Zeros(channels), weight_like=False)
            state = norms, replace(recent, writer="graph") if self.mode == "measure" else recent
        split = SplitChannels(options=self, channels=channels, state=state)
        hook = SumOverRanks(options=self, operands=operands)
        return (split, MeasureChannels(options=self, operands=operands), hook) if measures else (split, hook)


class SplitChannels(ChannelSplit):
    """Chooses the channels with the largest norms."""

    options: OutControl
    channels: int | None  # K, if it is known

    def partition(self, specs: OperandSpecs) -> Partition | None:
        """Return the chosen channels and their quantizers."""
        options = self.options
        if options.mode != "split" or self.channels is None or options.inert(specs, {}) is not None:
            return None
        plain = QuantSpec(element=ELEMENTS[options.element], block=options.block, scale=ScaleSpec("e8m0", "ceil"))  # type: ignore[arg-type]
        quantized = {operand: spec for operand in _APART if (spec := specs.get(operand)) is not None}
        apart = tuple((operand, replace(plain, source=spec.source)) for operand, spec in quantized.items())
        return Partition("norms", options.count(self.channels), apart)


class MeasureChannels(Part):
    """Sums the norms of the input's channels."""

    mixes = "tensor"
    options: OutControl

    def observe(self, quantization: Quantization, context: Context) -> dict[str, Tensor]:
        """Return the sums since the last step plus the norms of this call, bit for bit alike under compilers."""
        scales = quantization.group_scales
        values = quantization.blocking.join(scales[0].values() if scales else quantization.values)
        x = values.flatten(0, -2).abs()
        if x.shape[0] == 0:
            return {"recent": context.state["recent"].clone()}
        largest = x.amax(0)
        share = (x / torch.where(largest == 0, 1.0, largest)).to(torch.float64)
        norm = largest * exact.root(exact.total(share * share, (0,), _MOST_TOKENS)[0].to(torch.float32))
        return {"recent": context.state["recent"] + torch.where(norm.isfinite(), norm, 0.0)}


class SumOverRanks(OptimizerHook):
    """Adds the sums of all ranks to s."""

    options: OutControl

    def after_step(self, update: WeightUpdate) -> None:
        """Add the sums of all ranks; refuse to split channels that were never measured."""
        norms, recent = update.state.get("norms"), update.state.get(_RECENT)
        if norms is None or recent is None:  # an operand of fprop is not quantized
            return
        if self.options.mode == "measure":
            norms += update.over_ranks(recent)
            recent.zero_()
        elif self.options.mode == "split" and "measured" not in update.memory:
            if not bool((norms > 0).any()):  # checked once, because it waits for the device
                raise Error(
                    f"out_control splits the input channels of {update.name}, and none were measured: no step of the "
                    "optimizer fell into a phase with mode: measure. Put such a phase before, for at least a step and "
                    "its forwards, or load a checkpoint that holds the norms"
                )
            update.memory["measured"] = torch.ones((), dtype=torch.bool)


@dataclass(frozen=True)
class _Zeros:
    """Makes one zero for each of ``count`` input channels, however the weight is stored."""

    count: int

    def __call__(self, weight: Tensor) -> Tensor:
        return torch.zeros(self.count, dtype=torch.float32, device=weight.device)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [OutControl]
