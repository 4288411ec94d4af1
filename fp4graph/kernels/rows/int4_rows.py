"""INT4 with one scale for each row, on a CPU, rounded to nearest: an exercise in adding a kernel, in tensor code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fp4graph.kernels.request import INSIDE, OUTSIDE, Job, Kernel, Request, Result
from fp4graph.numerics.formats import INT4
from fp4graph.numerics.quantize import fake_quantize


class Int4Rows(Kernel):
    """Quantizes rows to INT4."""

    name: ClassVar[str] = "INT4 by rows"
    place: ClassVar[int] = 10

    @property
    def kinds(self) -> Sequence[str]:
        return ("cpu",)

    def concerns(self, request: Request) -> bool:
        spec = request.quantizing.spec
        return super().concerns(request) and (spec.element, spec.block) == (INT4, "row")

    def refuses(self, request: Request) -> str | None:
        if request.quantizing.spec.needs_key:
            return "INT4 by rows rounds to nearest"
        return request.machine.lacks or request.quantizing.acting(*OUTSIDE, *INSIDE)

    def run(self, job: Job) -> Result:
        return Result(fake_quantize(job.tensor, job.how.spec))


ROWS = (Int4Rows(),)
