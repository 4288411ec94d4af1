"""GPT-OSS's layout: the experts in MXFP4, everything else in high precision.

``experts.gate_up_proj`` becomes ``experts.gate_up_proj_blocks``, uint8 ``[E, N, K/32, 16]``, and
``experts.gate_up_proj_scales``, uint8 ``[E, N, K/32]``; ``down_proj`` likewise.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from fp4graph.exports.folder import write_config
from fp4graph.exports.layouts import Exported, Layout
from fp4graph.exports.names import keeps_stacks
from fp4graph.exports.packing import element_bytes, scale_bytes
from fp4graph.exports.weights import BLOCK, Fp4Weight, refusal

_PARAMETERS = ("gate_up_proj", "down_proj")


class GptOss(Layout):
    """The layout of OpenAI's GPT-OSS."""

    def packed(self, model: nn.Module, weight: Fp4Weight, input_scale: Tensor | None) -> dict[str, dict[str, Tensor]]:
        """Return blocks and scales of a parameter of experts."""
        module, _, parameter = weight.name.rpartition(".")
        if not keeps_stacks(model, weight) or parameter not in _PARAMETERS:
            raise refusal(
                weight,
                "this layout holds only the experts of GPT-OSS",
                "use format='compressed-tensors'; for a GPT-OSS model, train with a policy whose rules quantize only "
                "op: grouped",
            )
        if weight.scheme.weights != "mxfp4":
            raise refusal(weight, "this layout holds MXFP4, but the weight is NVFP4", "train its last steps with MXFP4")
        block = BLOCK["mxfp4"]
        blocks = element_bytes(weight.elements).reshape(*weight.scales.shape, block // 2)
        return {module: {f"{parameter}_blocks": blocks, f"{parameter}_scales": scale_bytes(weight.scales)}}

    def write_config(self, folder: Path, exported: Exported) -> None:
        """Write ``config.json`` with its ``quantization_config``."""
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": list(exported.kept)}
        write_config(folder, exported.model, quantization)
