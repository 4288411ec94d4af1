"""Without kernels on a GPU, quantizers are tensor code, and one warning names the reason."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp4graph
from fp4graph.kernels import gpu
from fp4graph.kernels.request import Asked
from fp4graph.kernels.rows import TENSOR_CODE, of_spec
from fp4graph.numerics.spec import QuantSpec
from fp4graph.numerics.target import traced_for

pytest.importorskip("triton", reason="there is no Triton for this system, or it is not installed")

CPU = torch.device("cpu")


@pytest.fixture
def card(monkeypatch):
    """A machine that says it has a card of compute capability 9.0, and has not been asked for kernels yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    gpu.available.cache_clear()
    yield monkeypatch
    gpu.available.cache_clear()


def trial(kernel: str) -> str | None:
    """What a trial says in which a kernel is right, wrong, or not to be compiled. For the interpreter's process."""
    from fp4graph.kernels import triton_product, triton_quantize, triton_trial

    class Refusing:
        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("\n  PTXASError: no target sm_120\nand more")

    own = triton_quantize.quantize_and_pack_columns

    def wrong(*arguments: object) -> tuple[torch.Tensor, ...]:
        y, *packed = own(*arguments)
        return (torch.where(y == y.max(), 0, y), *packed)

    product = triton_product.scaled_product

    def wrong_product(*arguments: object) -> torch.Tensor:
        return product(*arguments).neg()

    changed = {
        "refused": (triton_quantize, "quantize_kernel", Refusing()),
        "wrong": (triton_quantize, "quantize_and_pack_columns", wrong),
        "refused product": (triton_product, "product_kernel", Refusing()),
        "wrong product": (triton_product, "scaled_product", wrong_product),
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
        ("wrong", "a trial gave other values than tensor code"),
        ("refused", "Triton cannot compile or run them: RuntimeError: PTXASError: no target sm_120"),
        ("wrong product", "a trial gave other values than tensor code"),
        ("refused product", "Triton cannot compile or run them: RuntimeError: PTXASError: no target sm_120"),
    ],
)
def test_the_trial(kernel, expected, interpreter):
    assert interpreter(trial, kernel) == expected


def test_a_triton_that_cannot_compile_the_kernel(card):
    """Here Triton has no driver to run anything with; asked for again, nothing is said."""
    assert torch.version.cuda is None or not torch._C._cuda_getDeviceCount()
    cuda = torch.device("cuda")
    with pytest.warns(UserWarning, match=r"GPU kernels cannot be used \(Triton cannot compile or run.*tensor code"):
        assert of_spec(QuantSpec(), cuda) == TENSOR_CODE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of_spec(QuantSpec(block=16), cuda) == TENSOR_CODE
        assert of_spec(QuantSpec(), cuda, Asked.BYTES) == TENSOR_CODE


@pytest.mark.slow
def test_tensor_code_takes_over(card):
    """The program for a GPU calls an operator where the trial succeeds, and none where it fails."""

    def called(reason):
        def train(x, w):
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            torch.autograd.grad(linear(x, w).sum(), (x, w))
            return linear(x, w)

        card.setattr("fp4graph.kernels.triton_trial.failure", lambda device: reason)
        gpu.available.cache_clear()
        with traced_for("cuda"):
            graph = make_fx(train, tracing_mode="fake")(torch.ones(32, 32), torch.ones(64, 32))
        return {node.target.name() for node in graph.graph.nodes if "fp4graph" in str(node.target)}

    from fp4graph.graph.functions import site_function
    from fp4graph.graph.plan import plan_site
    from fp4graph.technique.site import SiteView

    rule = fp4graph.load_policy("microscaling").rules[0]
    program = plan_site(SiteView("fc", "linear", 32, 64, 32 * 64), rule).program
    assert program is not None
    function = site_function(program, "linear", 1.0, 1.0)

    def linear(x, w):
        y: torch.Tensor = function(x, w, None, None, None, 0)
        return y

    assert "fp4graph::quantize_both" in called(None)
    with pytest.warns(UserWarning, match="no target sm_120"):
        assert called("no target sm_120") == set()


def test_a_trial_while_a_compiler_traces_is_no_part_of_the_trace(card):
    seen: list[torch.Tensor] = []

    def run(x):
        triton_trial.failure(CPU)
        return x + 1

    from fp4graph.kernels import triton_trial

    def numbers(device):
        seen.append(torch.ones(3))
        return seen[-1]

    card.setattr(triton_trial, "_numbers", numbers)
    with FakeTensorMode():
        graph = make_fx(run)(torch.ones(2))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_function", "output"]
    assert type(seen[0]) is torch.Tensor
