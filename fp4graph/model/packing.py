"""``fp4graph.pack_frozen``: frozen weights as FP4 bytes between forwards, and which weights that is sound for."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyError
from fp4graph.kernels import operators
from fp4graph.model.distributed import unwrapped
from fp4graph.model.packed import Bytes, Layout, hold, release_all
from fp4graph.model.runtime import Runtime, require_runtime
from fp4graph.model.weight import Weight
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
    weight, before any is changed: its bytes must give the operands of fprop and dgrad that the weight itself gives.
    Each call of a module makes its weight from the bytes, and drops it afterwards.

    ``parameters()`` no longer lists a packed weight. ``state_dict()`` has it under its own name, with the values that
    fprop multiplies with: it loads into a plain or an applied model, and into this one after :func:`unpack_frozen`.

    Under DDP call this before wrapping, after it, or on the wrapper; under FSDP2 before ``fully_shard``, which leaves
    the bytes whole on every rank.

    Under ``torch.autocast`` weights are quantized from autocast's dtype; call this in the context in which the model is
    called. Weights that require gradients, and weights that the policy keeps, stay as they are. Applying a policy again
    or removing it unpacks; where adapters join or a phase begins, weights are unpacked and packed again.

    Args:
        model: applied. Where rules depend on what a graph shows, called once too.

    Returns:
        ``model`` itself.

    Raises:
        PolicyError: a frozen weight cannot be packed, because its bytes do not give what the policy computes from the
            weight; names weight, rule, file and line, and the remedy. The model is as it was.
        Error: the model is not applied, or is sharded.
    """
    runtime = require_runtime(model, "pack_frozen")
    due = [weight for weight in runtime.weights if weight.is_present and not weight.stored.requires_grad]
    packed = [(weight, made) for weight in due if (made := _packed(runtime, weight)) is not None]
    for weight, (layout, kept) in packed:
        hold(weight.module, weight.parameter_name, layout, kept)
    runtime.plan.packed, runtime.repack = bool(packed) or runtime.plan.packed, pack_frozen
    return model


def unpack_frozen(model: M) -> M:
    """Give packed weights their place as parameters back, with the values that fprop multiplied with.

    The values before quantization are gone. Returns ``model``.
    """
    release_all(unwrapped(model))
    return model


@torch.no_grad()
def _packed(runtime: Runtime, weight: Weight) -> tuple[Layout, Bytes] | None:
    """Return the bytes of a weight; None where the policy keeps it in high precision in fprop."""
    if len(weight.choices) > 1:
        raise Error(f"which rule decides {weight.name} depends on the graph; call the model once before pack_frozen()")
    program = weight.plan.program
    if program is None or program.fprop.right.spec is None:
        return None
    if is_sharded(weight.stored):
        raise Error(
            f"{weight.name} is sharded, and a rank cannot pack its part; call pack_frozen() before fully_shard, which "
            "then leaves the bytes of all frozen weights whole on every rank"
        )
    _require_own(runtime.root, weight)
    _require_static(weight, program)
    w = weight.stored.detach()
    w = w.mT if weight.stored_transposed else w
    dtype = torch.get_autocast_dtype(w.device.type) if torch.is_autocast_enabled(w.device.type) else w.dtype
    layout, kept = _bytes(weight, program.fprop.right, w, dtype)
    for own in (kept, _with_largest(kept, w)):
        again = dataclasses.replace(layout, transposed=False).weight(own)
        if _same(program.fprop.right, w, again, dtype) and _same_in_dgrad(program, w, again, dtype):
            return layout, own
    if program.dgrad.right.from_fprop or not _same(program.fprop.right, w, again, dtype):
        named = ", ".join(technique.name for technique in program.fprop.right.techniques) or "its quantizer"
        raise _refusal(
            weight, f"{named} gives other values for what it has quantized", "fine-tune under another policy"
        )
    read = "quantizes it from the original, along the other axis" if program.dgrad.right.spec else "reads the original"
    remedy = "let dgrad.weight be {source: fprop}, or quantize weights in square blocks"
    raise _refusal(weight, f"dgrad {read}", remedy)


def _with_largest(kept: Bytes, w: Tensor) -> Bytes:
    """Return ``kept`` with the largest element as it was, from which γ is taken."""
    place = w.abs().flatten().argmax().reshape(1)
    return kept._replace(place=place, largest=w.flatten()[place].clone())


def _bytes(weight: Weight, program: OperandProgram, w: Tensor, dtype: torch.dtype) -> tuple[Layout, Bytes]:
    """Return the codes, scales and γ of ``w [N, K]``."""
    spec = program.spec
    assert spec is not None
    length = spec.block[-1] if isinstance(spec.block, tuple) else spec.block
    if not isinstance(length, int) or spec.element.code_bits != 4 or w.shape[1] % length:
        raise _refusal(
            weight,
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
    by_kernel = operators.packs(lines, w.dtype, w.dtype, w.device)
    return Layout(lines.to_text(), (w.shape[0], w.shape[1]), w.dtype, weight.stored_transposed, by_kernel), kept


def _require_static(weight: Weight, program: MatmulProgram) -> None:
    """Raise PolicyError where the weight's operands are functions of more than the weight, or no product of elements
    and scales."""
    fprop, dgrad = program.fprop.right, program.dgrad.right
    if weight.view.op != "linear":
        raise _refusal(weight, f"only linear layers are packed, and its operation is {weight.view.op}", "unfreeze it")
    acting = {technique.name for technique in weight.choices[0].on_weight[0]}
    acting |= {s.technique for s in program.state if s.entry.operand in (Operand.FPROP_WEIGHT, Operand.DGRAD_WEIGHT)}
    if acting:
        what = f"{min(acting)} acts on the weight itself or keeps state of it"
        raise _refusal(weight, what, "fine-tune under a policy without it")
    if program.fprop.transforms:
        name = program.fprop.transforms[0].name
        raise _refusal(weight, f"{name} transforms it in fprop", "transform the backward alone (scope: backward)")
    for stage in ("split", "around", "after"):
        if named := [technique.name for technique in fprop.techniques if overrides(technique, stage)]:
            raise _refusal(weight, f"{named[0]} makes no FP4 of it", "fine-tune under a policy without it")
    if fprop.draws:
        raise _refusal(weight, "fprop rounds it anew at every forward", "round fprop.weight to nearest")
    if not dgrad.from_fprop and (dgrad.draws or program.dgrad.transforms):
        raise _refusal(
            weight, "dgrad rounds or rotates the original anew at every step", "let dgrad.weight be {source: fprop}"
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


def _require_own(root: nn.Module, weight: Weight) -> None:
    """Raise PolicyError where the weight is read otherwise than by the call of its module."""
    module, parameter = weight.module, weight.stored
    if type(module) is not nn.Linear and type(module).__name__ != "Conv1D":
        raise _refusal(
            weight, f"{type(module).__name__} may read it outside a call of its own", "keep or unfreeze the weight"
        )
    owners = [
        f"{name}.{own}".strip(".")
        for name, other in root.named_modules()
        for own, value in other._parameters.items()
        if value is parameter and other is not module
    ]
    if owners:
        raise _refusal(weight, f"{owners[0]} is the same parameter", "untie the two, or keep the weight by a rule")


def _refusal(weight: Weight, why: str, remedy: str) -> PolicyError:
    return weight.rule.error(f"{weight.name} cannot be packed: {why}. {remedy[0].upper()}{remedy[1:]}")
