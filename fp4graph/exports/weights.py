"""The weights of an applied model as fprop multiplies them: FP4 elements, block scales, and a tensor scale."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyWarning
from fp4graph.graph.plan import plan_once
from fp4graph.model.runtime import Runtime
from fp4graph.model.tree import adapter_modules
from fp4graph.model.weight import Weight
from fp4graph.model.weight_quantizer import fprop_state
from fp4graph.numerics import noise
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.formats import E2M1, E4M3, E8M0, ScaleFormat
from fp4graph.numerics.segments import Segments
from fp4graph.numerics.sharding import is_sharded
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.gemm import GemmProgram
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import total
from fp4graph.technique import Part
from fp4graph.technique.operands import Operand

#: The two kinds of blocks that servers read: E2M1 in blocks of 32 with E8M0 scales, and of 16 with E4M3 scales.
Kind = Literal["mxfp4", "nvfp4"]
BLOCK: dict[Kind, int] = {"mxfp4": 32, "nvfp4": 16}
_SCALES: dict[Kind, ScaleFormat] = {"mxfp4": E8M0, "nvfp4": E4M3}
#: Stages whose changes to an operand no format can store.
_REFUSED = {
    "split": "splits the operand into parts that are multiplied separately",
    "around": "replaces the result of the quantizer",
    "after": "changes the dequantized values",
}
#: Why a matrix that is not the weight of a layer cannot be exported, and the remedy.
NO_LAYER = (
    "checkpoints name weights in FP4 by a layer inside the model, and it is not the weight of one",
    "multiply with it in an nn.Linear inside the model, or keep it in high precision",
)


class ExportError(Error):
    """A format cannot hold the result of a policy; the message names the weight, its rule and the remedy."""


@dataclass(frozen=True)
class Scheme:
    """The quantizer of a linear layer, in the terms of servers.

    Attributes:
        weights: the kind of the weight's blocks.
        inputs: the kind of the activation's blocks, or None if activations are in high precision.
        inputs_scaled: whether activations have a tensor scale above their block scales.
    """

    weights: Kind
    inputs: Kind | None
    inputs_scaled: bool = False


@dataclass(frozen=True, eq=False)
class Fp4Weight:
    """A weight as fprop multiplies it: ``elements · scales · multiplier``.

    Attributes:
        name: the parameter's fully qualified name.
        rule: the name of the rule for the weight.
        scheme: the weight's quantizer.
        elements: values of E2M1, fp32 ``[..., N, K]``, with the contraction axis last however the parameter is stored.
        scales: the block scales, fp32 ``[..., N, K/block]``; scales of 2-D blocks are repeated for each line.
        multiplier: γ, fp32: 0-d, or ``[E]`` for the weights of experts; 1 without a tensor scale.
        again: a function that computes this object again, so that callers need not hold the elements.
    """

    name: str
    rule: str
    scheme: Scheme
    elements: Tensor
    scales: Tensor
    multiplier: Tensor
    again: Callable[[], Fp4Weight]

    def dequantized(self) -> Tensor:
        """Return the values in fprop, fp32 ``[..., N, K]``."""
        return _dequantized(self.elements, self.scales, self.multiplier, BLOCK[self.scheme.weights])


def _dequantized(elements: Tensor, scales: Tensor, multiplier: Tensor, block: int) -> Tensor:
    values = elements * scales.repeat_interleave(block, -1)
    return values * multiplier.reshape(*multiplier.shape, *([1] * (elements.dim() - multiplier.dim())))


def fp4_weights(runtime: Runtime, *, activations: bool = True) -> Iterator[Fp4Weight]:
    """Yield every weight that the policy quantizes in fprop.

    Args:
        activations: whether to include the quantizers of activations.

    Raises:
        ExportError: the model has adapters, or no format can hold a weight or its activations.
        Error: the model was not called in the present phase, or is sharded.
    """
    _require_merged(runtime.root)
    used = [weight for weight in runtime.weights if weight.is_captured]
    current_phase = runtime.policy.phase(_count(runtime), runtime.settings.total_forwards)
    if (runtime.weights and not used) or current_phase != runtime.phase:
        raise Error(
            "weights are exported as a forward multiplies them, but the model has not been called since the policy was "
            "applied, adapters were merged or its present phase began; call it once, for instance in eval() and "
            "under torch.no_grad()"
        )
    seen, embedded = set(), _embedded(runtime.root)
    if unused := [weight.name for weight in runtime.weights if not weight.is_captured and weight.is_used]:
        warnings.warn(
            f"{len(unused)} weights that the policy decides about were multiplied in no forward so far, and are not "
            f"exported in FP4: {', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}. To export them in FP4, "
            "call the model so that it uses them",
            PolicyWarning,
            stacklevel=3,
        )
    for weight in used:
        plan = plan_once(weight.view, weight.rule, training=False)
        if plan.program is None or plan.program.fprop.right.spec is None or weight.name in seen:
            continue
        seen.add(weight.name)
        if is_sharded(weight.stored):
            raise Error(
                "weights are exported from one process, but the model is sharded; save a checkpoint with "
                "fp4graph.training.checkpoint, load it in one process, and export there"
            )
        if (apart := plan.program.apart) is not None:
            technique = plan.program.state[apart.score].technique
            raise refusal(
                weight,
                f"{technique} multiplies {apart.count} of its input channels in another format, but stored weights "
                "have one format",
                "train its last steps with a policy that multiplies all channels alike",
            )
        if (embedding := embedded.get(id(weight.stored))) is not None:
            raise refusal(
                weight,
                f"{embedding} is the same parameter and needs it in high precision",
                f"keep {weight.name.rpartition('.')[0]} in high precision, or untie the two",
            )
        if not weight.fqn:
            raise refusal(weight, *NO_LAYER)
        yield _of(weight, plan.program.fprop, runtime, activations)


def _require_merged(root: nn.Module) -> None:
    """Raise an ExportError if the model has adapters."""
    wrapped = [name for name, _ in root.named_modules() if name.rpartition(".")[2] == "base_layer"]
    if names := adapter_modules(root) or wrapped:  # PEFT leaves a wrapper where all adapters were deleted
        raise ExportError(
            f"cannot export {names[0]}: the model has adapters, and servers do not know the names of adapted "
            "layers. Merge them first (merge_and_unload), and apply again"
        )


def refuse_computed(runtime: Runtime, done: Collection[str]) -> None:
    """Raise an ExportError if a product's quantized weight is not in ``done``: a forward computes it, or it is a
    parameter that is not the weight of a layer."""
    named = dict(runtime.root.named_parameters(remove_duplicate=False))
    written = {id(named[name]) for name in done if name in named}
    owners = {name.rpartition(".")[0] for name in (*done, *(n for n, x in named.items() if id(x) in written))}
    held = {use.module: use for use in runtime.capture.uses.values() if use.decision.rule.quantizes}
    for site in runtime.sites:
        has_weight = site.op not in ("matmul", "sdpa") and site.operands.get(Operand.FPROP_WEIGHT) is not None
        if not has_weight or site.module in owners:
            continue
        if (use := held.get(site.module or "")) is not None:
            raise _refusal(f"{use.module}.{use.parameter}".removeprefix("."), site.rule, *NO_LAYER)
        raise _refusal(
            site.module or "(root)",
            site.rule,
            "its weight is computed in the forward (weight_norm, pruning, a hypernetwork), so no tensor of the model "
            "holds it",
            "make it a parameter first (torch.nn.utils.parametrize.remove_parametrizations or "
            "torch.nn.utils.prune.remove), or keep the layer in high precision",
        )


def _embedded(root: nn.Module) -> dict[int, str]:
    """Return the names of the weights of embeddings, by the ids of the parameters."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(m.weight): f"{name}.weight" for name, m in root.named_modules() if isinstance(m, kinds)}


