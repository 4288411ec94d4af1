"""The report of the graph pass: the sites of a captured graph, and the uses of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.schedule import Schedule
from fp4graph.policy import Decision
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.site import SiteView


@dataclass(frozen=True)
class Site:
    """One place of matrix work in a captured graph, and what the policy decided about it.

    ``fp4graph.explain(model, policy, args).sites`` lists the sites of a model, including matrix work that cannot
    be quantized, with the reason.

    Attributes:
        module: fully qualified name of the module that owns the weight, or that computes a product of activations; ""
            is the root, and None a module that cannot be known.
        op: "linear", "matmul", "grouped", "sdpa" or "conv" (see :class:`SiteView`), or the name of an operation that
            cannot be quantized.
        shapes: shapes of the two factors in the graph; a symbolic size is text.
        rule: name of the rule that decided, or None where no rule did.
        reason: why the site stays in high precision; "" for a quantized site.
        operands: the spec of each of the six operands after the ``plan`` of every technique; None is high precision.
        quantized: True where at least one operand is quantized.
        occurrence: number of earlier sites of the same module in the forward; separates their noise.
        rule_index: position of the rule in ``policy.rules``; -1 is the policy's default, lower numbers are the closing
            rules for roles. None where policies do not decide about the operation.
        flops: FLOPs of the forward at the sizes of the capture, or None where they are unknown.
        supported: False for an operation that no rule can quantize.
        exact: the GEMMs whose two operands hold bf16 numbers by construction. On CUDA these GEMMs of an fp32 model
            multiply in bf16 with fp32 output, unless a group scale turns out not to be one number for the tensor.
        apart_channels: the number of input channels that are multiplied apart, at a technique's request; 0 if none are.
        apart: the specs of these channels in fprop and wgrad; ``operands`` has the specs of the other channels. dgrad
            multiplies all channels together.
        techniques: the names of the rule's techniques, in the policy's order; empty where nothing is quantized.
        weight: the name, in its owner, of the parameter that is the second factor, and the rows and columns of it that
            are multiplied, as in :class:`WeightUse`; None where the factor is no parameter with a known owner.
        program: what is computed in place of the product; None where nothing is quantized.
        lowered: computes :attr:`schedule` on demand; None where nothing is quantized.
    """

    module: str | None
    op: str
    shapes: tuple[tuple[int | str, ...], ...]
    rule: str | None
    reason: str
    operands: Mapping[Operand, QuantSpec | None]
    quantized: bool
    occurrence: int = 0
    rule_index: int | None = None
    flops: int | None = None
    supported: bool = True
    exact: tuple[Gemm, ...] = ()
    apart_channels: int = 0
    apart: Mapping[Operand, QuantSpec | None] = field(default_factory=dict)
    techniques: tuple[str, ...] = ()
    weight: tuple[str, tuple[range, range] | None] | None = None
    program: MatmulProgram | None = field(default=None, repr=False, compare=False)
    lowered: Callable[[], Schedule] | None = field(default=None, repr=False, compare=False)

    @property
    def schedule(self) -> Schedule | None:
        """The kernel of each operand on the device of the capture, with reasons; None where nothing is quantized."""
        return None if self.lowered is None else self.lowered()

    @property
    def sizes(self) -> tuple[int, int, int] | None:
        """The numbers of rows of the first factor, of input and of output features; None if the site is no product of
        two tensors with axes, or a size is unknown."""
        numbers = all(shape and all(isinstance(size, int) for size in shape) for shape in self.shapes)
        if len(self.shapes) != 2 or not numbers:
            return None
        (*rows, features), matrix = (tuple(map(int, shape)) for shape in self.shapes)
        # A weight may be stored [N, K] or [K, N].
        outputs = matrix[-1] if self.op == "matmul" else next((n for n in matrix[-2:] if n != features), features)
        return prod(rows), features, outputs

    @property
    def standing(self) -> str:
        """Return "quantized", "kept", or "not supported" where no rule can quantize the site and no rule keeps it."""
        if self.quantized:
            return "quantized"
        chosen = self.rule_index is not None and self.rule_index >= 0
        return "kept" if self.supported or chosen else "not supported"


@dataclass(frozen=True)
class WeightUse:
    """A captured product whose second factor is a parameter, for code that quantizes the parameter outside the graph.

    Attributes:
        module: fully qualified name of the parameter's owner.
        parameter: the parameter's name in its owner.
        site: the product as the graph shows it.
        decision: the policy's decision about the product.
        transposed: True where the parameter is stored ``[K, N]`` rather than ``[N, K]``.
        part: the rows and columns of a parameter of two axes, as ``[N, K]``, that are the second factor; None if the
            factor has another shape, or the parameter more axes.
        autocast: whether torch.autocast casts the parameter for the product.
    """

    module: str
    parameter: str
    site: SiteView
    decision: Decision
    transposed: bool
    part: tuple[range, range] | None
    autocast: bool
