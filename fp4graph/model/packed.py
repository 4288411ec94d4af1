"""Frozen weights as FP4 bytes: the hooks that make a weight of them for each call of its module.

The parameter leaves its module. Before each call of the module a hook sets a plain attribute in its place, as torch's
weight normalization does, and after the call another replaces it by a :class:`PackedWeight`, which has no values: in
the captured graph, the weight is the result of an operator that reads bytes. The bytes are buffers of the module,
which no state dict holds; a state dict gets the values under the parameter's own name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.model import state
from fp4graph.numerics.packing import Packed, unpack
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.torch_internals import pytree


class Bytes(NamedTuple):
    """What is kept of a weight.

    Attributes:
        codes, scales: of :func:`fp4graph.pack`, blocks along the weight's second axis; lines for 2-D blocks.
        factor: γ, which multiplies all values, fp32 ``[1]``, or None.
        place, largest: where γ is taken from the largest weight: its flat index, int64 ``[1]``, and its value ``[1]``
            as it was before it was quantized; else None. From both a quantizer takes the γ that it took at first.
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor | None = None
    place: Tensor | None = None
    largest: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self if part is not None)


@dataclass(frozen=True, eq=False)
class Layout:
    """How bytes stand for a weight ``[N, K]``.

    Attributes:
        spec: as text, so that Dynamo traces no method of it; blocks of a fixed length along K.
        shape: [N, K]. dtype: of the parameter.
        transposed: whether the parameter is stored ``[K, N]``.
        by_kernel: whether an operator reads the bytes, else tensor code.
        source: the dtype that the weight was quantized from, which is autocast's where autocast was on; None where the
            quantizer reads the parameter itself under autocast too.
    """

    spec: str
    shape: tuple[int, int]
    dtype: torch.dtype
    transposed: bool
    by_kernel: bool
    source: torch.dtype | None = None

    def weight(self, kept: Bytes) -> Tensor:
        """Return the weight as its module stores it."""
        read = torch.ops.fp4graph.unpack if self.by_kernel else _unpack
        w: Tensor = read(kept.codes, kept.scales, self.spec, self.shape[1], self.dtype, kept.factor)
        if kept.place is not None and kept.largest is not None:
            w = w.flatten().index_copy(0, kept.place, kept.largest).reshape(self.shape)
        return w.mT if self.transposed else w


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _unpack(codes: Tensor, scales: Tensor, spec: str, length: int, dtype: torch.dtype, factor: Tensor | None) -> Tensor:
    """Compute the operator ``fp4graph::unpack`` in tensor code."""
    packed = Packed(codes, scales, QuantSpec.from_text(spec), (codes.shape[0], length), 1, torch.float32)
    w = unpack(packed)
    return (w if factor is None else w * factor).to(dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # runs while Dynamo traces, which would go on without a compiler otherwise
def refuse(message: str) -> NoReturn:
    """Raise an Error, inside what Dynamo traces too: the runtime takes it out of Dynamo's own."""
    raise Error(message)


def dtype_to_quantize(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a weight of ``dtype`` is quantized from in the present context: autocast's, where it is
    on."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


class Unpack:
    """Forward pre-hook that gives a module its weight.

    Attributes:
        name: the parameter's. path: its fully qualified name when it was packed.
        layout: of its bytes.
        stand_in: what the parameter was, without data (device meta).
        programs: the programs under which the bytes give the operands that the parameter gave.
    """

    def __init__(
        self, name: str, path: str, layout: Layout, stand_in: nn.Parameter, programs: frozenset[MatmulProgram]
    ) -> None:
        self.name, self.path, self.layout, self.stand_in, self.programs = name, path, layout, stand_in, programs
        self._buffers = tuple(state.buffer_name(f"packed_{name}_{part}") for part in Bytes._fields)

    def __call__(self, module: nn.Module, args: Any) -> None:
        source, weight = self.layout.source, self.weight(module)
        if source is not None and (now := dtype_to_quantize(weight.device.type, self.layout.dtype)) != source:
            refuse(
                f"{self.path} was packed from {source}, and this call quantizes weights from {now}; call the model in "
                "the autocast context in which it was packed, or load its weights after "
                "fp4graph.unpack_frozen(model) and pack in this context"
            )
        setattr(module, self.name, weight)

    def weight(self, module: nn.Module) -> Tensor:
        """Return the weight of ``module``."""
        return self.layout.weight(self.kept(module))

    def kept(self, module: nn.Module) -> Bytes:
        """Return the bytes that ``module`` keeps."""
        buffers: Any = module._buffers
        codes, scales, factor, place, largest = self._buffers
        return Bytes(buffers[codes], buffers[scales], buffers[factor], buffers[place], buffers[largest])

    def keep(self, module: nn.Module, kept: Bytes) -> None:
        """Have ``module`` keep bytes."""
        own = state.State.of(module)
        assert own is not None
        for name, part in zip(self._buffers, kept, strict=True):
            module.register_buffer(name, part, persistent=False)
        own.packed[self.path] = self.layout.dtype

    def drop(self, module: nn.Module) -> None:
        """Take the bytes off ``module``."""
        own = state.State.of(module)
        assert own is not None
        for name in self._buffers:
            delattr(module, name)
        del own.packed[self.path]


class PackedWeight:
    """The attribute of a module in the place of a packed weight, between calls of the module.

    It answers what a parameter without values can: dtype, shape and device. Anything else is an Error, because code
    that reads the weight beside its module (an adapter that is merged, a custom forward) would go wrong.
    """

    def __init__(self, module: nn.Module, unpacking: Unpack) -> None:
        self._module, self._unpacking = module, unpacking

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self._unpacking.kept(self._module).codes.device

    def __getattr__(self, name: str) -> Any:
        # Copy and pickle ask for the first before there is anything else; other libraries try what tensors may have.
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        if name in _WITHOUT_VALUES:
            return getattr(self._unpacking.stand_in, name)
        return self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what torch would compute with the weight."""
        own = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, PackedWeight))
        return own._refuse()

    def _refuse_other(self, other: Any) -> Any:
        return self._refuse()

    __getitem__ = __matmul__ = __mul__ = __rmul__ = __add__ = __sub__ = __truediv__ = _refuse_other

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("_module", "_unpacking"):
            self._refuse()
        super().__setattr__(name, value)

    def _refuse(self) -> Any:
        return refuse(
            f"{self._unpacking.path} is packed, and something reads it outside a call of its module; call "
            "fp4graph.unpack_frozen(model) before, or leave the weight trainable when packing"
        )


#: What a :class:`PackedWeight` takes from the parameter without data.
_WITHOUT_VALUES = frozenset(
    {"dtype", "shape", "ndim", "size", "dim", "numel", "is_floating_point", "is_complex", "requires_grad"}
)


class Forget:
    """Forward hook that takes the weight off its module again."""

    def __init__(self, module: nn.Module, unpacking: Unpack) -> None:
        self.name, self._left = unpacking.name, PackedWeight(module, unpacking)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        setattr(module, self.name, self._left)


class Released(NamedTuple):
    """A weight that was packed: its module, the hook that unpacked it, and its bytes."""

    module: nn.Module
    unpacking: Unpack
    kept: Bytes


@dataclass(eq=False)
class Save:
    """State dict hook that writes the weight's values under the parameter's name."""

    unpack: Unpack

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        state_dict[f"{prefix}{self.unpack.name}"] = self.unpack.weight(module).detach()


@dataclass(eq=False)
class RefuseToLoad:
    """Hook before a state dict is loaded, which has no parameter to go to."""

    name: str

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}{self.name}" in state_dict:
            raise Error(
                f"{prefix}{self.name} is packed and cannot be loaded; call fp4graph.unpack_frozen(model), load, and "
                "pack again"
            )


def hold(
    module: nn.Module, name: str, path: str, layout: Layout, kept: Bytes, programs: frozenset[MatmulProgram]
) -> None:
    """Replace parameter ``name`` of ``module`` by bytes; :class:`Unpack` says what the others are."""
    parameter = module._parameters.pop(name)
    assert parameter is not None
    stand_in = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    unpacking = Unpack(name, path, layout, stand_in, programs)
    unpacking.keep(module, kept)
    forget = Forget(module, unpacking)
    forget(module, None, None)
    module.register_forward_pre_hook(unpacking, prepend=True)  # before the mark, which carries the weight
    module.register_forward_hook(forget, always_call=True)
    module.register_state_dict_post_hook(Save(unpacking))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(RefuseToLoad(name))  # type: ignore[no-untyped-call]


def release(module: nn.Module, unpacking: Unpack) -> Released:
    """Give ``module`` the parameter back, with the values of the bytes."""
    kept = unpacking.kept(module)
    parameter = nn.Parameter(unpacking.layout.weight(kept).detach().contiguous(), requires_grad=False)
    for hooks in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._state_dict_hooks,
        module._load_state_dict_pre_hooks,
    ):
        for key in [key for key, hook in hooks.items() if _is_of(hook, unpacking)]:
            del hooks[key]
            for flags in (module._forward_hooks_always_called, module._forward_pre_hooks_with_kwargs):
                flags.pop(key, None)
    unpacking.drop(module)
    delattr(module, unpacking.name)
    first = dict(module._parameters)
    module._parameters.clear()
    module._parameters.update({unpacking.name: parameter, **first})
    return Released(module, unpacking, kept)


def _is_of(hook: Any, unpacking: Unpack) -> bool:
    own = getattr(hook, "hook", hook)  # load_state_dict's are wrapped
    if isinstance(own, Forget | RefuseToLoad):
        return own.name == unpacking.name
    return own is unpacking or (isinstance(own, Save) and own.unpack is unpacking)


def packed_in(module: nn.Module) -> list[Unpack]:
    """Return the hooks of the packed weights of ``module`` itself."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Unpack)]


def packed_below(root: nn.Module) -> Iterator[tuple[nn.Module, Unpack]]:
    """Yield every packed weight of a model with its module."""
    for module in list(root.modules()):
        for unpacking in packed_in(module):
            yield module, unpacking


def release_all(root: nn.Module) -> list[Released]:
    """Give every packed weight of a model back as a parameter; return what was packed."""
    return [release(module, unpacking) for module, unpacking in list(packed_below(root))]


@contextmanager
def unpacked(root: nn.Module) -> Iterator[list[Released]]:
    """Give packed weights back as parameters for another plan of the model; after an error in the context, pack them
    as they were."""
    released = release_all(root)
    try:
        yield released
    except BaseException:
        for module, own, kept in released:
            hold(module, own.name, own.path, own.layout, kept, own.programs)
        raise


def packed_parameter(module: nn.Module, name: str) -> Unpack | None:
    """Return the hook of parameter ``name`` of ``module`` if it is packed, else None."""
    return next((unpacking for unpacking in packed_in(module) if unpacking.name == name), None)
