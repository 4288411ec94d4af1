"""Other libraries that simulate FP4 in training, used as their documentation describes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import nn


def _torchao(linear: nn.Linear) -> nn.Module:
    from torchao.prototype.qat import MXFakeQuantizeConfig
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    config = MXFakeQuantizeConfig(dtype=torch.float4_e2m1fn_x2)
    model = nn.Sequential(linear)
    quantize_(model, QATConfig(activation_config=config, weight_config=config, step="prepare"))
    if type(model[0]) is nn.Linear:
        raise RuntimeError("torchao did not replace the linear")
    return model


def _brevitas(linear: nn.Linear) -> nn.Module:
    from brevitas.nn import QuantLinear
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act, MXFloat8e4m3Weight

    e2m1 = {"bit_width": 4, "exponent_bit_width": 2, "mantissa_bit_width": 1}
    options = {f"{operand}_{name}": value for operand in ("weight", "input") for name, value in e2m1.items()}
    quantized = QuantLinear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        weight_quant=MXFloat8e4m3Weight,
        input_quant=MXFloat8e4m3Act,
        input_group_dim=-1,
        device=linear.weight.device,
        dtype=linear.weight.dtype,
        **options,
    )
    quantized.weight = linear.weight
    assert isinstance(quantized, nn.Module)
    return quantized


#: By the name of their package. Each makes the library's form of a linear, with the same weight. microxcaling is not on
#: PyPI; nvidia-modelopt's MXFP4 needs CUDA.
PEERS: dict[str, Callable[[nn.Linear], nn.Module]] = {"torchao": _torchao, "brevitas": _brevitas}
#: What both round, two operands of six. Their backward multiplies the unquantized gradient with these; brevitas's also
#: differentiates the scales.
QUANTIZES = "Q1, Q2 (MXFP4, to nearest)"


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def peer_name(name: str, *, compiled: bool) -> str:
    """Return the name of a peer's linear in results."""
    return f"{name}, {'compiled' if compiled else 'eager'}"
