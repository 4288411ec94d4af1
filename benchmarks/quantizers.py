"""Each quantizer of the shipped policies alone, compiled, beside a copy of the same tensor.

A quantizer is an operand's spec with the techniques that act on it; pair transforms (Hadamard) belong to a GEMM and
are in the figures of whole linears. ``row``: blocks run along the tensor's contiguous axis, as in fprop; ``column``:
across it, as where the backward reads dY, W and X transposed. A copy is ``x.clone()``, which like a quantizer allocates
what it writes; bytes are those of the tensor read and of the one written. The tensor has the size of a 1024³ linear's
operands: fresh memory for a much larger one would take more time than copying or quantizing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks import options, tables
from benchmarks.results import RESULTS, Results, attempt, figures_of
from benchmarks.timing import Patience, compare
from fp4graph import load_policy
from fp4graph.graph.plan import plan_site
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.noise import make_key, make_step
from fp4graph.ops import contract
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import total
from fp4graph.policy.words import describe
from fp4graph.technique import QUANTIZER_STAGES, overrides
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import BlockPosition, SiteView

#: In the middle of a stack, where every policy that quantizes blocks quantizes.
POSITION = BlockPosition("blocks", 5, 12)
COLUMNS = (
    tables.case("quantizer"),
    tables.case("layout"),
    tables.case("dtype"),
    *tables.RATIO,
    tables.Column("GB/s", lambda row: f"{row['figures']['bytes_per_second'] / 1e9:.3g}"),
    tables.Column("copy, GB/s", lambda row: f"{row['figures']['copy_bytes_per_second'] / 1e9:.3g}"),
    tables.Column("in policies", lambda row: _shortened(row["figures"]["policies"])),
)
#: Of compiled values from eager ones: what rounding intermediate results to bf16 may do, and no other quantizer gives.
TOLERANCE = 1e-2
TITLE = "Quantizers alone, time to that of a copy"


@dataclass(frozen=True)
class Quantizer:
    """One operand's program, and where it is found."""

    program: OperandProgram
    operand: Operand
    policies: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its spec and techniques in a few words."""
        spec = self.program.spec
        assert spec is not None
        words = [describe(spec)]
        words += [f"zero {spec.scale.zero}"] if spec.scale.zero != "nearest_subnormal" else []
        words += [f"{spec.random_bits} bits"] if spec.rounding == "stochastic" and spec.random_bits != 24 else []
        for technique in self.program.techniques:
            given = technique.model_dump(mode="json", exclude_defaults=True)
            words.append(f"{technique.name}({', '.join(f'{name}={value}' for name, value in given.items())})")
        return " + ".join(words)

    def compiled(self, x: Tensor, backend: str) -> Callable[[Tensor], Tensor]:
        """The program as one compiled function of ``x``, blocks along the last axis."""
        by_name = {technique.name: technique for technique in self.program.techniques}
        key, step = make_key("benchmark", device=x.device), make_step(0, 0, 0, device=x.device)
        first = [contract.initial(by_name[slot.technique], slot.entry, "weight")(x) for slot in self.program.state]

        def quantize(x: Tensor, key: Tensor, step: Tensor, *state: Tensor) -> Tensor:
            entries: dict[str, dict[str, Tensor]] = {}
            for slot, value in zip(self.program.state, state, strict=True):
                entries.setdefault(slot.technique, {})[slot.entry.name] = value
            draw = operand_draw(Draw(key, step), self.operand) if self.program.draws else None
            return total(self.program(x, draw, entries))

        # As in a model: Dynamo, which would trace the program's Python, sees one call, which AOTAutograd traces.
        opaque = torch.compiler.allow_in_graph(quantize)  # type: ignore[no-untyped-call]
        compiled = torch.compile(lambda *tensors: opaque(*tensors), backend=backend, dynamic=False)
        return lambda x: compiled(x, key, step, *first)


def quantizers(policies: list[str]) -> list[Quantizer]:
    """The distinct quantizers of a linear in the middle of each policy's model; equal ones once."""
    site = SiteView("blocks.5.mlp.fc1", "linear", 768, 3072, 768 * 3072, POSITION)
    found: dict[str, Quantizer] = {}
    for name in policies:
        policy = load_policy(name)
        rule = policy.decide(site).rule
        program = plan_site(site, rule).program if rule.quantizes else None
        for operand in Operand:
            own = None if program is None else program.operand(operand)
            if own is None or own.spec is None:
                continue
            quantizer = Quantizer(_bare(own), operand, (name,))
            former = found.get(quantizer.name, replace(quantizer, policies=()))
            found[quantizer.name] = replace(former, policies=tuple(dict.fromkeys((*former.policies, name))))
    return sorted(found.values(), key=lambda q: (-len(q.policies), q.name))


