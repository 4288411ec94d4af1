"""Random bits as a pure function of a key and an element's index: no generator, no state.

The bits come from a counter-based hash in int32 arithmetic, which wraps around alike in eager and in compiled code.
Unlike ``torch.rand``, the hash fuses into the loop that rounds, and gives the same bits when a forward is recomputed.

A *key* is an int32 tensor of two elements. Keys are made from names and counters (:func:`make_key`), combined at run
time (:func:`mix`) and split into unrelated streams (:func:`derive`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fp4graph import torch_internals
from fp4graph.numerics import target
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.declare import operator

_GOLDEN = 0x9E3779B9 - 2**32  # 2^32/φ as int32: spreads consecutive counters over all bits
_BLOCKS = 1 << 16  # added to the salts of per-block bits, so that they differ from those of per-element bits
_Word = TypeVar("_Word", int, Tensor)


def make_key(*parts: int | str, device: torch.device | str | None = None) -> Tensor:
    """Return a key made from names and numbers, int32 ``[2]``, the same in every process.

    Parts are hashed in order; 1 and "1" differ, and so do ("ab",) and ("a", "b").

    Raises:
        TypeError: for a part that is neither an int nor a str.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if not isinstance(part, int | str):
            raise TypeError(f"a key is made of int and str parts; got {part!r}")
        data = part.encode() if isinstance(part, str) else str(int(part)).encode()
        digest.update(f"{type(part) is str:d}{len(data)}:".encode() + data)
    words = digest.digest()
    signed = [int.from_bytes(words[i : i + 4], "little", signed=True) for i in (0, 4)]
    return torch.tensor(signed, dtype=torch.int32, device=device)


def make_step(seed: int, rank: int, count: int, device: torch.device | str | None = None) -> Tensor:
    """Return the step of one forward, int32 ``[5]``: a key of (seed, rank, count), a key of the seed alone, the count.

    The second key is for bits that are drawn once and kept; it is the same on every rank. The count wraps at 2^31.
    """
    words = [make_key("forward", seed, rank, count), make_key("constant", seed)]
    return torch.cat([*words, torch.tensor([count & 0x7FFFFFFF], dtype=torch.int32)]).to(device)


def mix(key: Tensor, other: Tensor) -> Tensor:
    """Return a key that depends on all bits of both keys and on their order, int32 ``[2]``."""
    return absorb(key, other)


def derive(key: Tensor, salt: int) -> Tensor:
    """Return the ``salt``-th derived key, int32 ``[2]``, unrelated to ``key`` and to its other derived keys."""
    return absorb(key, None, (salt,))


def absorb(key: Tensor, other: Tensor | None, salts: Sequence[int] = ()) -> Tensor:
    """Return ``key`` mixed with the first two words of ``other``, unless it is None, then derived by each salt in turn.

    Each word or salt gives a new key, the hash of its two counters under the previous key. On a CPU the chain is run in
    Python's integers: thirty calls of PyTorch on two numbers take a hundred microseconds, and an uncompiled step
    derives some twenty keys per linear layer. On a CPU compilers see a chain as one operator, because Inductor would
    compile each chain separately; a single derivation stays in the loop that uses the key.
    """
    if _readable(key):
        return _absorb(key, other, salts)
    if target.kind(key.device) == "cpu" and (other is not None or len(salts) > 1):
        result: Tensor = torch.ops.fp4graph.absorb(key, other, salts)
        return result
    for word in (*(() if other is None else (other[0], other[1])), *salts):
        # as_strided makes Inductor write the new key to memory. If the key were inlined into its users, each of which
        # reads both words, a chain of d derivations would be traced 2^d times: minutes for a small model.
        key = hash_bits(key, _counters(word, key.device)).as_strided((2,), (1,))
    return key


def _absorb(key: Tensor, other: Tensor | None, salts: Sequence[int]) -> Tensor:
    """Compute :func:`absorb` in Python's integers."""
    return torch.tensor(_absorbed(key, other, salts), dtype=torch.int32)


def _absorbed(key: Tensor, other: Tensor | None, salts: Sequence[int]) -> list[int]:
    """Return the two words of :func:`absorb`."""
    words: list[int] = key.tolist()
    for word in (*(() if other is None else other[:2].tolist()), *salts):
        words = [_wrapped(hash_bits(words, counter)) for counter in _counters_of(word)]
    return words


def _readable(key: Tensor) -> bool:
    """True if the key's numbers can be read at once: the key is on the CPU, and no trace is running."""
    return (
        type(key) is Tensor
        and target.kind(key.device) == "cpu"
        and not torch.compiler.is_compiling()
        and not torch_internals.has_dispatch_mode()
    )


def _counters_of(word: int) -> list[int]:
    return [_wrapped((2 * word + lane) * _GOLDEN + word) for lane in (0, 1)]


def _counters(word: Tensor | int, device: torch.device) -> Tensor:
    """Return the counters 2·word and 2·word + 1, spread apart: c·_GOLDEN + word modulo 2^32, int32 ``[2]``.

    For a Python number the counters are computed in Python: Inductor would make one index expression of the number and
    torch.arange, and its constants would exceed Triton's 32 bits.
    """
    lanes = torch.arange(2, dtype=torch.int32, device=device)
    if isinstance(word, int):
        first, second = _counters_of(word)
        return torch.where(lanes == 0, first, second).to(torch.int32)
    return (lanes + 2 * word) * _GOLDEN + word


