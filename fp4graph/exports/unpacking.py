"""Frozen weights as FP4 bytes: hooks that make a weight from its bytes for each call of its module.

The module loses its parameter. Before each call of the module a hook sets the weight as a plain attribute, as torch's
weight normalization does. After the call another hook replaces the weight by a :class:`PackedWeight`, which has no
values. In the captured graph, the weight is the result of an operator that reads bytes. The bytes are buffers of the
module that a state dict leaves out; instead it has the weight's values under the parameter's name.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyWarning
from fp4graph.graph.nested import nested
from fp4graph.model import state
from fp4graph.model.source import Source
from fp4graph.model.weight import Weight
from fp4graph.numerics.packing import Packed, unpack
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.gemm import MatmulProgram


class Bytes(NamedTuple):
    """The tensors that replace a weight.

    Attributes:
        codes, scales: as :func:`fp4graph.pack` returns them for blocks along the weight's second axis. Scales of 2-D
            blocks are repeated for each line.
        factor: γ, which multiplies all values, fp32 ``[1]``; None without γ.
        place, largest: the flat index of the largest weight, int64 ``[1]``, and its value before quantization, ``[1]``,
            from which a quantizer computes the same γ again; None if γ does not depend on them.
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor | None = None
    place: Tensor | None = None
    largest: Tensor | None = None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _unpack(codes: Tensor, scales: Tensor, spec: str, length: int, dtype: torch.dtype, factor: Tensor | None) -> Tensor:
    """Compute the result of the operator ``fp4graph::unpack`` in tensor code."""
    packed = Packed(codes, scales, QuantSpec.from_text(spec), (codes.shape[0], length), 1, torch.float32)
    w = unpack(packed)
    return (w if factor is None else w * factor).to(dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # runs while Dynamo traces, which otherwise would continue uncompiled
def refuse(message: str) -> NoReturn:
    """Raise an Error, also in code that Dynamo traces; the runtime extracts it from Dynamo's error."""
    raise Error(message)


def dtype_to_quantize(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype from which a weight of ``dtype`` is quantized in the present context: autocast's if enabled."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


class Frozen:
    """Parameters that were frozen, but not packed, when weights were packed."""

    def __init__(self) -> None:
        self._parameters: list[weakref.ref[Tensor]] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters."""
        self._parameters += map(weakref.ref, parameters)

    def warn_unfrozen(self) -> None:
        """Warn once if some of the parameters now train, because packed weights stay frozen."""
        unfrozen = [p for reference in self._parameters if (p := reference()) is not None and p.requires_grad]
        if unfrozen:
            self._parameters.clear()
            warnings.warn(
                f"{len(unfrozen)} parameters that were frozen when fp4graph.pack_frozen() was called now require "
                "gradients; packed weights are not parameters and stay frozen. To train them too, call "
                "fp4graph.unpack_frozen(model) before unfreezing",
                PolicyWarning,
                stacklevel=3,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Frozen:
        memo[id(self)] = twin = Frozen()
        twin.watch([copy.deepcopy(p, memo) for reference in self._parameters if (p := reference()) is not None])
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return Frozen, ()


class Unpack(Source):
    """The bytes of a weight ``[N, K]``, as its source.

    Args:
        weight: the weight to pack.
        spec: the spec of the bytes: 4-bit elements in blocks of a fixed length along K.
        by_kernel: whether an operator reads the bytes; else tensor code reads them.
        origin: the dtype from which the weight was quantized (autocast's if enabled); None if the quantizer always
            reads the parameter itself.
        frozen: the frozen parameters that are not packed; all weights that one call packs share this object.
    """

    def __init__(
        self, weight: Weight, spec: QuantSpec, by_kernel: bool, origin: torch.dtype | None, frozen: Frozen
    ) -> None:
        self.name, self.path, self._transposed = weight.parameter_name, weight.name, weight.stored_transposed
        self.stand_in = nn.Parameter(torch.empty_like(weight.stored, device="meta"), requires_grad=False)
        self.programs: set[MatmulProgram] = set()
        self._spec, self._dtype = spec.to_text(), weight.stored.dtype  # Dynamo does not trace methods of strings
        self._by_kernel, self._origin, self.before_training = by_kernel, origin, frozen.warn_unfrozen
        self._buffers = tuple(f"{state.PACKED}{self.name}_{part}" for part in Bytes._fields)

    def __call__(self, module: nn.Module, args: Any) -> None:
        origin, weight = self._origin, self.values(module)
        if origin is not None and (now := dtype_to_quantize(weight.device.type, self._dtype)) != origin:
            refuse(
                f"{self.path} was packed from {origin}, and this call quantizes weights from {now}; call the model in "
                "the autocast context in which it was packed, or load its weights after "
                "fp4graph.unpack_frozen(model) and pack in this context"
            )
        setattr(module, self.name, weight)

    def values(self, module: nn.Module) -> Tensor:
        w = self.matrix(self.kept(module))
        return w.mT if self._transposed else w

    def matrix(self, kept: Bytes) -> Tensor:
        """Return the weight ``[N, K]`` that ``kept`` stores."""
        read = torch.ops.fp4graph.unpack if self._by_kernel else _unpack
        w: Tensor = read(kept.codes, kept.scales, self._spec, 2 * kept.codes.shape[1], self._dtype, kept.factor)
        if kept.place is not None and kept.largest is not None:
            w = w.flatten().index_copy(0, kept.place, kept.largest).reshape(w.shape)
        return w

    def kept(self, module: nn.Module) -> Bytes:
        """Return the bytes in ``module``."""
        buffers: Any = module._buffers
        codes, scales, factor, place, largest = self._buffers
        return Bytes(buffers[codes], buffers[scales], buffers[factor], buffers[place], buffers[largest])

    def require_dtype(self, dtype: torch.dtype) -> None:
        if dtype != self._dtype:
            raise Error(
                f"{self.path} is packed as bytes of {self._dtype} and cannot become {dtype}; call "
                "fp4graph.unpack_frozen(model), convert the model, and call fp4graph.pack_frozen(model) again"
            )

    def require_absent(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        if (name := f"{prefix}{self.name}") in state_dict:
            raise Error(
                f"{name} is packed and cannot be loaded; call fp4graph.unpack_frozen(model), load, and pack again"
            )

    def hold(self, module: nn.Module, kept: Bytes) -> None:
        """Replace the parameter of ``module`` with bytes."""
        del module._parameters[self.name]
        for name, part in zip(self._buffers, kept, strict=True):
            module.register_buffer(name, part, persistent=False)
        drop = _DropWeight(self, PackedWeight(module, self))
        drop(module, None, None)
        module.register_forward_pre_hook(self, prepend=True)  # before the mark, which carries the weight
        module.register_forward_hook(drop, always_call=True)
        module.register_state_dict_post_hook(_Save(self))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_RefuseToLoad(self))  # type: ignore[no-untyped-call]

    def release(self, module: nn.Module) -> Callable[[], None]:
        kept = self.kept(module)
        parameter = nn.Parameter(self.values(module).detach().contiguous(), requires_grad=False)
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._state_dict_hooks,
            module._load_state_dict_pre_hooks,
        ):
            for key in [key for key, hook in hooks.items() if self._has_hook(hook)]:
                del hooks[key]
                for flags in (module._forward_hooks_always_called, module._forward_pre_hooks_with_kwargs):
                    flags.pop(key, None)
        for name in (*self._buffers, self.name):
            delattr(module, name)
        others = dict(module._parameters)
        module._parameters.clear()
        module._parameters.update({self.name: parameter, **others})
        return functools.partial(self.hold, module, kept)

    def _has_hook(self, hook: Any) -> bool:
        hook = getattr(hook, "hook", hook)  # torch wraps hooks of load_state_dict
        return hook is self or (isinstance(hook, _Hook) and hook.source is self)


@dataclass(eq=False)
class _Hook:
    """A hook of a source."""

    source: Unpack


@dataclass(eq=False)
class _DropWeight(_Hook):
    """Forward hook that replaces the weight by a :class:`PackedWeight` again."""

    replacement: PackedWeight

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        setattr(module, self.source.name, self.replacement)


class _Save(_Hook):
    """State dict hook that writes the weight's values under the parameter's name."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        state_dict[f"{prefix}{self.source.name}"] = self.source.values(module).detach()


class _RefuseToLoad(_Hook):
    """Hook that refuses to load a state dict with the packed weight."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.source.require_absent(state_dict, prefix)


class PackedWeight:
    """The attribute that replaces a packed weight between calls of its module.

    It has the dtype, shape, layout and device of the parameter. Any other access raises an Error, because code that
    reads the weight outside a call (merging an adapter, a custom forward) would get wrong results.
    """

    def __init__(self, module: nn.Module, unpacking: Unpack) -> None:
        self._module, self._unpacking = module, unpacking

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up dunder names before _unpacking is set, and libraries probe for other attributes.
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        if name in _WITHOUT_VALUES:
            return getattr(self._unpacking.stand_in, name)
        if name in _OF_DEVICE:
            return getattr(self._unpacking.kept(self._module).codes, name)
        return self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse computations of torch with the weight."""
        weight = next(nested((args, kwargs), PackedWeight))
        return weight._refuse()

    def _refuse_other(self, other: Any) -> Any:
        return self._refuse()

    __getitem__ = __matmul__ = __mul__ = __rmul__ = __add__ = __sub__ = __truediv__ = _refuse_other

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("_module", "_unpacking"):
            self._refuse()
        super().__setattr__(name, value)

    def _refuse(self) -> Any:
        return refuse(
            f"{self._unpacking.path} is packed, but was read outside a call of its module; call "
            "fp4graph.unpack_frozen(model) before the read, or leave the weight trainable when packing"
        )


#: The attributes that a :class:`PackedWeight` takes from ``stand_in``, a parameter without data.
_WITHOUT_VALUES = frozenset({
    "dtype", "itemsize", "element_size", "is_floating_point", "is_complex", "is_signed", "is_quantized",
    "shape", "ndim", "size", "dim", "numel", "nelement", "ndimension",
    "layout", "is_sparse", "is_sparse_csr", "is_mkldnn", "is_nested", "requires_grad", "is_leaf", "grad", "grad_fn",
})  # fmt: skip
#: The attributes that it takes from the bytes, which are on the device of the parameter.
_OF_DEVICE = frozenset({"device", "get_device", "is_meta", "is_cpu", "is_cuda", "is_xpu", "is_mps", "is_xla"})
