"""The random numbers that a site of an applied model draws, for references that take them as arguments.

Noise is a pure function of names and counters, so that a test can compute the bits with which the engine's rounding
compares. How the engine rounds plays no role here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fp4graph import Operand
from fp4graph.numerics import noise
from fp4graph.numerics.blocking import Blocking

#: Operands whose contraction axis is the first of the matrix as the references have it.
COLUMNWISE = ("dgrad.weight", "wgrad.grad_output", "wgrad.input")


def salt(key: str) -> int:
    """Return the salt of part NAME.KIND of a technique: 32-bit FNV-1a with the top bit cleared and the next bit set."""
    value = 2166136261
    for byte in key.encode():
        value = ((value ^ byte) * 16777619) % 2**32
    return value % 2**30 + 2**30


@dataclass
class SiteBits:
    """The random numbers of the only product of module ``site``, in one forward and its backward.

    Attributes:
        site: the module's full name. forward: the number of earlier forwards with gradients. seed: that of ``apply``.
        signs_per_block: g of the random Hadamard. constant_signs: whether its signs are the same in every forward.
    """

    site: str
    forward: int = 0
    seed: int = 0
    signs_per_block: int = 32
    constant_signs: bool = False

    def uniform(self, operand: str, shape: tuple[int, ...], bits: int = 24) -> np.ndarray:
        """Return numbers in [0, 1) for an operand of ``shape``: below 24 bits, the middles of 2^bits intervals."""
        stored = shape[::-1] if operand in COLUMNWISE else shape
        index = Blocking(stored, "row").index("cpu").reshape(stored)
        words = noise.hash_bits(self._key(operand, 0), index).numpy().astype(np.int64) & 0xFFFFFFFF
        numbers = (words >> (32 - bits)) / 2.0**bits + (0.0 if bits == 24 else 2.0 ** -(bits + 1))
        return numbers.T if operand in COLUMNWISE else numbers

    def signs(self, gemm: str, n: int) -> np.ndarray:
        """Return ``n`` signs: g signs, repeated."""
        left = next(operand for operand in Operand if operand.value.startswith(gemm))
        key = self._key(left.value, salt("hadamard.PairTransform"), constant=self.constant_signs)
        words = noise.hash_bits(key, torch.arange(self.signs_per_block, dtype=torch.int32)).numpy()
        return np.resize(1.0 - 2.0 * (words & 1), n)

    def normal(self, operand: str, n: int) -> np.ndarray:
        """Return ``n`` standard normal numbers."""
        key = self._key(operand, salt("adaptive_quantization_noise.Wrapper"))
        return noise.gaussian(key, torch.arange(n, dtype=torch.int32)).numpy().astype(np.float64)

    def block_uniform(self, operand: str, lines: int, blocks: int) -> np.ndarray:
        """Return the numbers in [0, 1) that ``ms_eden`` draws for an operand's blocks along its contraction axis:
        [lines, blocks]."""
        key = self._key(operand, salt("ms_eden.BlockScale"))
        drawn = noise.Noise(key, Blocking((lines, 16 * blocks), 16), "cpu").block_bits()
        words = drawn.numpy().reshape(lines, blocks).astype(np.int64) & 0xFFFFFFFF
        return (words >> 8) / 2.0**24

    def _key(self, operand: str, salt: int, *, constant: bool = False) -> torch.Tensor:
        words = ("constant", self.seed) if constant else ("forward", self.seed, 0, self.forward)
        key = noise.mix(noise.make_key("site", self.site), noise.make_key(*words))
        for part in (1 + [each.value for each in Operand].index(operand), salt):
            key = noise.derive(key, part)
        return key