def hash_bits(key: Sequence[_Word] | Tensor, index: _Word) -> _Word:
    """Return 32 random bits per element of ``index``, int32: ``F(F(index + key[0]) ^ key[1])``.

    F is lowbias32 (Ettinger, "Prospecting for hash functions"), a bijection with avalanche. One round is not enough:
    the set of values over an index range would be nearly the same for two keys, only its order would change.

    For Python integers the low 32 bits of the result are the bits that tensors give.
    """
    # Key and index are both integers or both tensors.
    return _lowbias32(_lowbias32(index + key[0]) ^ key[1])  # type: ignore[type-var, return-value]


def first_bits(key: Tensor, other: Tensor | None, salts: Sequence[int], count: int) -> Tensor:
    """Return 32 random bits for each index below ``count``, int32, under the key that :func:`absorb` returns.

    On a CPU compilers see one operator, because Inductor would hash again for each element that the bits broadcast to.
    """
    if _readable(key):
        return _first_bits(key, other, salts, count)
    if target.kind(key.device) == "cpu":
        result: Tensor = torch.ops.fp4graph.first_bits(key, other, salts, count)
        return result
    return hash_bits(absorb(key, other, salts), torch.arange(count, dtype=torch.int32, device=key.device))


def _first_bits(key: Tensor, other: Tensor | None, salts: Sequence[int], count: int) -> Tensor:
    """Compute :func:`first_bits` on a CPU with NumPy, which for few indices takes a third of the time of tensors."""
    bits: Any = hash_bits(_absorbed(key, other, salts), np.arange(count, dtype=np.int32))  # type: ignore[type-var]
    return torch.from_numpy(bits)


operator("absorb(Tensor key, Tensor? other, int[] salts) -> Tensor", lambda key, *_: torch.empty_like(key), CPU=_absorb)
operator(
    "first_bits(Tensor key, Tensor? other, int[] salts, SymInt count) -> Tensor",
    lambda key, other, salts, count: key.new_empty((count,)),
    CPU=_first_bits,
)


def gaussian(key: Tensor, index: Tensor) -> Tensor:
    """Return a standard normal variate per element of ``index``, fp32: the sum of twelve 16-bit words, in integers.

    The sum less its mean, times 2^-16, is exact, so compiled code has the same bits (unlike with Box-Muller).
    The variate has mean 0, variance 1 - 2^-32 and excess kurtosis -0.1, and lies within ±6: 0.0020 of its mass lies
    beyond ±3 and 1.7e-5 beyond ±4, where the normal distribution has 0.0027 and 6.3e-5.
    """
    flat = index.reshape(-1)
    keys = torch.stack([derive(key, salt) for salt in range(6)])
    bits = hash_bits((keys[:, :1], keys[:, 1:]), flat)
    # as_strided writes the bits and the sum to memory: Inductor recomputes an unwritten value for each use, here six
    # hashes for every element that the variates are added to.
    bits = bits.as_strided((6, flat.shape[0]), (flat.shape[0], 1))
    total = ((bits & 0xFFFF) + _shift_right(bits, 16)).sum(0, dtype=torch.int32) - 6 * 0xFFFF
    return (total.to(torch.float32) * 2.0**-16).as_strided(flat.shape, (1,)).reshape(index.shape)


def _wrapped(number: int) -> int:
    """Return the number modulo 2^32, as an int32 holds it."""
    return (number + 2**31) % 2**32 - 2**31


def _lowbias32(x: _Word) -> _Word:
    x = x ^ _shift_right(x, 16)
    x = x * 0x7FEB352D
    x = x ^ _shift_right(x, 15)
    x = x * (0x846CA68B - 2**32)
    return x ^ _shift_right(x, 16)


def _shift_right(x: _Word, count: int) -> _Word:
    """Shift right and fill with zeros; int32's own shift copies the sign bit."""
    return (x >> count) & ((1 << (32 - count)) - 1)


@dataclass(frozen=True, eq=False)
class Noise:
    """The random bits of one tensor's quantization.

    ``key`` is int32 ``[2]``, or None. Without a key, :meth:`bits` and :meth:`block_bits` raise ValueError.
    """

    key: Tensor | None
    blocking: Blocking
    device: torch.device

    def bits(self, salt: int = 0) -> Tensor:
        """Return 32 random bits per element, int32, in the blocked layout. Different salts give unrelated bits."""
        return hash_bits(self._derived(salt), self.blocking.index(self.device))

    def block_bits(self, salt: int = 0) -> Tensor:
        """Return 32 random bits per block, int32, in the shape of a statistic."""
        return hash_bits(self._derived(salt + _BLOCKS), self.blocking.block_index(self.device))

    def _derived(self, salt: int) -> Tensor:
        if self.key is None:
            raise ValueError(
                "stochastic rounding needs random bits: pass a key (an int or a tensor from make_key), or, in a "
                "technique, declare draws = True in the part that draws"
            )
        return derive(self.key, salt)
