"""Sources of random bits: a site's key, the forward's step, and the salts of the part that draws.

Sites pass randomness to kernels only as a :class:`Draw`. Tensor code takes its bits from :meth:`Draw.noise`; kernels
receive key, step and salts, and derive the same key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4graph.numerics import noise
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.noise import Noise


@dataclass(frozen=True, eq=False)
class Draw:
    """A source of random bits.

    Attributes:
        key: the key of a site, int32 ``[2]`` (:func:`fp4graph.numerics.noise.make_key`).
        step: the step of a forward, int32 ``[5]`` (:func:`fp4graph.numerics.noise.make_step`); None if the bits depend
            on the key alone.
        salts: the salts added so far, outermost part first.
    """

    key: Tensor
    step: Tensor | None = None
    salts: tuple[int, ...] = ()

    def salted(self, *salts: int) -> Draw:
        """Return the source with ``salts`` added; its bits are unrelated to the bits of this source."""
        return replace(self, salts=(*self.salts, *salts))

    @property
    def varying(self) -> Tensor:
        """The key made of :attr:`key`, step and salts, which differs in every forward, int32 ``[2]``."""
        if self.step is None and not self.salts:
            return self.key
        return noise.absorb(self.key, self.step, self.salts)

    @property
    def constant(self) -> Tensor:
        """The key that is the same in every forward and on every rank, int32 ``[2]``."""
        return self.fixed.varying

    @property
    def fixed(self) -> Draw:
        """The source with the same key and salts whose bits are the same in every forward and on every rank."""
        return self if self.step is None else replace(self, step=self.step[2:4])

    @property
    def count(self) -> Tensor | None:
        """The number of forwards with gradients so far, int32, 0-d; None without a step."""
        return None if self.step is None else self.step[4]

    def noise(self, blocking: Blocking, device: torch.device) -> Noise:
        """Return the random bits of this forward for one tensor."""
        return Noise(self.varying, blocking, device)

    def bits(self, count: int) -> Tensor:
        """Return 32 random bits for each index below ``count``, int32, under the key :attr:`varying`."""
        return noise.first_bits(self.key, self.step, self.salts, count)
