"""Refuses techniques where they cannot act: at experts, at convolutions, beside channels that are multiplied apart.

Every refusal follows from what techniques declare (:mod:`fp4graph.technique.facts`) and from the site's program.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp4graph.errors import CaptureError
from fp4graph.graph.blocks import pattern_of
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.operand import OperandProgram
from fp4graph.policy import Rule
from fp4graph.technique import TENSOR_STAGES, BlockScale, ChannelSplit, Part
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.site import SiteView

#: Why a weight that is a parameter between forwards and computed inside of them cannot be quantized.
COMPUTED_INSIDE = (
    "the forward itself puts a parametrization on a parameter and takes it off again, as PEFT does for "
    "target_parameters=, so no plan that was made before the forward holds. Name linear layers in target_modules= "
    "instead, which puts adapters beside them, and leave experts' parameters out"
)


def rule_that_keeps(name: str, module: str | None) -> str:
    """Return the end of a sentence: advice to write a rule that keeps the products of ``module`` in high precision."""
    parents, dot, last = (module or "").rpartition(".")
    pattern = f"{pattern_of(parents)}{dot}{last}"  # a last number stays: it names a module of a Sequential
    return (
        "put a rule before the policy's others (in a policy that extends another, under 'rules: {before: [...]}'): "
        f"{{name: {name}, match: {{module: {pattern!r}}}, keep: not quantized yet}}"
    )


def require_experts_apart(site: SiteView, rule: Rule, parts: Iterable[Part]) -> None:
    """Raise CaptureError where a technique would mix data of different experts."""
    for part in parts:
        if part.mixes == "tensor":
            raise _refusal(
                site,
                rule,
                f"technique {part.name} does not tell the tokens and weights of experts apart (it declares mixes = "
                f"'tensor'). To keep the experts in high precision, {rule_that_keeps('experts', site.module)}",
            )


def require_each_expert(program: OperandProgram, operand: Operand, site: SiteView, rule: Rule) -> None:
    """Raise CaptureError for techniques that would count the zeros that fill up an expert's tokens; if blocks are cut
    at the borders of experts, also for techniques that see blocks, stochastic scales and choices of elements."""
    keep = f"to keep the experts in high precision, {rule_that_keeps('experts', site.module)}"
    counting = next((part.name for part in program.parts if part.counts), None)
    if counting is not None and operand.gemm is Gemm.WGRAD:
        message = f"cannot act on {operand} of experts, whose tokens are filled up with zeros"
        raise _refusal(site, rule, f"technique {counting} {message}; list other operands in its options, or {keep}")
    spec = program.spec
    if spec is None or not reaches_across(program, operand):
        return
    causes = list(dict.fromkeys(part.name for part in program.parts if _sees_blocks(part)))
    causes += [f"{spec.scale.rounding} rounding of scales"] if spec.scale.rounding == "stochastic" else []
    causes += ["a choice between elements"] if spec.others else []
    if causes:
        message = f"cannot act on {operand} of experts where a whole {spec.block} has one scale"
        raise _refusal(site, rule, f"{' and '.join(causes)} {message}; use blocks of a fixed length, or {keep}")


def reaches_across(program: OperandProgram, operand: Operand) -> bool:
    """Return whether the policy's blocks of an operand would reach from one expert into the next."""
    block = None if program.spec is None else program.spec.block
    return block == "tensor" or (block == "row" and operand.gemm is Gemm.WGRAD)


def _sees_blocks(part: Part) -> bool:
    """Return whether the result of a part depends on how an operand is cut into blocks."""
    divides_groups = isinstance(part, BlockScale) and part.group_granularity is not None
    after_cutting = (stage for stage in TENSOR_STAGES if stage not in ("split", "after"))
    return divides_groups or (part.mixes != "none" and any(map(part.acts_at, after_cutting)))


def require_no_weight_techniques(site: SiteView, rule: Rule, keeping: Iterable[Part]) -> None:
    """Raise CaptureError where a technique acts on the weight of a convolution outside of its product.

    Args:
        keeping: the parts that keep state of the weight or act at the optimizer's step.
    """
    for part in keeping:
        raise _refusal(
            site,
            rule,
            f"technique {part.name} keeps state of a weight or acts at the optimizer's step, which is not done "
            "for convolutions yet; give the technique only to rules for other operations, or keep convolutions",
        )


def require_unchanged_siblings(program: MatmulProgram, site: SiteView, rule: Rule) -> None:
    """Raise CaptureError where siblings share the largest magnitude of their weights, and a technique changes the
    weight, or its statistics, before the tensor scale is computed."""
    sharing = {slot.technique for slot in program.state if slot.shared}
    stages = ("split", "around", "block_statistic", "group_statistic", "group_scale")
    acting = [part.name for stage in stages for part in program.fprop.right.at(stage) if part.name not in sharing]
    acting = [transform.name for transform in program.fprop.transforms] + acting
    if sharing and acting:
        raise _refusal(
            site,
            rule,
            f"technique {', '.join(sorted(sharing))} shares the scale of the weights of siblings, and {acting[0]} "
            f"changes the weight in fprop before that; give {acting[0]} other operands, or leave share out",
        )


def require_alone(program: MatmulProgram, splits: list[ChannelSplit], site: SiteView, rule: Rule) -> ChannelSplit:
    """Return the one part that has channels multiplied apart.

    Raises:
        CaptureError: several techniques choose channels, the site is not a linear layer, or another technique would
            need to know which channels it sees.
    """
    split, *rivals = splits
    if rivals:
        cause = f"{rivals[0].name} chooses channels too; drop one of the two"
    elif site.op != "linear":
        cause = f"only a linear layer can do so, and this site is {site.op}; give it to rules with op: linear"
    elif program.fprop.transforms:
        name = program.fprop.transforms[0].name
        cause = f"{name} transforms the operands of fprop, which changes their channels; transform the backward"
    elif keeping := [slot.technique for slot in program.state if slot.technique != split.name]:
        cause = f"{keeping[0]} keeps state of the whole weight; drop one of the two"
    elif any(operand.has_gradient_factor for operand in (program.fprop.left, program.fprop.right)):
        cause = "another technique differentiates the quantizers of fprop, which would be two each; drop one of the two"
    else:
        return split
    raise _refusal(site, rule, f"technique {split.name} multiplies input channels apart: {cause}")


def _refusal(site: SiteView, rule: Rule, message: str) -> CaptureError:
    return CaptureError(f"{rule.file}:{rule.line}: {message}" if rule.file else message, site=str(site))
