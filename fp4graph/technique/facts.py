"""The facts that a technique declares about itself, from which it follows where it may act and which code computes it.

They are known before anything runs. A fact that does not depend on options is an attribute of the class, also where
:class:`Facts` has a property: ``block_rotation: ClassVar[int] = 16``.
"""

from __future__ import annotations

from math import lcm
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from fp4graph.numerics.blocking import Granularity
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.entries import OperandSpecs, Overhead
from fp4graph.technique.operands import Operand
from fp4graph.technique.options import OperandList

#: The elements that may change what a technique does to an element of the same operand; each includes the ones before.
Mixes = Literal["none", "block", "expert", "tensor"]


class Facts(BaseModel):
    """What the engine knows of a technique without calling a stage. Defaults are those of one that declares nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    name: ClassVar[str]
    #: Row of the paper's Table 2, shown by ``fp4graph techniques``.
    overhead: ClassVar[Overhead]
    #: Names of techniques that cannot share a site with this one, and names of techniques that this one needs.
    conflicts: ClassVar[frozenset[str]] = frozenset()
    requires: ClassVar[frozenset[str]] = frozenset()
    #: True if the technique acts once for the whole model (on the loss, on all of an optimizer) and not rule by rule.
    #: It is then declared for the policy, and acts also if nothing is quantized.
    per_model: ClassVar[bool] = False
    #: True if the technique acts on the weight of a linear layer or of experts, and not on an activation in its place.
    on_weight: ClassVar[bool] = False
    #: What an element's result depends on, besides a γ of :attr:`group_granularity` and a :attr:`block_rotation`:
    #: "none", the element, its scale and its part of ``weight_like`` state; "block", also the other elements of its
    #: block; "expert", any element of the operand, in a grouped product (``op: grouped``) any that belongs to the same
    #: expert, which :class:`Groups` and ``context.blocking.segments`` tell apart; "tensor", any element whatever. The
    #: engine refuses "tensor" in grouped products. Statistics of a training quantize a few blocks again instead of
    #: whole operands for "none" and "block", which each class declares for itself.
    mixes: ClassVar[Mixes] = "tensor"
    #: True if the result depends on the number of an operand's elements or blocks, as a quantile does. The engine then
    #: refuses the technique at the operands of wgrad in a grouped product, where zeros fill up the tokens of an expert.
    counts: ClassVar[bool] = False
    #: True if γ is the statistic g of its groups up to a constant, so that operands are quantized as U = X/g. Other
    #: techniques of the operand then read :attr:`group_granularity` as ``context.normalized``.
    normalizes: ClassVar[bool] = False
    #: The plugin that offers the technique, for errors; set by the registry.
    plugin: ClassVar[str | None] = None

    @property
    def complexity(self) -> float:
        """The weight that the technique adds to a policy's Ω (paper Table 9).

        A class declares it as a constant, or as a property if it depends on the options.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no complexity")

    @property
    def group_granularity(self) -> Granularity | None:
        """The elements that share the γ of ``group_scale``; None if there is no γ, or if each call decides."""
        return None

    @property
    def block_rotation(self) -> int | None:
        """The g of a pair transform that is the rotation x·S·H of blocks of g elements; None if it is another.

        S is the diagonal of the one tensor that ``pair_context`` returns, ±1, ``[g]``, or the identity where it returns
        none; H is the orthonormal Sylvester-Hadamard matrix of a power of two g; the product is in fp32, and axes that
        g does not divide are zero-padded. A kernel may then rotate what it reads by itself, and ``transform`` is not
        called. A class that overrides ``transform`` or ``inverse`` says anew whether it is one.
        """
        return None

    @property
    def period(self) -> int:
        """The elements along the contraction axis that are treated together, by a rotation or a γ of so many elements.

        Override it only where a pair transform that is no :attr:`block_rotation` mixes elements along that axis.
        """
        shared = self.group_granularity
        return lcm(self.block_rotation or 1, shared if isinstance(shared, int) else 1)

    @property
    def draws(self) -> bool:
        """True if a tensor stage of this technique uses ``noise``, ``constant`` or ``count`` of its context."""
        return False

    @property
    def draws_in_evaluation(self) -> bool:
        """True if noise that ``after`` adds stays on in evaluation mode; otherwise it is off there."""
        return False

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse ``on_weight`` beside an option that lists operands: the two would contradict each other."""
        if cls.on_weight and (lists := ", ".join(cls.operand_lists())):
            raise TypeError(
                f"{cls.__name__} acts on_weight, and its option {lists} lists operands; declare one of the two"
            )

    # ------------------------------------------------------------------ options that list operands

    @classmethod
    def operand_lists(cls) -> dict[str, OperandList]:
        """Return the options that list operands, by name: those of type :data:`~fp4graph.technique.Operands`."""
        marks = ((name, mark) for name, field in cls.model_fields.items() for mark in field.metadata)
        return {name: mark for name, mark in marks if isinstance(mark, OperandList)}

    @property
    def operands_listed(self) -> frozenset[Operand]:
        """The operands that the options list, by default or as a policy says; empty without such an option."""
        lists = self.operand_lists().items()
        return frozenset().union(*(mark.select(getattr(self, name)) for name, mark in lists))

    @property
    def addresses_given(self) -> dict[str, tuple[str, ...]]:
        """The lists of operands that the policy's author wrote, by option; defaults and scopes are left out."""
        given = {name: getattr(self, name) for name in self.operand_lists() if name in self.model_fields_set}
        return {name: value for name, value in given.items() if isinstance(value, tuple)}

    def specs_listed(self, specs: OperandSpecs) -> dict[Operand, QuantSpec]:
        """Return the specs of the listed operands that are quantized, in TetraJet's order."""
        listed = self.operands_listed
        return {o: spec for o in Operand if o in listed and (spec := specs.get(o)) is not None}
