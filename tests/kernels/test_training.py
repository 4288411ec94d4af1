"""Training gives the same bits with kernels and without."""

from __future__ import annotations

import pytest
import torch

from fp4graph.commands.catalogue import shipped_registry
from fp4graph.kernels import cpu, operators
from tests.helpers.floats import assert_same_bits
from tests.helpers.long import long_but_few
from tests.helpers.policies import depth_of, without_experts
from tests.kernels.models import train

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("operation_by_operation")]

POLICIES = without_experts(sorted(shipped_registry().policies))
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def calls(monkeypatch):
    made: list[str] = []

    def spied(name, original):
        def spy(*arguments):
            made.append(name)
            original(*arguments)

        return spy

    for name in ("quantize", "requantize"):
        monkeypatch.setattr(cpu, name, spied(name, getattr(cpu, name)))
    return made


#: Policies under which no kernel quantizes: one quantizes nothing, in the other blocks choose their element format.
WITHOUT_KERNELS = ("bf16", "if4")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*smooth_swiglu.*no effect in this model:fp4graph.PolicyWarning")
@pytest.mark.parametrize("policy", long_but_few(POLICIES))
def test_every_policy_trains_to_the_same_bits(policy, calls):
    blocks = depth_of(policy, 1)
    for dtype in DTYPES:
        by_kernels = train(policy, dtype, blocks=blocks)
        assert bool(calls) is (policy not in WITHOUT_KERNELS)
        calls.clear()
        with operators.tensor_code():
            by_tensor_code = train(policy, dtype, blocks=blocks)
        assert not calls
        assert by_kernels.isfinite().all()
        assert_same_bits(by_kernels, by_tensor_code)


@pytest.mark.captured
def test_double_quantization_reads_bytes(calls):
    """In two GEMMs of two linears in each of three blocks, at each of three steps."""
    train("tetrajet")
    assert calls.count("requantize") == 2 * 2 * 3 * 3


@pytest.mark.captured
@pytest.mark.slow
def test_under_aot_autograd_the_bits_are_those_of_eager(calls):
    compiled = train("tetrajet-qema", torch.bfloat16, "aot_eager", blocks=1)
    assert calls
    assert_same_bits(compiled, train("tetrajet-qema", torch.bfloat16, blocks=1))
