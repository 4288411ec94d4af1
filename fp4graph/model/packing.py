"""``fp4graph.pack_frozen``: frozen weights as FP4 bytes between forwards, and which weights that is sound for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyError
from fp4graph.kernels.request import Asked
from fp4graph.kernels.rows import TENSOR_CODE, of_spec
from fp4graph.model.distributed import unwrapped
from fp4graph.model.packed import Bytes, Layout, dtype_to_quantize, hold, release_all
from fp4graph.model.prepare import PhasePlan
from fp4graph.model.repacking import Packing
from fp4graph.model.runtime import Runtime, require_runtime, runtime_of
from fp4graph.model.weight import PlannedWeight, Weight
from fp4graph.numerics.packing import element_codes, scale_codes
from fp4graph.numerics.sharding import is_sharded
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import Terms
from fp4graph.technique import overrides
from fp4graph.technique.operands import Operand

M = TypeVar("M", bound=nn.Module)


def pack_frozen(model: M) -> M:
    """Keep frozen weights that the policy quantizes as FP4 bytes, and free their high-precision values.

    Every later forward and backward is, bit for bit, what it would be without packing. That is checked now for each
    weight, in the present phase of the policy and in every later one, before any weight is changed: the bytes must
    give the operands of fprop and dgrad that the weight itself gives. Each call of a module makes its weight from the
    bytes, and drops it afterwards.

    ``parameters()`` no longer lists a packed weight. So ``requires_grad_(True)`` does not reach it, and it stays frozen
    until :func:`unpack_frozen`; a PolicyWarning says so where other parameters were unfrozen. An optimizer made before
    packing holds the high-precision values on: make it afterwards, of the parameters that train. ``state_dict()`` has
    the weight under its own name, with the values that fprop multiplies with: it loads into a plain or an applied
    model, and into this one after :func:`unpack_frozen`.

    Under DDP call this before wrapping, after it, or on the wrapper; under FSDP2 before ``fully_shard``, which leaves
    the bytes whole on every rank.

    Under ``torch.autocast`` weights are quantized from autocast's dtype; call this in the context in which the model is
    called. A call in another context is an Error. Weights that require gradients, and weights that the policy keeps,
    stay as they are. Applying a policy again or removing it unpacks. Where adapters join or a phase begins, the same
    bytes are packed again; should the policy then ask other values of a weight, that call and every later one raise the
    same error.

    Args:
        model: applied. Where rules depend on what a graph shows, called once too.

    Returns:
        ``model`` itself.

    Raises:
        PolicyError: a frozen weight cannot be packed, because its bytes do not give what a phase of the policy computes
            from the weight; names weight, rule, file and line, and the remedy. The model is as it was.
        Error: the model is not applied, or is sharded.
    """
    runtime = require_runtime(model, "pack_frozen")
    due = [weight for weight in runtime.weights if weight.is_present and not weight.stored.requires_grad]
    later = [_Phase.of(runtime, index) for index in range(runtime.phase + 1, len(runtime.policy.phases) + 1)]
    packed = [(weight, made) for weight in due if (made := _packed(runtime, weight, later)) is not None]
    for weight, (layout, kept, programs) in packed:
        hold(weight.module, weight.parameter_name, weight.name, layout, kept, programs)
    if packed:
        runtime.plan.packed = True
        runtime.packing = Packing(p for p in runtime.root.parameters() if not p.requires_grad)
    return model


def unpack_frozen(model: M) -> M:
    """Give packed weights their place as parameters back, with the values that fprop multiplied with.

    The values before quantization are gone. Returns ``model``.
    """
    release_all(unwrapped(model))
    if (runtime := runtime_of(model)) is not None:
        runtime.packing, runtime.plan.packed = None, False
    return model


@dataclasses.dataclass(frozen=True)
class _Phase:
    """A later phase of the policy: when it begins, and its plan of the model."""

    at: int | float
    plan: PhasePlan

    @staticmethod
    def of(runtime: Runtime, index: int) -> _Phase:
        return _Phase(runtime.policy.phases[index - 1].at, runtime.plan_of(index))

    def choices(self, weight: Weight) -> tuple[PlannedWeight, ...]:
        """Return the possible decisions about ``weight`` in the phase."""
        for own in self.plan.weights:
            if own.module is weight.module and own.parameter_name == weight.parameter_name:
                return own.possible
        view, decision = self.plan.policy.decide_weight(weight.view)[0]
        return (PlannedWeight.of(view, decision.rule),)


@dataclasses.dataclass(frozen=True)
class _Case:
    """A weight under one decision about it.

    Attributes:
        where: of which phase the decision is, to begin a sentence with; empty for the present phase.
    """

    weight: Weight
    planned: PlannedWeight
    where: str = ""

    @property
    def program(self) -> MatmulProgram:
        assert self.planned.plan.program is not None
        return self.planned.plan.program

    def refusal(self, why: str, remedy: str) -> PolicyError:
        """Return the error that the weight cannot be packed."""
        named = f"{self.weight.name} cannot be packed: {self.where}{why}. {remedy[0].upper()}{remedy[1:]}"
        return self.planned.rule.error(named)


@torch.no_grad()
def _packed(
    runtime: Runtime, weight: Weight, later: Sequence[_Phase]
) -> tuple[Layout, Bytes, frozenset[MatmulProgram]] | None:
    """Return the bytes of a weight and the programs that they are right for; None where the policy keeps the weight in
    high precision in fprop."""
    if len(weight.choices) > 1:
        raise Error(f"which rule decides {weight.name} depends on the graph; call the model once before pack_frozen()")
    present = _Case(weight, weight.choices[0])
    if not _quantizes(present.planned):
        return None
    if is_sharded(weight.stored):
        raise Error(
            f"{weight.name} is sharded, and a rank cannot pack its part; call pack_frozen() before fully_shard, which "
            "then leaves the bytes of all frozen weights whole on every rank"
        )
    _require_own(runtime.root, present)
    _require_static(present)
    w = weight.stored.detach()
    w = w.mT if weight.stored_transposed else w
    dtype = dtype_to_quantize(w.device.type, w.dtype)
    layout, kept = _bytes(present, w, dtype)
    for own in (kept, _with_largest(kept, w)):
        again = dataclasses.replace(layout, transposed=False).weight(own)
        if _same(present.program.fprop.right, w, again, dtype) and _same_in_dgrad(present.program, w, again, dtype):
            break
    else:
        raise _differs(present, w, again, dtype)
    programs = {present.program}
    for phase in later:
        for planned in phase.choices(weight):
            case = _Case(weight, planned, f"in the phase that begins at {phase.at:g}, ")
            if not _quantizes(planned):
                raise case.refusal(
                    "this rule keeps it in high precision, whose values packing frees",
                    "quantize it in all phases as in this one, or drop the phase",
                )
            if case.program in programs:
                continue
            _require_static(case)
            same = _same(case.program.fprop.right, w, again, dtype)
            if not (same and _same_in_dgrad(case.program, w, again, dtype)):
                raise _differs(case, w, again, dtype)
            if case.program.fprop.right.from_master != present.program.fprop.right.from_master:
                raise case.refusal(
                    "it is quantized from another dtype under autocast", "let from_master be equal in all phases"
                )
            programs.add(case.program)
    return layout, own, frozenset(programs)


def _quantizes(planned: PlannedWeight) -> bool:
    program = planned.plan.program
    return program is not None and program.fprop.right.spec is not None


def _differs(case: _Case, w: Tensor, again: Tensor, dtype: torch.dtype) -> PolicyError:
    """Return the error that bytes, of the values ``again``, give other operands than ``w``."""
    program = case.program
    if program.dgrad.right.from_fprop or not _same(program.fprop.right, w, again, dtype):
        named = ", ".join(technique.name for technique in program.fprop.right.techniques) or "its quantizer"
        return case.refusal(
            f"{named} gives other values for what has been quantized already", "fine-tune under another policy"
        )
    read = "quantizes it from the original, along the other axis" if program.dgrad.right.spec else "reads the original"
    remedy = "let dgrad.weight be {source: fprop}, or quantize weights in square blocks"
    return case.refusal(f"dgrad {read}", remedy)


def _with_largest(kept: Bytes, w: Tensor) -> Bytes:
    """Return ``kept`` with the largest element as it was, from which γ is taken."""
    place = w.abs().flatten().argmax().reshape(1)
    return kept._replace(place=place, largest=w.flatten()[place].clone())


def _bytes(case: _Case, w: Tensor, dtype: torch.dtype) -> tuple[Layout, Bytes]:
    """Return the codes, scales and γ of ``w [N, K]``."""
    program = case.program.fprop.right
    spec = program.spec
    assert spec is not None
    if spec.others:
        named = ", ".join(element.name for element in spec.elements)
        raise case.refusal(
            f"each of its blocks has its own of the elements {named}, which bytes of FP4 do not say",
            "quantize weights with one element, or unfreeze the weight",
        )
    if not w.isfinite().all():
        raise case.refusal("it holds NaN or Inf", "load finite values, or keep the weight by a rule")
    length = spec.block[-1] if isinstance(spec.block, tuple) else spec.block
    if not isinstance(length, int) or spec.element.code_bits != 4 or w.shape[1] % length:
        raise case.refusal(
            f"{spec.element.name} in blocks of {spec.block} does not divide its {w.shape[1]} columns into bytes of FP4",
            "use 4-bit elements in blocks of a fixed length that divides them, or unfreeze the weight",
        )
    x = w if program.from_master else w.to(dtype)
    parts = program.quantize(x.to(torch.float32), None, {}, None)
    elements, scales = (parts.blocking.join(each.expand_as(parts.elements)) for each in (parts.elements, parts.scale))
    codes = element_codes(elements, spec.element)
    lines = dataclasses.replace(spec, block=length, rounding="nearest", source="original")
    kept = Bytes(
        (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous(),
        scale_codes(scales[:, ::length].contiguous(), spec.scale.format),
    )
    if (gamma := parts.group_scale) is not None:
        kept = kept._replace(factor=gamma.flatten()[:1].to(torch.float32).clone())
    shape, source = (w.shape[0], w.shape[1]), None if program.from_master else dtype
    by_kernel = of_spec(lines, w.device, Asked.BYTES, w.dtype, w.dtype) != TENSOR_CODE
    return Layout(lines.to_text(), shape, w.dtype, case.weight.stored_transposed, by_kernel, source), kept


def _require_static(case: _Case) -> None:
    """Raise PolicyError where the weight's operands are functions of more than the weight, or no product of elements
    and scales."""
    planned, program = case.planned, case.program
    fprop, dgrad = program.fprop.right, program.dgrad.right
    if planned.view.op != "linear":
        raise case.refusal(f"only linear layers are packed, and its operation is {planned.view.op}", "unfreeze it")
    acting = {technique.name for technique in planned.on_weight[0]}
    acting |= {s.technique for s in program.state if s.entry.operand in (Operand.FPROP_WEIGHT, Operand.DGRAD_WEIGHT)}
    if acting:
        what = f"{min(acting)} acts on the weight itself or keeps state of it"
        raise case.refusal(what, "fine-tune under a policy without it")
    if program.fprop.transforms:
        name = program.fprop.transforms[0].name
        raise case.refusal(f"{name} transforms it in fprop", "transform the backward alone (scope: backward)")
    for stage in ("split", "around", "after"):
        if named := [technique.name for technique in fprop.techniques if overrides(technique, stage)]:
            raise case.refusal(f"{named[0]} makes no FP4 of it", "fine-tune under a policy without it")
    if fprop.draws:
        raise case.refusal("fprop rounds it anew at every forward", "round fprop.weight to nearest")
    if not dgrad.from_fprop and (dgrad.draws or program.dgrad.transforms):
        raise case.refusal(
            "dgrad rounds or rotates the original anew at every step", "let dgrad.weight be {source: fprop}"
        )


def _same(program: OperandProgram, w: Tensor, again: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two weights give the same operand, bit for bit."""
    one, other = (_terms(program, x, dtype) for x in (w, again))
    return len(one) == len(other) and all(
        torch.equal(a.values, b.values) and _equal(a.multiplier, b.multiplier) for a, b in zip(one, other, strict=True)
    )


