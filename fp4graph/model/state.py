"""The state that fp4graph keeps inside a model: buffers under ``*._fp4graph.*`` and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.model.conversion import refuse
from fp4graph.numerics import noise
from fp4graph.numerics.sharding import is_sharded, like, whole

#: Name of the submodule that holds our buffers, on the root and on every module with planned sites.
NAME = "_fp4graph"

_V = TypeVar("_V")


def is_ours(key: str) -> bool:
    """Return whether a state-dict key belongs to fp4graph."""
    return NAME in key.split(".")


def strip(state_dict: Mapping[str, _V]) -> dict[str, _V]:
    """Return ``state_dict`` without fp4graph's entries: the result loads strictly into the plain model."""
    return {key: value for key, value in state_dict.items() if not is_ours(key)}


class State(nn.Module):
    """A module of buffers that keeps its dtypes whatever ``.to`` says, and loads a checkpoint without them.

    An EMA with β = 0.998 freezes in bf16, whose neighbours are 0.4 % apart; so a cast moves buffers between devices and
    never changes their dtype.

    ``loaded`` says whether a state dict gave any of the buffers their values.
    """

    loaded = False

    def __prepare_scriptable__(self) -> State:
        refuse("torch.jit.script")
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> State:
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype is buffer.dtype else buffer.to(moved.device)
        for child in self.children():
            child._apply(fn)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        local_metadata, strict, _missing, *rest = args
        own = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        absent: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, absent, *rest)
        for key in absent:
            self.reset(key.removeprefix(prefix))
        given = {name: state_dict.get(f"{prefix}{name}") for name in own}
        self.loaded |= any(value is not None and not _share(value, own[name]) for name, value in given.items())

    def reset(self, name: str) -> None:
        """Give buffer ``name`` its first value again, because a plain checkpoint without it was loaded."""


def _share(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors share memory: torch's distributed checkpoint loads what it has no values for from the
    model itself."""
    first, second = (t.to_local() if is_sharded(t) else t for t in (x, y))
    return first.device == second.device and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


class SiteState(State):
    """The state of one module with planned sites: its noise key, and each weight's technique entries.

    Attributes:
        packed: the dtype of each weight that is kept as bytes, by its name.
    """

    def __init__(self, fqn: str, device: torch.device) -> None:
        super().__init__()
        self.fqn = fqn
        self.packed: dict[str, torch.dtype] = {}
        self._version_of_key = 0
        # Derivable from the name, so not saved.
        self.register_buffer("key", None, persistent=False)
        self._make_key(device)
        self._weights: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {}

    def add(self, name: str, init: Callable[[Tensor], Tensor], weight: Callable[[], Tensor]) -> None:
        """Add entry ``name`` with the first value ``init(weight())``."""
        self._weights[name] = (init, weight)
        self.register_buffer(name, self._first(name))

    def _first(self, name: str) -> Tensor:
        init, weight = self._weights[name]
        with torch.no_grad():
            parameter = weight().detach()
            first = init(whole(parameter))
            return like(first, parameter) if first.shape == parameter.shape else first

    def reset(self, name: str) -> None:
        if name in self._weights:
            former = self._buffers[name]
            self._buffers[name] = self._first(name) if former is None else like(self._first(name), former)

    def restart(self) -> None:
        """Give every entry its first value again, from the weights as they are now, unless values were loaded."""
        for name in () if self.loaded else self._weights:
            self.reset(name)

    def settle(self) -> None:
        """Shard entries of the weight's shape as the weight is sharded now, and undo a write to the key: an average
        over a model's buffers (``AveragedModel(use_buffers=True)``) changes it."""
        key = self.get_buffer("key")
        if key._version != self._version_of_key:
            key.copy_(noise.make_key("site", self.fqn))
            self._version_of_key = key._version
        for name, (_, weight) in self._weights.items():
            buffer, parameter = self._buffers[name], weight()
            if buffer is not None and buffer.shape == parameter.shape:
                self._buffers[name] = like(buffer, parameter)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SiteState:
        device = self.get_buffer("key").device
        for name, dtype in self.packed.items():
            if (given := fn(torch.empty(0, dtype=dtype, device=device)).dtype) != dtype:
                raise Error(
                    f"{name} is packed as bytes of {dtype} and cannot become {given}; call "
                    "fp4graph.unpack_frozen(model), convert the model, and call fp4graph.pack_frozen(model) again"
                )
        super()._apply(fn, recurse)
        self._make_key(self.get_buffer("key").device)  # to_empty() left it undefined
        return self

    def _make_key(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # tensors made in it have no version
            self._buffers["key"] = key = noise.make_key("site", self.fqn, device=device)
        self._version_of_key = key._version

    def __getstate__(self) -> dict[str, Any]:
        # Closures over the weight do not travel; apply() makes them anew.
        state = self.__dict__.copy()
        state["_weights"] = {}
        return state


def site_states(root: nn.Module) -> list[SiteState]:
    """Return the state of every module below ``root`` that has planned sites."""
    return [module for module in root.modules() if isinstance(module, SiteState)]


def buffers_to_keep(root: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of an application that the next one takes over, by name.

    Before the first training forward these are only the buffers of states that were loaded: others begin at the weights
    as they are by then.
    """
    trained = any(isinstance(module, RootState) and module.count for module in root.modules())
    idle = {id(buffer) for own in site_states(root) if not own.loaded for buffer in own.buffers()}
    buffers = root.named_buffers(remove_duplicate=False)
    return {name: value for name, value in buffers if is_ours(name) and (trained or id(value) not in idle)}


#: Entries that the state of the root had in state dicts of fp4graph before it kept the count out of them.
_FORMER = ("forwards", "_extra_state")


def split_former(state_dict: Mapping[str, _V]) -> tuple[dict[str, _V], int | None]:
    """Return ``state_dict`` without the entries that no model has any more, and the count among them or None."""
    former = {key for key in state_dict if is_ours(key) and key.rpartition(".")[2] in _FORMER}
    counts = [state_dict[key] for key in former if key.endswith(".forwards")]
    rest = {key: value for key, value in state_dict.items() if key not in former}
    return rest, int(counts[0]) if counts else None  # type: ignore[call-overload]


class RootState(State):
    """The count of root forwards with gradients enabled.

    It is no entry of the model's state dict: it travels with the optimizer's state and in our checkpoints.

    ``followed`` is the count of the model that this one was copied from, until this one trains: then it goes on from
    its own count, which is that of the moment of copying.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        self._count = 0  # mirror of the buffer, so that no forward waits for a device
        self.followed: int | None = None

    @property
    def count(self) -> int:
        """The number of root forwards with gradients enabled."""
        return self._count if self.followed is None else self.followed

    def advance(self) -> None:
        """Count one more root forward with gradients enabled."""
        self.count_from(self._count + 1)

    def count_from(self, count: int) -> None:
        """Set the count."""
        self._count = count
        self.get_buffer("forwards").fill_(count)

    def recount(self) -> None:
        """Take the count from the buffer, which another process may have changed."""
        self._count = int(self.get_buffer("forwards"))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        rest, count = split_former({key: value for key, value in state_dict.items() if key.startswith(prefix)})
        super()._load_from_state_dict(rest, prefix, *args)
        if count is not None:
            self.count_from(count)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RootState:
        super()._apply(fn, recurse)
        self.get_buffer("forwards").fill_(self._count)  # to_empty() left it undefined
        return self
