"""``fp4graph.pack_frozen``: stores frozen weights as FP4 bytes between forwards, if that changes no result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyError
from fp4graph.exports.packing import nibbles
from fp4graph.exports.unpacking import Bytes, Frozen, Unpack, dtype_to_quantize
from fp4graph.kernels.request import Asked
from fp4graph.kernels.rows import TENSOR_CODE, of_spec
from fp4graph.model.distributed import unwrapped
from fp4graph.model.prepare import PhasePlan
from fp4graph.model.runtime import require_runtime
from fp4graph.model.source import release_all
from fp4graph.model.weight import PlannedWeight, Weight
from fp4graph.numerics.packing import element_codes, scale_codes
from fp4graph.numerics.sharding import is_sharded
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.operand import OperandProgram
from fp4graph.technique.operands import Operand

M = TypeVar("M", bound=nn.Module)
#: A later phase of the policy: when it begins, and its plan of the model.
_Phase = tuple[int | float, PhasePlan]


def pack_frozen(model: M) -> M:
    """Store frozen weights that the policy quantizes as FP4 bytes, and free their high-precision values.

    Packing changes no forward or backward, bit for bit. This is checked for each weight, in the present and every later
    phase of the policy, before any weight is changed: the bytes must give the same operands of fprop and dgrad as the
    weight. Each call of a module makes the weight from the bytes, and drops it afterwards.

    ``parameters()`` no longer lists a packed weight. ``requires_grad_(True)`` therefore does not reach it, and it stays
    frozen until :func:`unpack_frozen`; a PolicyWarning is issued if other parameters are unfrozen. An optimizer made
    before packing keeps the high-precision values alive: make it afterwards, from the trainable parameters.
    ``state_dict()`` has the weight under its name, with the values of fprop: it loads into a plain or an applied model,
    and into this model after :func:`unpack_frozen`.

    Under DDP call this before or after wrapping, or on the wrapper; under FSDP2 before ``fully_shard``, which does not
    shard the bytes.

    Under ``torch.autocast`` weights are quantized from autocast's dtype; call this in the same context as the model. A
    forward in another context raises an Error. Weights that require gradients, and weights that the policy keeps, do
    not change. Applying a policy again or removing it unpacks. Adding adapters and beginning a phase do not unpack; if
    the policy then needs other values of a weight, the next forward and every later forward raise the same error.

    Args:
        model: an applied model; call it once before if the policy's rules depend on the graph.

    Returns:
        ``model``.

    Raises:
        PolicyError: a frozen weight cannot be packed, because its bytes give other operands in a phase of the policy.
            The message names weight, rule, file and line, and the remedy. The model is unchanged.
        Error: the model is not applied, or is sharded.
    """
    runtime = require_runtime(model, "pack_frozen").up_to_date()
    later = [(phase.at, runtime.plan_of(index)) for index, phase in enumerate(runtime.policy.phases, 1)][
        runtime.phase :
    ]
    weights = [weight for weight in runtime.weights if weight.source is None and not weight.stored.requires_grad]
    frozen = Frozen()
    packed = [
        (weight, source) for weight in weights if (source := _packed(runtime.root, weight, later, frozen)) is not None
    ]
    for weight, (unpacking, kept) in packed:
        unpacking.hold(weight.module, kept)
    frozen.watch(p for p in runtime.root.parameters() if not p.requires_grad)
    return model


def unpack_frozen(model: M) -> M:
    """Make packed weights parameters again, with the values of fprop, and return ``model``.

    The values before quantization are lost.
    """
    release_all(unwrapped(model))
    return model


@dataclasses.dataclass(frozen=True)
class _Case:
    """A weight under one decision of the policy; in a later phase ``where`` begins the error's text with the phase."""

    weight: Weight
    planned: PlannedWeight
    where: str = ""

    @property
    def program(self) -> MatmulProgram | None:
        """The program of the weight's product; None if fprop multiplies in high precision."""
        program = self.planned.plan.program
        return None if program is None or program.fprop.right.spec is None else program

    def refusal(self, why: str, remedy: str) -> PolicyError:
        """Return the error that the weight cannot be packed."""
        message = f"{self.weight.name} cannot be packed: {self.where}{why}. {remedy[0].upper()}{remedy[1:]}"
        return self.planned.rule.error(message)


