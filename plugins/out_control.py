"""OutControl: multiplies the input channels with the largest activations in a wider format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from fp4graph import Context, Error, Gemm, Operand, Overhead, QuantSpec, ScaleSpec, StateEntry, Technique, hookimpl
from fp4graph.numerics import exact, initial
from fp4graph.policy import checks
from fp4graph.technique import (
    ChannelSplit,
    OperandSpecs,
    OptimizerHook,
    Part,
    Partition,
    Quantization,
    SiteView,
    WeightUpdate,
)


class OutControl(Technique):
    """Multiplies a share of a linear layer's input channels, those with the largest activations, in MXFP8.

    The modes are phases of a policy. ``wait`` only gives checkpoints of all phases the same keys. In ``measure`` every
    call with gradients adds √(Σ_t X_tk²), if finite, over its tokens t to the s_k of each input channel k; each step of
    the optimizer adds up the sums of all ranks. End the phase at a step: later sums are lost. In ``split`` C are the
    channels with the largest s and R the others, gathered in falling order of s:

        Y = Q(X_R)·Q(W_R)ᵀ + M(X_C)·M(W_C)ᵀ,   dW_R = Q(dYᵀ)·Q(X_R),   dW_C = M(dYᵀ)·M(X_C),

    where Q are the site's quantizers and techniques. M rounds to ``element``, to nearest and not rotated, in blocks of
    ``block`` under E8M0 scales, which are amax/Qmax rounded up. dX is one product of all channels in the layer's order,
    under the site's quantizers. An operand with ``source: fprop`` reads Q(·) or M(·), as fprop multiplied it. The size
    of C is ``channels``·K, rounded to nearest, at least one, and then up to a multiple of ``multiple``. Frozen weights,
    which no step changes, are refused if other weights train beside them.

    Source: Chen et al. 2025, "TetraJet-v2: Accurate NVFP4 Training for Large Language Models with Oscillation
    Suppression and Outlier Control" (10 % of channels), and their code (``multiple: 128``, measures steps 501 to 550).

    Stages: partition, state, observe, optimizer after the step.

    Cost: a gather of X and W, a scatter of dW, and a pass over X while measuring; FLOPs stay, but a share is in FP8.
    The complexity weight is ours: 1.5, by Table 2 of the design-space paper for unfusable work with O(1) memory.

    Use it where a few channels of the activations hold outliers for the whole training, as in language models.
    """

    name: ClassVar[str] = "out_control"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=False)
    complexity: ClassVar[float] = 1.5

    mode: Literal["wait", "measure", "split"] = Field(description="Do nothing, measure channels, or split them.")
    channels: float = Field(0.1, gt=0, lt=1, description="Share of the input channels that is multiplied separately.")
    multiple: int = Field(1, ge=1, description="The number of chosen channels is rounded up to a multiple of this.")
    element: checks.ElementName = Field("e4m3", description="Element format of the chosen channels.")
    block: int = Field(32, ge=1, description="Elements that share a scale in the chosen channels.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse rules in which the channels of the fprop operands are not the channels of X."""
        checks.refuse_transforms(techniques, "its channels are no longer the channels of X")
        checks.refuse_wrappers(techniques, "split", {Operand.FPROP_INPUT}, "takes outliers out of X, unmeasured")

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Return a reason if an operand of fprop is not quantized: then no channels are chosen."""
        return next((f"{o} stays in high precision" for o in Gemm.FPROP.operands if specs.get(o) is None), None)

    def plan(self, site: SiteView, specs: OperandSpecs) -> None:
        """Refuse products of two activations, and layers with too few channels to split."""
        if not site.multiplies_weight:
            raise ValueError(f"this product ({site.op}) has no weight; give it to rules with op: linear only")
        if site.in_features is not None:
            self.count(site.in_features)

    def count(self, channels: int) -> int:
        """Return k, how many of ``channels`` input channels are chosen; raise ValueError if none is left."""
        if (k := -(-max(1, round(self.channels * channels)) // self.multiple) * self.multiple) >= channels:
            advice = f"lower channels or multiple ({self.multiple}), or keep the layer by a rule"
            raise ValueError(f"of {channels} input channels {k} would be chosen; {advice}")
        return k

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        channels, measures = site.in_features or 0, self.mode == "measure"
        zeros = initial.Constant((channels,))  # recent: the sums of this rank since the last step
        norms = StateEntry("norms", Operand.FPROP_WEIGHT, zeros, weight_like=False)  # s, equal on all ranks
        recent = StateEntry("recent", Operand.FPROP_INPUT, zeros, "graph" if measures else "optimizer", False)
        split = SplitChannels(options=self, channels=channels, state=(norms, recent))
        acting = frozenset({Operand.FPROP_INPUT} if measures and site.multiplies_weight else ())
        measure = (MeasureChannels(options=self, operands=acting),) if acting else ()
        return split, *measure, SumOverRanks(options=self, operands=acting)


class SplitChannels(ChannelSplit):
    """Chooses the channels with the largest norms."""

    options: OutControl
    channels: int  # K, or 0 if it is not known

    def partition(self, specs: OperandSpecs) -> Partition | None:
        """Return the chosen channels and their quantizers."""
        options = self.options
        if options.mode != "split" or not self.channels or options.inert(specs, {}) is not None:
            return None
        plain = QuantSpec(element=options.element, block=options.block, scale=ScaleSpec("e8m0", "ceil"))  # type: ignore[arg-type]
        operands = (*Gemm.FPROP.operands, *Gemm.WGRAD.operands)  # dgrad multiplies all channels under Q
        apart = tuple((o, replace(plain, source=spec.source)) for o in operands if (spec := specs.get(o)) is not None)
        return Partition("norms", options.count(self.channels), apart)


class MeasureChannels(Part):
    """Sums the norms of the input's channels."""

    mixes = "tensor"

    def observe(self, quantization: Quantization, context: Context) -> dict[str, torch.Tensor]:
        """Return the sums since the last step plus the norms of this call, with the same bits under every compiler."""
        norms = exact.column_norms(quantization.blocking.join(quantization.undivided).flatten(0, -2))
        return {"recent": context.state["recent"] + torch.where(norms.isfinite(), norms, 0.0)}


class SumOverRanks(OptimizerHook):
    """Adds the sums of all ranks to s."""

    reads_quantized = False

    def after_step(self, update: WeightUpdate) -> None:
        """Add the sums of all ranks to s; raise an Error if channels are split that were never measured."""
        norms, recent = update.state.get("norms"), update.state.get("fprop_input_recent")
        if norms is None or recent is None:  # an operand of fprop is not quantized
            return
        if self.options.mode == "measure":
            norms += update.over_ranks(recent)
            recent.zero_()
        elif self.options.mode == "split" and "measured" not in update.memory:
            if not bool((norms > 0).any()):  # checked once, because it waits for the device
                raise Error(
                    f"out_control splits the input channels of {update.name}, which were never measured. Put a phase "
                    "with mode: measure before, for at least a step and its forwards, or load a checkpoint with norms"
                )
            update.memory["measured"] = torch.ones((), dtype=torch.bool)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [OutControl]