@torch.no_grad()
def _of(weight: Weight, fprop: GemmProgram, runtime: Runtime, activations: bool) -> Fp4Weight:
    """Return ``weight`` in FP4, quantized by ``fprop``, its program in evaluation."""
    program, spec = fprop.right, fprop.right.spec
    assert spec is not None
    if fprop.transforms:
        names = " and ".join(sorted(technique.name for technique in fprop.transforms))
        raise refusal(
            weight,
            f"{names} transforms both operands of fprop, but readers do not transform activations",
            f"train its last steps under a policy without {names}"
            + (", or with hadamard: {scope: backward}" if "hadamard" in names else ""),
        )
    kind = _kind(weight, program)
    scheme = Scheme(kind, *(_inputs(weight, fprop, kind) if activations else (None, False)))
    w = weight.values.detach()
    canonical = w.mT if weight.stored_transposed else w
    if weight.autocast and torch.is_autocast_enabled(w.device.type) and not program.from_master:
        canonical = canonical.to(torch.get_autocast_dtype(w.device.type))
    x = canonical.to(torch.float32)
    if weight.stored_transposed and x.dim() == 2:
        raise refusal(
            weight,
            "it is stored as [in, out], as in Conv1D of transformers (GPT-2), but readers of FP4 weights, including "
            "transformers, support only nn.Linear, [out, in]",
            "keep such layers in high precision, or replace them by nn.Linear for training",
        )
    if x.dim() < 2 or weight.view.op == "conv":
        raise refusal(weight, "it is not the matrix of a linear layer", "keep convolutions in high precision")
    if x.shape[-1] % (block := BLOCK[scheme.weights]):
        raise refusal(
            weight,
            f"its {x.shape[-1]} columns are not a multiple of the block of {block}, and readers do not pad",
            "keep it in high precision",
        )
    if not torch.isfinite(x).all():
        raise refusal(weight, "it holds NaN or Inf", "go back to an earlier checkpoint")
    step = _step(runtime).to(weight.key.device)
    draw = operand_draw(Draw(weight.key, step), Operand.FPROP_WEIGHT) if program.draws else None
    entries = fprop_state(weight, lambda entry: entry, canonical.dtype)
    segments = Segments(0, x.shape[0]) if weight.view.op == "grouped" else None
    parts = program.quantize(x, draw, entries, segments)
    like = parts.elements
    decode = parts.scale if spec.scale.convention == "decode" else 1 / parts.scale
    elements, scales = (parts.blocking.join(each.expand_as(like)) for each in (like, decode))
    scales = scales[..., ::block].contiguous()
    multiplier = torch.ones((), device=x.device)
    if (gamma := parts.group_scale) is not None:
        multiplier = _shared(weight, parts.blocking.join(gamma.expand_as(like)), grouped=segments is not None)
    if not torch.equal(_dequantized(elements, scales, multiplier, block), total(program(x, draw, entries, segments))):
        raise refusal(
            weight,
            f"{_named(program.parts)} give values that are not products of elements and scales",
            "export under a policy without them",
        )
    again = partial(_of, weight, fprop, runtime, activations)
    return Fp4Weight(weight.name, weight.rule.name, scheme, elements, scales, multiplier, again)


