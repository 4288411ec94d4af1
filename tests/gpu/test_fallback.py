"""On a GPU where kernels do not run, quantizers are tensor code, and one warning names the reason."""

from __future__ import annotations

import importlib.util
import warnings
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp4graph.graph.functions import site_function
from fp4graph.kernels import gpu
from fp4graph.kernels.machine import Machine
from fp4graph.kernels.request import Asked
from fp4graph.kernels.rows import TENSOR_CODE, of_spec
from fp4graph.numerics.spec import QuantSpec
from fp4graph.numerics.target import traced_for
from tests.helpers.sites import program_of

pytest.importorskip("triton", reason="there is no Triton for this system, or it is not installed")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REFUSED = "RuntimeError: PTXASError: no target sm_120"


@pytest.fixture
def card(monkeypatch):
    """Let torch report a card of compute capability 9.0, whose kernels were not tried yet; return the monkeypatch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    gpu.available.cache_clear()
    yield monkeypatch
    gpu.available.cache_clear()


def trial(kernel: str) -> str | None:
    """Return the failure of a trial whose ``kernel`` is wrong or cannot be compiled. For the interpreter's process."""
    from fp4graph.kernels import triton_product, triton_quantize, triton_trial

    class Refusing:
        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("\n  PTXASError: no target sm_120\nand more")

    pack_columns = triton_quantize.quantize_and_pack_columns

    def wrong(*arguments: object) -> tuple[torch.Tensor, ...]:
        y, *packed = pack_columns(*arguments)
        return (torch.where(y == y.max(), 0, y), *packed)

    product = triton_product.scaled_product
    changed = {
        "refused": (triton_quantize, "quantize_kernel", Refusing()),
        "wrong": (triton_quantize, "quantize_and_pack_columns", wrong),
        "refused product": (triton_product, "product_kernel", Refusing()),
        "wrong product": (triton_product, "scaled_product", lambda *arguments: product(*arguments).neg()),
    }
    if kernel not in changed:
        return triton_trial.failure(CPU)
    with mock.patch.object(*changed[kernel]):
        return triton_trial.failure(CPU)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("right", None),
        *((kernel, "a trial gave other values than tensor code") for kernel in ("wrong", "wrong product")),
        *((kernel, f"Triton cannot compile or run them: {REFUSED}") for kernel in ("refused", "refused product")),
    ],
)
def test_the_trial_of_kernels(kernel, expected, interpreter):
    assert interpreter(trial, kernel) == expected


@pytest.mark.parametrize(
    ("capability", "triton", "reason"),
    [
        ((7, 5), True, "compute capability 7.5 is below 8.0"),
        ((9, 0), False, "Triton is not installed"),
        ((9, 0), True, "Triton cannot compile or run"),  # there is no driver here
    ],
)
def test_a_warning_says_once_why_there_are_no_kernels(capability, triton, reason, card):
    assert torch.version.cuda is None or not torch._C._cuda_getDeviceCount()
    card.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    find = importlib.util.find_spec
    card.setattr(importlib.util, "find_spec", lambda name, *rest: find(name, *rest) if triton else None)
    with pytest.warns(UserWarning, match=rf"GPU kernels cannot be used \({reason}.*tensor code"):
        assert of_spec(QuantSpec(), CUDA) == TENSOR_CODE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of_spec(QuantSpec(block=16), CUDA) == of_spec(QuantSpec(), CUDA, Asked.BYTES) == TENSOR_CODE
        assert Machine.of(CUDA).lacks == "the kernels of this cuda cannot be used, as a warning says"


def test_an_absent_gpu_has_tensor_code_and_no_warning():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    gpu.available.cache_clear()
    assert of_spec(QuantSpec(), CUDA) == TENSOR_CODE


@pytest.mark.slow
def test_the_program_for_a_gpu_calls_operators_only_if_the_trial_succeeds(card):

    def called(reason):
        def train(x, w):
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            y = function(x, w, None, None, None, 0)
            torch.autograd.grad(y.sum(), (x, w))
            return y

        card.setattr("fp4graph.kernels.triton_trial.failure", lambda device: reason)
        gpu.available.cache_clear()
        with traced_for("cuda"):
            graph = make_fx(train, tracing_mode="fake")(torch.ones(32, 32), torch.ones(64, 32))
        return {node.target.name() for node in graph.graph.nodes if "fp4graph" in str(node.target)}

    function = site_function(program_of("microscaling", inputs=32, outputs=64), "linear", 1.0, 1.0)
    assert "fp4graph::quantize_both" in called(None)
    with pytest.warns(UserWarning, match="no target sm_120"):
        assert called("no target sm_120") == set()


def test_a_trial_while_a_compiler_traces_is_not_traced(card):
    from fp4graph.kernels import triton_trial

    seen: list[torch.Tensor] = []

    def run(x):
        triton_trial.failure(CPU)
        return x + 1

    def numbers(device):
        seen.append(torch.ones(3))
        return seen[-1]

    card.setattr(triton_trial, "_numbers", numbers)
    with FakeTensorMode():
        graph = make_fx(run)(torch.ones(2))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_function", "output"]
    assert type(seen[0]) is torch.Tensor
