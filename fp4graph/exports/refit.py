"""FP4 weights for a running server: an RL trainer hands its generator the packed matrices of every update."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, suggest
from fp4graph.exports.names import keeps_stacks
from fp4graph.exports.packing import Matrix, element_bytes, matrices, require_storable, scale_bytes
from fp4graph.exports.siblings import Siblings, require_shared
from fp4graph.exports.weights import Fp4Weight, fp4_weights, refuse_computed
from fp4graph.graph.siblings import SIBLINGS, layer_of
from fp4graph.model.distributed import unwrapped
from fp4graph.model.runtime import require_runtime

_NAMES = frozenset(name for family in SIBLINGS for name in family)


class PackedMatrix(NamedTuple):
    """One FP4 matrix ``[N, K]`` as an eval forward multiplies it: element · block scale · global scale.

    Attributes:
        name: the name of the matrix's module in a checkpoint, as in the files of :func:`fp4graph.export`. Each expert
            has a name, except in GPT-OSS, where one name stands for a parameter of all experts, with a leading axis.
        codes: E2M1 elements, uint8 ``[N, K/2]``, two per byte, the first in the low half.
        scales: NVFP4: float8_e4m3fn ``[N, K/16]``. MXFP4: E8M0 exponents with bias 127, uint8 ``[N, K/32]``.
        global_scale: γ of NVFP4, fp32, 0-d; None for MXFP4.
    """

    name: str
    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None


def packed_weights(
    model: nn.Module, *, sent: MutableMapping[str, bytes] | None = None, sibling_scales: str = "refuse"
) -> Iterator[PackedMatrix]:
    """Yield the FP4 matrices of an applied model, to refit a server between updates.

    The values are those of an eval forward now, as :func:`fp4graph.export` writes them. Under ``torch.autocast``
    weights are quantized from autocast's dtype, as in a forward; iterate in the same context as the model is called.
    Parameters that the policy keeps are not yielded; take them from the state dict.

    >>> sent = {}
    >>> for matrix in fp4graph.packed_weights(model, sent=sent):  # at first all matrices, later the changed ones
    ...     server.load(matrix)

    Args:
        model: an applied model that was called at least once after ``apply``.
        sent: digests by name, empty at first. A matrix is left out if its bytes have not changed since its digest. It
            counts as sent when the caller asks for the next matrix, so that a failed transfer is repeated.
        sibling_scales: ``refuse`` raises an error if matrices that servers fuse (query, key and value; gate and up)
            have different tensor scales; a policy with ``tensor_scaling: {share: siblings}`` trains equal scales.
            ``own`` yields different scales, for servers that fuse nothing.

    Raises:
        ExportError: packed matrices cannot hold a weight, or siblings have different tensor scales; the message names
            weights and remedy. Matrices of earlier groups of siblings have been yielded by then.
        Error: the model is not applied, was not called, or is sharded.
    """
    if sibling_scales not in ("refuse", "own"):
        raise Error(f"unknown sibling_scales {sibling_scales!r}; {suggest(sibling_scales, ('refuse', 'own'))}")
    root = unwrapped(model)
    return _changed(root, {} if sent is None else sent, check=sibling_scales == "refuse")


def _changed(root: nn.Module, sent: MutableMapping[str, bytes], *, check: bool) -> Iterator[PackedMatrix]:
    for matrix in _matrices(root, check=check):
        digest = _digest(matrix)
        if sent.get(matrix.name) != digest:
            yield matrix
            sent[matrix.name] = digest


def _matrices(root: nn.Module, *, check: bool) -> Iterator[PackedMatrix]:
    """Yield all matrices; with ``check``, compare the tensor scales of siblings before they are yielded."""
    runtime, pending = require_runtime(root, "packed_weights").up_to_date(), list[Fp4Weight]()
    done: set[str] = set()
    for weight in fp4_weights(runtime, activations=False):
        require_storable(weight)
        done.add(weight.name)
        if pending and not _between_siblings(pending, weight):
            yield from _packed(root, pending, check=check)
            pending = []
        pending.append(weight)
    refuse_computed(runtime, done)
    yield from _packed(root, pending, check=check)


def _packed(root: nn.Module, weights: list[Fp4Weight], *, check: bool) -> Iterator[PackedMatrix]:
    siblings = Siblings()
    for weight in weights if check else ():
        siblings.add(weight, None)
    require_shared(siblings.differing(), "sibling_scales='own' for a server that fuses nothing")
    for weight in weights:
        nvfp4, stack = weight.scheme.weights == "nvfp4", Matrix(weight.elements, weight.scales, weight.multiplier)
        of_name = {weight.name: stack} if keeps_stacks(root, weight) else matrices(root, weight)
        for name, matrix in of_name.items():
            scales = matrix.scales.to(torch.float8_e4m3fn) if nvfp4 else scale_bytes(matrix.scales)
            yield PackedMatrix(name, element_bytes(matrix.elements), scales, matrix.multiplier if nvfp4 else None)


def _between_siblings(pending: list[Fp4Weight], weight: Fp4Weight) -> bool:
    """Return whether ``weight`` is in the module of the last pending one, or inside one whose siblings may follow."""
    owners = {_owner(each) for each in pending if layer_of(each.name).rpartition(".")[2] in _NAMES}
    return _owner(weight) == _owner(pending[-1]) or any(f"{_owner(weight)}.".startswith(f"{o}.") for o in owners)


def _owner(weight: Fp4Weight) -> str:
    """Return the module that holds the layer of ``weight`` and the layer's siblings."""
    return layer_of(weight.name).rpartition(".")[0]


def _digest(matrix: PackedMatrix) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in matrix[1:]:
        if part is not None:
            digest.update(part.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()