def _step(runtime: Runtime) -> Tensor:
    """Return the step tensor of the next eval forward."""
    return noise.make_step(runtime.settings.seed, 0, _count(runtime))


def _count(runtime: Runtime) -> int:
    """Return the number of forwards with gradients so far."""
    return runtime.root_state.count if runtime.root_state is not None else 0


def _shared(weight: Weight, gamma: Tensor, *, grouped: bool) -> Tensor:
    """Return γ as one number, or ``grouped`` as a number for each expert, from ``gamma``, γ at every element."""
    each = gamma.flatten(1) if grouped else gamma.flatten()
    first = each[..., :1]
    if not torch.equal(each, first.expand_as(each)):
        raise refusal(
            weight,
            "its blocks have different scales above the block scales, but formats have one such scale for a matrix",
            "use tensor_scaling with granularity: tensor, and no macro_block_scaling on weights",
        )
    return first.squeeze(-1).clone()  # a view would keep γ of every element alive


def _kind(weight: Weight, program: OperandProgram) -> Kind:
    """Return the kind of the weight's blocks; raise an ExportError if servers read no such blocks."""
    spec = program.spec
    assert spec is not None
    for stage, what in _REFUSED.items():
        if names := [part.name for part in program.at(stage)]:
            raise refusal(weight, f"{names[0]} {what}", "export under a policy without it on fprop.weight")
    if spec.needs_key:
        raise refusal(weight, "its rounding is stochastic in evaluation too", "round fprop.weight to nearest")
    if (kind := _kind_of(spec)) is None:
        raise refusal(
            weight,
            f"its quantizer ({_described(spec)}) is neither MXFP4 (e2m1, block 32, scale e8m0) nor NVFP4 (e2m1, block "
            "16, scale e4m3, decode convention)",
            "train its last steps with one of these, or keep it in high precision",
        )
    return kind


