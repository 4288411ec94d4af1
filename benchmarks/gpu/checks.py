"""The checks of ``make gpu-validate``: bits of kernels and quantizers, and short trainings beside eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import models
from benchmarks.models import MODELS, Training
from fp4graph.kernels import operators
from fp4graph.kernels.devices import GPU
from fp4graph.kernels.direction import Direction, Source
from fp4graph.kernels.inductor import patches
from fp4graph.kernels.request import Asked
from fp4graph.kernels.rows import TENSOR_CODE, of_spec
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec
from tests.gpu.cases import KEY, STEP, operands, programs, quantizers

#: Neither size is a multiple of the kernel's tile, and the second is not a multiple of a block.
SHAPE = (200, 136)
DTYPES = {**models.DTYPES, "float16": torch.float16}
#: Quantizers whose last bits differ between eager mode and Inductor (docs/parity.md, "What is not exact").
INEXACT = ("smooth_max", "low_rank_residual", "hadamard", "rht", "tensor_scaling_gradient")


def kernel_specs() -> dict[str, QuantSpec]:
    """Return every spec of a shipped policy that the GPU's kernels support, named after its first policy."""
    first_policies: dict[QuantSpec, str] = {}
    for name, program in programs():
        for gemm in (program.fprop, program.dgrad, program.wgrad):
            for spec in (gemm.left.spec, gemm.right.spec):
                if spec is not None and GPU.unknown(spec) is None:
                    first_policies.setdefault(spec, f"{name} {spec.element.name}/{spec.block}")
    return {f"{name} #{number}": spec for number, (spec, name) in enumerate(first_policies.items(), 1)}


