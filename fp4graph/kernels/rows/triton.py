"""The kernels of a GPU (:mod:`fp4graph.kernels.triton_quantize`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fp4graph.kernels import operators
from fp4graph.kernels.devices import GPU, by_runs
from fp4graph.kernels.quantizers import OfDevice, quantizers
from fp4graph.kernels.request import Asked, Job, Quantizing, Request, Result


class Both(OfDevice):
    """Quantizes a tensor along its rows and along its columns in one read, the columns as values or as bytes."""

    name: ClassVar[str] = "a kernel for both directions"
    asked: ClassVar[Sequence[Asked]] = (Asked.BOTH,)

    def refuses(self, request: Request) -> str | None:
        columns = request.columns
        assert columns is not None
        if request.observed or request.transform is not None:
            return request.transformed or "other code needs the whole operand"
        if request.keeps and (refused := _unkept(columns)) is not None:
            return refused
        if request.source not in self.device.dtypes:
            return f"no kernel reads {request.source}"
        for quantizing in (request.quantizing, columns):
            if (what := self.device.unknown(by_runs(quantizing.spec))) is not None:
                return f"no kernel knows {what}"
            if (refused := self.refuses_one_read(request, quantizing)) is not None:
                return refused
        return None

    def run(self, job: Job) -> Result:
        assert job.columns is not None
        if not job.keeps:
            rows, columns, sums = operators.quantize_both(job.tensor, job.direction, job.columns, job.sums)
            return Result(rows, columns=columns, sums=sums)
        assert job.dtype is not None
        if not job.columns.packs:
            direction = job.direction
            return Result(operators.quantize(job.tensor, direction.spec, direction.draw, direction.given, job.dtype))
        both = job.tensor, job.direction, job.columns
        return Result(*operators.quantize_and_pack_columns(*both, job.dtype, job.multiplier))


def _unkept(columns: Quantizing) -> str | None:
    """Return why no bytes can hold the result along the columns, or None."""
    if not isinstance(columns.spec.block, int):
        return f"no bytes stand for blocks of {columns.spec.block}"
    acting = columns.acting("block_statistic", "scale") or (None if columns.whole else columns.acting("group_scale"))
    return acting and f"no bytes hold the scales: {acting}"


ROWS = (*quantizers(GPU), Both(GPU))
