"""The interface of a layout: a way in which servers store FP4 weights in files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from fp4graph.exports.names import stored_names
from fp4graph.exports.weights import Fp4Weight, Scheme


@dataclass(frozen=True, eq=False)
class Exported:
    """A model and its exported modules.

    Attributes:
        model: the exported model.
        schemes: the quantizer of every quantized module, by the module's name in the checkpoint.
        kept: the modules in high precision that a reader could mistake for quantized ones.
    """

    model: nn.Module
    schemes: Mapping[str, Scheme]
    kept: Sequence[str]


class Layout(ABC):
    """A way to store FP4 weights in the files of one export."""

    @abstractmethod
    def packed(self, model: nn.Module, weight: Fp4Weight, input_scale: Tensor | None) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of ``weight`` as the checkpoint stores them: for each module, its tensors by name.

        Args:
            input_scale: γ of the weight's activations, fp32, 0-d; None if they have no tensor scale.

        Raises:
            ExportError: the layout cannot hold the weight.
        """

    def kept(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the high-precision ``tensors`` under their names in the checkpoint; called after :meth:`packed`."""
        return stored_names(model, tensors)

    @abstractmethod
    def write_config(self, folder: Path, exported: Exported) -> None:
        """Write ``config.json`` and further files for the readers of the layout."""