def _later_cases(weight: Weight, later: Sequence[_Phase]) -> Iterator[_Case]:
    """Yield the weight under every decision that a later phase of the policy may make about it."""
    for at, plan in later:
        matching = [w for w in plan.weights if w.module is weight.module and w.parameter_name == weight.parameter_name]
        view, decision = plan.policy.decide_weight(weight.view)[0]
        for planned in matching[0].possible if matching else (PlannedWeight.of(view, decision.rule),):
            yield _Case(weight, planned, f"in the phase that begins at {at:g}, ")


@torch.no_grad()
def _packed(root: nn.Module, weight: Weight, later: Sequence[_Phase], frozen: Frozen) -> tuple[Unpack, Bytes] | None:
    """Return the bytes of a weight; None if fprop keeps the weight in high precision."""
    if len(weight.choices) > 1:
        raise Error(f"the rule for {weight.name} depends on the graph; call the model once before pack_frozen()")
    present = _Case(weight, weight.choices[0])
    if present.program is None:
        return None
    if is_sharded(weight.stored):
        raise Error(
            f"{weight.name} is sharded, and a rank cannot pack its part; call pack_frozen() before fully_shard, which "
            "does not shard the bytes"
        )
    _require_unshared(root, present)
    _require_static(present, present.program)
    w = weight.stored.detach()
    w = w.mT if weight.stored_transposed else w
    dtype = dtype_to_quantize(w.device.type, w.dtype)
    unpacking, kept = _bytes(present, present.program, w, dtype, frozen)
    unpacked = unpacking.matrix(kept)
    if _difference(present, present.program, w, unpacked, dtype) is not None:
        kept = _with_largest(kept, w)
        unpacked = unpacking.matrix(kept)
        if (error := _difference(present, present.program, w, unpacked, dtype)) is not None:
            raise error
    unpacking.programs.add(present.program)
    for case in _later_cases(weight, later):
        if (program := case.program) is None:
            raise case.refusal(
                "this rule keeps it in high precision, but packing frees its values",
                "quantize it in all phases as in the present phase, or drop the later phase",
            )
        if program in unpacking.programs:
            continue
        _require_static(case, program)
        if (error := _difference(case, program, w, unpacked, dtype)) is not None:
            raise error
        if program.fprop.right.from_master != present.program.fprop.right.from_master:
            raise case.refusal(
                "it is quantized from another dtype under autocast", "let from_master be equal in all phases"
            )
        unpacking.programs.add(program)
    return unpacking, kept


def _bytes(case: _Case, matmul: MatmulProgram, w: Tensor, dtype: torch.dtype, frozen: Frozen) -> tuple[Unpack, Bytes]:
    """Return the codes, scales and γ of ``w [N, K]``."""
    program = matmul.fprop.right
    spec = program.spec
    assert spec is not None
    if spec.others:
        names = ", ".join(element.name for element in spec.elements)
        raise case.refusal(
            f"each of its blocks chooses one of the elements {names}, which FP4 bytes do not record",
            "quantize weights with one element, or unfreeze the weight",
        )
    if not w.isfinite().all():
        raise case.refusal("it holds NaN or Inf", "load finite values, or keep the weight with a rule")
    length = spec.block[-1] if isinstance(spec.block, tuple) else spec.block
    if not isinstance(length, int) or spec.element.code_bits != 4 or w.shape[1] % length:
        raise case.refusal(
            f"its {w.shape[1]} columns cannot be stored as bytes of {spec.element.name} in blocks of {spec.block}",
            "use 4-bit elements in blocks of a fixed length that divides the columns, or unfreeze the weight",
        )
    x = w if program.from_master else w.to(dtype)
    parts = program.quantize(x.to(torch.float32), None, {}, None)
    elements, scales = (parts.blocking.join(each.expand_as(parts.elements)) for each in (parts.elements, parts.scale))
    lines = dataclasses.replace(spec, block=length, rounding="nearest", source="original")
    gamma = parts.group_scale
    kept = Bytes(
        nibbles(element_codes(elements, spec.element)).contiguous(),
        scale_codes(scales[:, ::length].contiguous(), spec.scale.format),
        None if gamma is None else gamma.flatten()[:1].to(torch.float32).clone(),
    )
    by_kernel = of_spec(lines, w.device, Asked.BYTES, w.dtype, w.dtype) != TENSOR_CODE
    origin = None if program.from_master else dtype
    return Unpack(case.weight, lines, by_kernel, origin, frozen), kept