def _kind_of(spec: QuantSpec) -> Kind | None:
    """Return the kind of a spec's blocks; None if servers read no such blocks.

    2-D blocks have a kind too, because their scales can be repeated for each line. Blocks with encode scales in E8M0
    have a kind too, because the inverses of powers of two are powers of two.
    """
    length = spec.block[1] if isinstance(spec.block, tuple) else spec.block
    for kind, scale in _SCALES.items():
        stored = spec.scale.format == scale and (spec.scale.convention == "decode" or scale == E8M0)
        if spec.elements == (E2M1,) and length == BLOCK[kind] and stored:
            return kind
    return None


def _inputs(weight: Weight, fprop: GemmProgram, weight_kind: Kind) -> tuple[Kind | None, bool]:
    """Return the kind of the activation's blocks, which must be ``weight_kind``, and whether they have a tensor scale.

    Raises an ExportError if the formats do not support the activation's quantizer.
    """
    program = fprop.left
    if program.spec is None:
        return None, False
    stages = [*_REFUSED, "block_statistic", "group_statistic", "scale", "round", "rescale"]
    changing = [part.name for part in program.parts if any(map(part.acts_at, stages))]
    scaling = program.at("group_scale")
    changing += [s.name for s in scaling if not (s.normalizes and s.group_granularity in ("tensor", "all"))]
    kind = _kind_of(program.spec)
    if kind != weight_kind or isinstance(program.spec.block, tuple) or changing or (scaling and kind == "mxfp4"):
        what = _described(program.spec) + (f" with {', '.join(changing)}" if changing else "")
        raise refusal(
            weight,
            f"no server supports the quantizer of its activations ({what})",
            "export with activations=False (--weights-only): servers then dequantize weights and multiply in bf16",
        )
    return kind, bool(scaling)


def _described(spec: QuantSpec) -> str:
    block = "×".join(map(str, spec.block)) if isinstance(spec.block, tuple) else spec.block
    return f"{spec.element_name}, block {block}, {spec.scale.convention} scale {spec.scale.format.name}"


def _named(parts: tuple[Part, ...]) -> str:
    return ", ".join(dict.fromkeys(part.name for part in parts)) or "its quantizer"


def refusal(weight: Weight | Fp4Weight, why: str, remedy: str) -> ExportError:
    """Return the error about a weight that cannot be exported."""
    return _refusal(weight.name, weight.rule if isinstance(weight.rule, str) else weight.rule.name, why, remedy)


def _refusal(name: str, rule: str | None, why: str, remedy: str) -> ExportError:
    return ExportError(f"cannot export {name}, which rule {rule!r} quantizes: {why}. {remedy[0].upper()}{remedy[1:]}")
