"""The quantizers that the kernels of each kind of device support."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import torch

from fp4graph.kernels.abi import DTYPES
from fp4graph.kernels.tiles import TILE
from fp4graph.numerics.spec import QuantSpec

RUN = 32  # elements of a run, where a block is a line or the whole tensor


@dataclass(frozen=True)
class Device:
    """A kind of device, and the quantizers that its kernels support.

    Attributes:
        dtypes: the dtypes that kernels read and write; tensors of other dtypes are cast to fp32.
        blocks: the block lengths along the contraction axis that kernels support.
        rescales: whether kernels can round elements under one scale and multiply them by another.
    """

    kind: str
    dtypes: frozenset[torch.dtype]
    blocks: Container[int]
    rescales: bool = False

    def unknown(self, spec: QuantSpec) -> str | None:
        """Return the part of ``spec`` that no kernel supports, in a few words, or None. Kernels support blocks of a
        fixed length along the contraction axis, and one element format with codes of up to a byte."""
        block = spec.block
        if not isinstance(block, int) or block not in self.blocks:
            return f"blocks of {'×'.join(map(str, block)) if isinstance(block, tuple) else block}"
        if spec.others:
            return f"a choice between {' and '.join(each.name for each in spec.elements)}"
        return None if spec.element.code_bits <= 8 else f"{spec.element.code_bits}-bit elements"

    def unrounded(self, spec: QuantSpec) -> str | None:
        """Return the part of ``spec`` that no kernel supports even if it gets the block scales, or None.

        On a GPU no kernel rounds blocks that are lines: Inductor fuses their maxima and rounding with the producer.
        """
        if self.kind == "cuda" and spec.block == "row":
            return "blocks of a line"
        return self.unknown(by_runs(spec))

    def unpacked(self, spec: QuantSpec) -> str | None:
        """Return why the result of ``spec`` cannot be kept as bytes and quantized again from them, or None if it can
        be."""
        if (what := self.unknown(spec)) is not None:
            return f"no kernel knows {what}"
        return None if spec.block in _PACKED else f"no bytes stand for blocks of {spec.block}"


_PACKED = frozenset(length for length in range(2, TILE + 1) if TILE % length == 0)
CPU = Device("cpu", frozenset(DTYPES), range(1, 1025), rescales=True)
GPU = Device("cuda", frozenset((torch.float32, torch.bfloat16, torch.float16)), _PACKED)
DEVICES = {device.kind: device for device in (CPU, GPU)}


def by_runs(spec: QuantSpec) -> QuantSpec:
    """Return ``spec`` with blocks that are runs along the contraction axis, as kernels need them; each run lies in one
    block of ``spec``."""
    if isinstance(spec.block, int):
        return spec
    return replace(spec, block=RUN if isinstance(spec.block, str) else spec.block[1])
