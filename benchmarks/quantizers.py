"""Each quantizer of the shipped policies alone, compiled, beside a copy of the same tensor.

A quantizer is an operand's spec with the techniques that act on it. Pair transforms (Hadamard) belong to a GEMM and are
in the figures of whole linears. ``row``: blocks run along the tensor's contiguous axis, as in fprop; ``column``: across
it, as where the backward reads dY, W and X transposed. A copy is ``x.clone()``, which allocates its result like a
quantizer; bytes are those read and those written. The tensor has the size of a 1024³ linear's operands: for a much
larger tensor, fresh memory would take more time than copying or quantizing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks import command, tables
from benchmarks.command import Cases, Settings
from benchmarks.models import DTYPES
from benchmarks.timing import compare
from fp4graph import load_policy
from fp4graph.graph.plan import plan_site
from fp4graph.numerics.words import describe
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import total
from fp4graph.technique import QUANTIZER_STAGES
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import BlockPosition, SiteView
from tests.gpu.cases import KEY, STEP
from tests.gpu.cases import Quantizer as QuantizerOfTensors

#: In the middle of a stack, where every policy that quantizes blocks quantizes.
POSITION = BlockPosition("blocks", 5, 12)
COLUMNS = (
    *tables.cases("quantizer", "layout", "dtype"),
    *tables.RATIO,
    tables.figure("bytes_per_second", "GB/s", ".3g", 1e9),
    tables.figure("copy_bytes_per_second", "copy, GB/s", ".3g", 1e9),
    tables.Column("in policies", lambda row: _shortened(row["figures"]["policies"])),
)
#: The largest relative difference of compiled from eager values: rounding intermediate results to bf16 stays below it,
#: and another quantizer exceeds it.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Quantizer:
    """One operand's program, its operand, and the policies that have it."""

    program: OperandProgram
    operand: Operand
    policies: tuple[str, ...]

    @property
    def name(self) -> str:
        """The spec and the techniques in a few words."""
        spec = self.program.spec
        assert spec is not None
        words = [describe(spec)]
        words += [f"zero {spec.scale.zero}"] if spec.scale.zero != "nearest_subnormal" else []
        words += [f"{spec.random_bits} bits"] if spec.rounding == "stochastic" and spec.random_bits != 24 else []
        for technique in dict.fromkeys(part.options for part in self.program.parts):
            options = technique.model_dump(mode="json", exclude_defaults=True)
            words.append(f"{technique.name}({', '.join(f'{name}={value}' for name, value in options.items())})")
        return " + ".join(words)

    def compiled(self, x: Tensor, backend: str) -> Callable[[Tensor], Tensor]:
        """Return the program as one compiled function of ``x``, with blocks along the last axis."""
        subject = QuantizerOfTensors(self.program, self.operand, transposed=False)
        constants = [entry.to(x.device) for entry in (KEY, STEP, *subject.state(x.cpu()))]

        def quantize(x: Tensor, key: Tensor, step: Tensor, *state: Tensor) -> Tensor:
            return total(self.program(*subject.called_on(x, key, step, state)))

        # As in a model: Dynamo, which would trace the program's Python, sees one call, which AOTAutograd traces.
        opaque = torch.compiler.allow_in_graph(quantize)  # type: ignore[no-untyped-call]
        compiled = torch.compile(lambda *tensors: opaque(*tensors), backend=backend, dynamic=False)
        return lambda x: compiled(x, *constants)


def quantizers(policies: list[str]) -> list[Quantizer]:
    """Return the distinct quantizers of a linear in a middle block under each policy."""
    site = SiteView("blocks.5.mlp.fc1", "linear", 768, 3072, 768 * 3072, POSITION)
    distinct: dict[str, Quantizer] = {}
    for name in policies:
        policy = load_policy(name)
        rule = policy.decide(site).rule
        program = plan_site(site, rule).program if rule.quantizes else None
        for operand in Operand:
            operand_program = None if program is None else program.operand(operand)
            if operand_program is None or operand_program.spec is None:
                continue
            quantizer = Quantizer(_bare(operand_program), operand, (name,))
            earlier = distinct.get(quantizer.name, replace(quantizer, policies=()))
            distinct[quantizer.name] = replace(earlier, policies=tuple(dict.fromkeys((*earlier.policies, name))))
    return sorted(distinct.values(), key=lambda q: (-len(q.policies), q.name))


def _bare(program: OperandProgram) -> OperandProgram:
    """Return ``program`` without the parts that its forward ignores: the input's source, techniques that act later."""
    assert program.spec is not None
    parts = tuple(part for part in program.parts if any(map(part.acts_at, QUANTIZER_STAGES)))
    names = {part.name for part in parts}
    slots = tuple(slot for slot in program.state if slot.technique in names)
    return replace(program, spec=replace(program.spec, source="original"), parts=parts, state=slots)


def measure(
    quantizer: Quantizer, shape: tuple[int, int], dtype: str, layout: str, settings: Settings
) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(shape, device=settings.device).to(DTYPES[dtype])
    source = x if layout == "row" else x.mT
    compiled = quantizer.compiled(source, settings.backend)
    with torch.no_grad():
        expected = quantizer.compiled(source, "eager")(source)
        error = ((compiled(source) - expected).float().norm() / expected.float().norm()).item()
        if not error <= TOLERANCE:
            raise RuntimeError(f"the compiled quantizer differs from eager by {error:.1e} of its norm")
        comparison = compare(x.clone, partial(compiled, source), x.device, settings.patience)
        nbytes = x.nbytes + compiled(source).nbytes
    return {
        **comparison.figures,
        "bytes_per_second": nbytes / comparison.seconds,
        "copy_bytes_per_second": 2 * x.nbytes / comparison.baseline,
        "policies": list(quantizer.policies),
    }


def _shortened(names: list[str], most: int = 2) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def cases(
    settings: Settings,
    policies: command.Policies = "all",
    dtypes: command.Dtypes = "float32,bfloat16",
    rows: Annotated[int, typer.Option(min=1, help="Rows of the tensor.")] = 1024,
    columns: Annotated[int, typer.Option(min=1, help="Columns of the tensor.")] = 1024,
) -> Cases:
    chosen = quantizers(command.policies_of(policies)), command.choices(dtypes, DTYPES), ("row", "column")
    for quantizer, dtype, layout in product(*chosen):
        case = {"quantizer": quantizer.name, "layout": layout, "dtype": dtype, "tensor": f"{rows}×{columns}"}
        yield (
            {**case, "backend": settings.backend},
            partial(measure, quantizer, (rows, columns), dtype, layout, settings),
        )


benchmark = command.Benchmark("quantizers", "Quantizers alone, time to that of a copy", COLUMNS, cases, seconds=10)
app = benchmark.app

if __name__ == "__main__":
    app()