def _same_in_dgrad(program: MatmulProgram, w: Tensor, again: Tensor, dtype: torch.dtype) -> bool:
    dgrad = program.dgrad.right
    return dgrad.from_fprop or _same(dgrad, w.mT.contiguous(), again.mT.contiguous(), dtype)


def _terms(program: OperandProgram, x: Tensor, dtype: torch.dtype) -> Terms:
    return program(x if program.from_master else x.to(dtype), None, {}, None)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _require_own(root: nn.Module, case: _Case) -> None:
    """Raise PolicyError where the weight is read otherwise than by the call of its module."""
    module, parameter = case.weight.module, case.weight.stored
    if type(module) is not nn.Linear and type(module).__name__ != "Conv1D":
        raise case.refusal(
            f"{type(module).__name__} may read it outside a call of its own", "keep or unfreeze the weight"
        )
    owners = [
        f"{name}.{own}".strip(".")
        for name, other in root.named_modules()
        for own, value in other._parameters.items()
        if value is parameter and other is not module
    ]
    if owners:
        raise case.refusal(f"{owners[0]} is the same parameter", "untie the two, or keep the weight by a rule")
    for name, wrapper in root.named_modules():
        if wrapper._modules.get("base_layer") is module and wrapper._modules.get("lora_magnitude_vector"):
            raise case.refusal(
                f"{name} has a DoRA adapter, which reads it for its norms",
                "train with use_dora=False, or keep the weight by a rule",
            )