def _bare(program: OperandProgram) -> OperandProgram:
    """``program`` without what its forward does not depend on: where its input is from, techniques that act later."""
    assert program.spec is not None
    techniques = tuple(t for t in program.techniques if any(overrides(t, stage) for stage in QUANTIZER_STAGES))
    names = {technique.name for technique in techniques}
    slots = tuple(slot for slot in program.state if slot.technique in names)
    return replace(program, spec=replace(program.spec, source="original"), techniques=techniques, state=slots)


def measure(quantizer: Quantizer, x: Tensor, layout: str, backend: str, patience: Patience) -> dict[str, Any]:
    """Figures of one quantizer on ``x``."""
    torch._dynamo.reset()
    source = x if layout == "row" else x.mT
    compiled = quantizer.compiled(source, backend)
    with torch.no_grad():
        expected = quantizer.compiled(source, "eager")(source)
        error = ((compiled(source) - expected).float().norm() / expected.float().norm()).item()
        if not error <= TOLERANCE:
            raise RuntimeError(f"compiled, it differs from eager by {error:.1e} of its norm")
        comparison = compare(x.clone, partial(compiled, source), x.device, patience)
        moved = x.nbytes + compiled(source).nbytes
    return {
        **figures_of(comparison),
        "bytes_per_second": moved / comparison.seconds,
        "copy_bytes_per_second": 2 * x.nbytes / comparison.baseline,
        "policies": list(quantizer.policies),
    }


def _shortened(names: list[str], most: int = 2) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _cases(names: list[str], dtypes: list[str]) -> Iterator[tuple[Quantizer, str, str]]:
    for quantizer in quantizers(names):
        for dtype in dtypes:
            for layout in ("row", "column"):
                yield quantizer, layout, dtype


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    context: typer.Context,
    policies: options.Policies = "all",
    dtypes: options.Dtypes = "float32,bfloat16",
    rows: Annotated[int, typer.Option(min=1, help="Of the tensor.")] = 1024,
    columns: Annotated[int, typer.Option(min=1, help="Of the tensor.")] = 1024,
    device: options.Device = "cpu",
    backend: options.Backend = "inductor",
    seconds: options.Seconds = 10,
    repeats: options.Repeats = 11,
    folder: options.Folder = RESULTS,
) -> None:
    on, patience = options.device_of(device), Patience(seconds, repeats)
    results = Results("quantizers", context, on, folder)
    for quantizer, layout, dtype in _cases(options.policies_of(policies), options.choices(dtypes, options.DTYPES)):
        torch.manual_seed(0)
        x = torch.randn(rows, columns, device=on).to(options.DTYPES[dtype])
        about = {"quantizer": quantizer.name, "layout": layout, "dtype": dtype, "tensor": f"{rows}×{columns}"}
        about["backend"] = backend
        results.add(attempt(about, partial(measure, quantizer, x, layout, backend, patience)))
    results.close(TITLE, COLUMNS)


if __name__ == "__main__":
    app()