def _with_largest(kept: Bytes, w: Tensor) -> Bytes:
    """Return ``kept`` with place and value of the largest unquantized weight, from which a quantizer computes γ."""
    place = w.abs().flatten().argmax().reshape(1)
    return kept._replace(place=place, largest=w.flatten()[place].clone())


def _require_static(case: _Case, program: MatmulProgram) -> None:
    """Raise PolicyError if the weight's operands depend on more than the weight, or are not elements times scales."""
    fprop, dgrad = program.fprop.right, program.dgrad.right
    if case.planned.view.op != "linear":
        what = f"only linear layers are packed, but its operation is {case.planned.view.op}"
        raise case.refusal(what, "unfreeze it")
    acting = {technique.name for technique in case.planned.on_weight[0]}
    acting |= {s.technique for s in program.state if s.entry.operand in (Operand.FPROP_WEIGHT, Operand.DGRAD_WEIGHT)}
    if acting:
        what = f"{min(acting)} changes the weight itself, or keeps state of it or its siblings"
        raise case.refusal(what, "fine-tune under a policy without it")
    if program.fprop.transforms:
        name = program.fprop.transforms[0].name
        raise case.refusal(f"{name} transforms it in fprop", "transform only the backward (scope: backward)")
    for stage in ("split", "around", "after"):
        if names := [part.name for part in fprop.at(stage)]:
            raise case.refusal(f"{names[0]} gives it values that are not FP4", "fine-tune under a policy without it")
    if fprop.draws:
        raise case.refusal("fprop rounds it stochastically at every forward", "round fprop.weight to nearest")
    if not dgrad.from_fprop and (dgrad.draws or program.dgrad.transforms):
        raise case.refusal(
            "dgrad rounds the original stochastically, or rotates it", "set dgrad.weight to {source: fprop}"
        )


def _difference(
    case: _Case, program: MatmulProgram, w: Tensor, unpacked: Tensor, dtype: torch.dtype
) -> PolicyError | None:
    """Return the error that the unpacked bytes give other operands than ``w``; None if the operands are equal."""
    fprop, dgrad = program.fprop.right, program.dgrad.right
    if not _same(fprop, w, unpacked, dtype):
        names = ", ".join(dict.fromkeys(part.name for part in fprop.parts)) or "its quantizer"
        what = f"{names} changes values that are already quantized"
        return case.refusal(what, "fine-tune under another policy")
    if dgrad.from_fprop or _same(dgrad, w.mT.contiguous(), unpacked.mT.contiguous(), dtype):
        return None
    read = "quantizes it from the original, along the other axis" if dgrad.spec else "reads the original"
    remedy = "set dgrad.weight to {source: fprop}, or quantize weights in square blocks"
    return case.refusal(f"dgrad {read}", remedy)


def _same(program: OperandProgram, w: Tensor, unpacked: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two weights give the same operand, bit for bit."""
    first, second = (program(x if program.from_master else x.to(dtype), None, {}, None) for x in (w, unpacked))
    return len(first) == len(second) and all(
        torch.equal(a.values, b.values) and _equal(a.multiplier, b.multiplier)
        for a, b in zip(first, second, strict=True)
    )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _require_unshared(root: nn.Module, case: _Case) -> None:
    """Raise PolicyError if the weight is read outside a call of its module."""
    module, parameter = case.weight.module, case.weight.stored
    if type(module) is not nn.Linear and type(module).__name__ != "Conv1D":
        what = f"code may read it without a call of its module, a {type(module).__name__}"
        raise case.refusal(what, "keep or unfreeze the weight")
    for name, other in root.named_modules():
        if other is not module and (shared := [key for key, p in other._parameters.items() if p is parameter]):
            what = f"{f'{name}.{shared[0]}'.strip('.')} is the same parameter"
            raise case.refusal(what, "untie the two names, or keep the weight with a rule")
    for name, wrapper in root.named_modules():
        if wrapper._modules.get("base_layer") is module and wrapper._modules.get("lora_magnitude_vector"):
            raise case.refusal(
                f"{name} has a DoRA adapter, which reads it to compute norms",
                "train with use_dora=False, or keep the weight with a rule",
            )