def kernels(spec: QuantSpec, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Compare every operator with tensor code on the same device; return the number of differing elements."""
    key, step = KEY.to(device), STEP.to(device)
    row_draw = Draw(key, step, (1,)) if spec.needs_key else None
    column_draw = Draw(key, step, (2,)) if spec.needs_key else None
    row_noise, column_noise = (None if source is None else source.varying for source in (row_draw, column_draw))
    differs: dict[str, int] = {}
    compared = 0
    for _, values in operands(SHAPE, spec):
        x = values.to(dtype).to(device)
        # A draw counts the elements of the operand, which is xᵀ where columns are quantized.
        rows, columns = fake_quantize(x, spec, -1, row_noise), fake_quantize(x.mT, spec, -1, column_noise).mT
        for name, pair in _runs(x, spec, row_draw, column_draw, rows, columns):
            differs[name] = differs.get(name, 0) + _different(*pair)
            compared += x.numel()
    return {"differs": differs, "compared": compared, "equal": not any(differs.values())}


def _runs(
    x: Tensor, spec: QuantSpec, row_draw: Draw | None, column_draw: Draw | None, rows: Tensor, columns: Tensor
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield each operator's name, its result and the expected result."""
    yield "quantize, rows", (operators.quantize(x, spec, row_draw), rows)
    yield "quantize, columns", (operators.quantize(x.mT, spec, column_draw).mT, columns)
    if of_spec(spec, x.device, Asked.BYTES, x.dtype, x.dtype) == TENSOR_CODE:
        return
    values, packed = operators.quantize_and_pack(x, spec, row_draw, x.dtype)
    yield "quantize_and_pack", (values, rows)
    yield "unpack", (packed.unpack(), rows)
    noise = None if column_draw is None else column_draw.varying
    yield "requantize", (packed.requantized(spec, column_draw), fake_quantize(rows.mT, spec, -1, noise))
    directions = Direction(spec, row_draw), Direction(spec, column_draw)
    row_values, column_values, _ = operators.quantize_both(x, *directions)
    yield "quantize_both, rows", (row_values, rows)
    yield "quantize_both, columns", (column_values, columns)
    halves = Source([half.to(torch.float32) for half in x.chunk(2, -1)], x.dtype)
    both = *directions[0].flat(given=True), *directions[1].flat(given=True)
    yield "quantize_both, halves that are cast", (torch.ops.fp4graph.quantize_both(*halves, *both, False)[0], rows)
    row_values, packed = operators.quantize_and_pack_columns(x, *directions, x.dtype)
    yield "quantize_and_pack_columns, rows", (row_values, rows)
    yield "quantize_and_pack_columns, bytes", (packed.unpack().mT, columns)


def quantizer(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Compare one quantizer with its techniques, compiled by Inductor with and without kernels, with eager mode."""
    subject = quantizers()[name]
    assert subject.program.spec is not None
    shape = (136, 200) if subject.transposed else SHAPE
    inputs = [(kind, x.to(dtype).to(device)) for kind, x in operands(shape, subject.program.spec)]
    state = [entry.to(device) for entry in subject.state(inputs[0][1].cpu())]
    key, step = KEY.to(device), STEP.to(device)
    differs: dict[str, int] = {}
    with operators.tensor_code():
        expected = [subject(x, key, step, *state) for _, x in inputs]
        compiled = _compiled(subject, (inputs[0][1], key, step, *state))
    with_kernels = _compiled(subject, (inputs[0][1], key, step, *state))
    for (_, x), reference in zip(inputs, expected, strict=True):
        for code, run in (("tensor code", compiled), ("kernels", with_kernels)):
            pairs = zip(run(x, key, step, *state), reference, strict=True)
            differs[code] = differs.get(code, 0) + sum(_different(result, target) for result, target in pairs)
    inexact = any(word in name or any(word in part.name for part in subject.program.parts) for word in INEXACT)
    return {"differs": differs, "equal": not any(differs.values()), "exempt": inexact}


def _compiled(function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Return ``function`` compiled by Inductor with the engine's options."""
    graph = make_fx(function)(*arguments)
    options = patches({}, on_gpu=arguments[0].device.type == "cuda")
    compiled: Any = compile_fx(graph, list(arguments), config_patches=options or None)
    return compiled  # type: ignore[no-any-return]


def _different(x: Tensor, y: Tensor) -> int:
    """Return the number of elements whose bits differ; all NaN count as equal."""
    if x.shape != y.shape or x.dtype is not y.dtype:
        return max(x.numel(), y.numel(), 1)
    if not x.dtype.is_floating_point:
        return int((x != y).sum())
    bits = torch.int32 if x.dtype is torch.float32 else torch.int16
    same = x.contiguous().view(bits) == y.contiguous().view(bits)
    return int((~(same | (x.isnan() & y.isnan()))).sum())


def parity(
    model: str, policy: str, dtype: torch.dtype, device: torch.device, backend: str, steps: int = 8
) -> dict[str, Any]:
    """Train ``model`` compiled, eagerly, and eagerly with the outputs of every linear and norm moved by up to an ulp.

    Compiled code sums in another order, and quantized training amplifies an ulp. The effect of an ulp is therefore the
    unit of a difference, as in tests/parity. ``ratio`` is the largest difference of losses between compiled and eager,
    divided by the largest difference between the two eager trainings, or by 1e-6 of the first loss if that is larger.
    """
    eager = _losses(model, policy, dtype, device, "eager", steps)
    nudged = _losses(model, policy, dtype, device, "eager", steps, nudge=True)
    compiled = _losses(model, policy, dtype, device, backend, steps)
    ulp = max(max(abs(a - b) for a, b in zip(eager, nudged, strict=True)), 1e-6 * abs(eager[0]))
    difference = max(abs(a - b) for a, b in zip(eager, compiled, strict=True))
    return {"ratio": difference / ulp, "difference": difference, "ulp": ulp, "eager": eager, "compiled": compiled}


def _nudged(module: nn.Module, args: Any, y: Tensor) -> Tensor:
    """Move each number, and its gradient, by an ulp up or down or not at all."""
    return _Nudge.apply(y)  # type: ignore[no-any-return]


class _Nudge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return _by_an_ulp(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _by_an_ulp(gradient)


def _by_an_ulp(x: Tensor) -> Tensor:
    towards = torch.randint(-1, 2, x.shape, device=x.device) * torch.inf
    return torch.where(towards.isnan(), x, torch.nextafter(x, towards.to(x.dtype)))


def _losses(
    name: str, policy: str, dtype: torch.dtype, device: torch.device, backend: str, steps: int, nudge: bool = False
) -> list[float]:
    torch._dynamo.reset()
    training = Training(MODELS[name], policy, MODELS[name].size, dtype, device, backend, lr=1e-3)
    if nudge:
        for part in training.model.modules():
            if isinstance(part, nn.Linear | nn.LayerNorm) or type(part).__name__.endswith("RMSNorm"):
                part.register_forward_hook(_nudged)
    training.compile()
    return [float(training.step()) for _ in range(steps)]
