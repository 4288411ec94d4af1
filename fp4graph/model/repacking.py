"""What a runtime keeps of ``fp4graph.pack_frozen``: packing the same weights again under another plan of the model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from fp4graph.errors import PolicyError, PolicyWarning
from fp4graph.model.packed import Released, hold
from fp4graph.model.prepare import PhasePlan

REMEDY = "load the original weights and apply the policy again"


class Packing:
    """The packing of a model's frozen weights.

    Args:
        frozen: the other parameters that were frozen when the weights were packed.
    """

    def __init__(self, frozen: Iterable[Tensor]) -> None:
        self._frozen = [weakref.ref(parameter) for parameter in frozen]

    def again(self, plan: PhasePlan, released: Sequence[Released]) -> None:
        """Replace parameters by the bytes that they were made from, under ``plan``.

        Raises:
            PolicyError: the plan asks other values of a weight than those that its bytes were checked for. No weight is
                packed then.
        """
        planned = {(id(weight.module), weight.parameter_name): weight for weight in plan.weights}
        names = []
        for module, own, _ in released:
            weight = planned.get((id(module), own.name))
            if weight is None:
                raise PolicyError(
                    f"{own.path} was packed, and no rule quantizes it any more; its high-precision values are gone: "
                    f"{REMEDY}"
                )
            for choice in weight.choices:
                if choice.plan.program not in own.programs:
                    raise choice.rule.error(
                        f"{weight.name} was packed under another rule or phase, and this one quantizes it from its "
                        f"high-precision values, which are gone; {REMEDY}",
                    )
            names.append(weight.name)
        for (module, own, kept), name in zip(released, names, strict=True):
            hold(module, own.name, name, own.layout, kept, own.programs)
        plan.packed = bool(released)

    def warn_unfrozen(self) -> None:
        """Warn once where parameters that were frozen beside the packed weights now train: the packed ones do not."""
        unfrozen = [p for reference in self._frozen if (p := reference()) is not None and p.requires_grad]
        if unfrozen:
            self._frozen.clear()
            warnings.warn(
                f"{len(unfrozen)} parameters that were frozen when fp4graph.pack_frozen() was called now require "
                "gradients; packed weights are no parameters and stay frozen. To train them too, call "
                "fp4graph.unpack_frozen(model) before unfreezing",
                PolicyWarning,
                stacklevel=3,
            )
