"""Quantized linears keep bytes for their backward where bytes are enough, else the original or dequantized operands."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4graph
from fp4graph.kernels import operators
from fp4graph.kernels.direction import PackedOperand
from tests.helpers.floats import assert_same_bits
from tests.helpers.models import Mlp
from tests.helpers.policies import TIES_UP, one_rule
from tests.kernels.quantizers import MXFP4

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("operation_by_operation")]  # tensor code keeps no bytes

M, K, N = 96, 128, 64  # tokens, in, out
PACKED, BF16 = 1 / 2 + 1 / 32, 2  # bytes per element, of MXFP4 (two codes to a byte, a scale to 32) and of bf16
INPUT, WEIGHT = M * K, N * K
KEYS = 2 * 4 + 5 * 4  # the key of the site, and the step
FROM_FPROP = {"dgrad.weight": {"source": "fprop"}, "wgrad.input": {"source": "fprop"}}


def kept(run: Callable[[], Tensor]) -> list[Tensor]:
    """Return the tensors that ``run()`` saves for its backward, each storage once."""
    held: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        run().sum().backward()
    return list(held.values())


def size(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def of_linear(
    policy: Any, shape: tuple[int, ...] = (M, K), dtype: torch.dtype = torch.bfloat16, needs_grad: bool = True
) -> list[Tensor]:
    """Return the tensors that a linear to N features keeps if its input has ``shape``."""
    linear = nn.Linear(shape[-1], N, bias=False, dtype=dtype)
    if policy is not None:
        fp4graph.apply(linear, policy, backend="eager")
    x = torch.randn(shape, dtype=dtype, requires_grad=needs_grad)
    return kept(lambda: linear(x))


def policy_of(operands: dict[str, Any] = FROM_FPROP, techniques: tuple[Any, ...] = (), **quantize: Any) -> Any:
    """Return TetraJet with changes, for linears anywhere in a model."""
    exceptions = {"backward": {"rounding": "stochastic"}, **operands}
    return one_rule(quantize={**TIES_UP, **quantize}, operands=exceptions, techniques=list(techniques))


INPUT_ALONE, WEIGHT_ALONE = ({key: FROM_FPROP[key]} for key in ("wgrad.input", "dgrad.weight"))
BOTH = PACKED + BF16
#: Policies, with the bytes that are kept per element of the input and of the weight. BF16 stands for the original, or
#: for a dequantized operand that cannot be packed.
CASES: dict[str, tuple[Any, float, float]] = {
    "packed operands": (policy_of(), PACKED, PACKED),
    "originals requantized": (policy_of({}), BF16, BF16),
    "the original weight requantized": (policy_of(INPUT_ALONE), PACKED, BF16),
    "the original input requantized": (policy_of(WEIGHT_ALONE), BF16, PACKED),
    "eight-bit codes": (policy_of(element="e4m3"), 1 + 1 / 32, 1 + 1 / 32),
    "blocks of 16 under fp32": (policy_of(block=16, scale={"format": "fp32"}), 1 / 2 + 4 / 16, 1 / 2 + 4 / 16),
    "blocks that do not fill lanes": (policy_of(block=48), BF16, BF16),
    "blocks of two axes": (policy_of(block=[32, 32]), BF16, BF16),
    "a technique on the weight": (policy_of(techniques=({"q_ema": {"beta": 0.9}},)), PACKED, BF16),
    "rotated in fprop": (policy_of(techniques=({"hadamard": {"kind": "deterministic", "block": 32}},)), BF16, BF16),
    "a gradient of both": (policy_of(techniques=({"step_gradient": {"kind": "sigmoid"}},)), BOTH, BOTH),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_a_linear_keeps(case):
    policy, per_input, per_weight = CASES[case]
    tensors = of_linear(policy)
    assert size(tensors) == per_input * INPUT + per_weight * WEIGHT + KEYS
    if case == "packed operands":  # little more than a quarter of bf16, in an fp32 layer too
        assert size(tensors) <= 0.29 * BF16 * (INPUT + WEIGHT)
        assert {tensor.dtype for tensor in tensors} == {torch.uint8, torch.int32}
        assert size(of_linear(policy, dtype=torch.float32)) == size(tensors)
        assert size(of_linear(policy, needs_grad=False)) == PACKED * INPUT + KEYS  # no gradient reads the weight


@pytest.mark.parametrize("shape", [(M, 72), (3, 5, K), (1, 40)], ids=str)
def test_blocks_are_kept_whole(shape):
    """A last block that is not full takes as many bytes as a full block."""
    tokens, length = torch.Size(shape[:-1]).numel(), -(-shape[-1] // 32) * 32
    assert size(of_linear(policy_of(), shape)) == PACKED * (tokens + N) * length + KEYS


def test_an_unquantized_linear_keeps_its_operands_and_tensor_code_dequantized_operands():
    assert size(of_linear(None)) == BF16 * (INPUT + WEIGHT)
    with operators.tensor_code():
        assert size(of_linear(policy_of())) == BF16 * (INPUT + WEIGHT) + KEYS


def test_bytes_are_lossless():
    """From bytes of an fp32 input and weight under autocast, the backward gets the values that the bf16 GEMM read."""
    linear = fp4graph.apply(nn.Linear(K, N, bias=False), policy_of(), backend="eager")
    x = torch.randn(M, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        tensors = kept(lambda: linear(x))
    for original in (x, linear.weight):
        rows = original.shape[0]
        codes, scales = (next(t for t in tensors if t.shape == shape) for shape in ((rows, K // 2), (rows, K // 32)))
        packed = PackedOperand(codes, scales, MXFP4, K, torch.bfloat16)
        assert_same_bits(packed.unpack(), fp4graph.fake_quantize(original.detach().bfloat16(), MXFP4))


@pytest.mark.captured
@pytest.mark.slow
def test_what_a_model_keeps_under_the_shipped_policy():
    """Two blocks with a linear from K to N and one from N to K, under autocast."""

    def bytes_of(policy):
        stack = nn.Sequential(OrderedDict(blocks=nn.Sequential(*(Mlp(K, N, K, nn.Identity()) for _ in range(2)))))
        model = fp4graph.apply(stack, policy, backend="eager") if policy else stack
        with torch.autocast("cpu", torch.bfloat16):
            return size(kept(lambda: model(torch.randn(M, K, requires_grad=True))))

    elements = 2 * (M * K + M * N + 2 * K * N)
    assert bytes_of(None) == BF16 * elements
    assert bytes_of("tetrajet") == PACKED * elements + (4 * 2 + 5) * 4 <= 0.29 * BF16 * elements
