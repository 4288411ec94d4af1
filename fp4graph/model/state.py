"""The state that fp4graph keeps in a model: buffers of the model's own modules, and one plain object beside them.

A module with planned sites holds its noise key and its weights' technique entries as buffers of its own, and the root
holds the count of forwards. No module is added: ``children()``, ``modules()`` and leaves are the plain model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.model.conversion import refuse
from fp4graph.model.source import sources_of
from fp4graph.numerics import noise
from fp4graph.numerics.sharding import is_sharded, like, whole

#: The attribute of a module that holds its :class:`State`. Former layouts had a submodule of this name.
NAME = "_fp4graph"
#: The methods of a module that its :class:`State` overrides.
_METHODS = {
    "_apply": "convert",
    "_load_from_state_dict": "load",
    "_save_to_state_dict": "save",
    "__prepare_scriptable__": "refuse_script",
}
#: Names of entries that state dicts of former layouts have and models no longer have.
_FORMER = ("forwards", "_extra_state")

_V = TypeVar("_V")


def buffer_name(name: str) -> str:
    """Return the name of the buffer in which a module keeps ``name`` for fp4graph."""
    return f"{NAME}_{name}"


KEY, FORWARDS = buffer_name("key"), buffer_name("forwards")
#: The prefix of buffers that a :class:`Source` keeps under any policy.
PACKED = buffer_name("packed_")


def is_ours(key: str) -> bool:
    """Return whether a state-dict key, or a buffer's name, belongs to fp4graph, in this layout or a former one."""
    *modules, name = key.split(".")
    return name.startswith(buffer_name("")) or NAME in modules


def strip(state_dict: Mapping[str, _V]) -> dict[str, _V]:
    """Return ``state_dict`` without fp4graph's entries: the result loads strictly into the plain model."""
    return {key: value for key, value in state_dict.items() if not is_ours(key)}


def require_free(root: nn.Module) -> None:
    """Raise an Error if the model itself uses names of fp4graph's state."""
    for fqn, module in root.named_modules():
        taken = [NAME] if NAME in module.__dict__ and State.of(module) is None else []
        buffers = () if State.of(module) is not None or sources_of(module) else module._buffers
        taken += [name for name in (*module._modules, *module._parameters, *buffers) if name == NAME or is_ours(name)]
        if taken:
            raise Error(
                f"{type(module).__name__} {fqn or '(root)'!r} has an attribute {taken[0]!r}, but names that begin with "
                f"{NAME!r} belong to fp4graph's state; rename the attribute"
            )


def from_former(state_dict: Mapping[str, _V]) -> tuple[dict[str, _V], int | None]:
    """Return ``state_dict`` with the entries of former layouts under their present names, and the count of forwards in
    a former layout, or None."""
    present: dict[str, _V] = {}
    count = None
    for key, value in state_dict.items():
        module, separator, name = f".{key}".partition(f".{NAME}.")
        if separator and name.rpartition(".")[2] in _FORMER:
            count = int(value) if name.endswith("forwards") else count  # type: ignore[call-overload]
        else:
            present[f"{module}.{buffer_name(name)}"[1:] if separator else key] = value
    return present, count


class State:
    """The state of one module: buffers of the module, and facts about them in this object.

    A cast moves the buffers between devices and never changes their dtype: an EMA with β = 0.998 would freeze in bf16,
    whose neighbours are 0.4 % apart. A checkpoint without the buffers can be loaded. While a module has state,
    attributes override methods of the module and call the methods of its class, because torch has no hook for a cast,
    and no hook between loading a module's values and reporting missing keys.

    Attributes:
        module, fqn: the owner of the buffers, and its fully qualified name.
        loaded: whether a state dict gave values to any of the technique entries.
        of_phases: the names of the entries that only some phases of the policy keep.
        tied: the states with entries for a parameter of the module, which other modules may have too.
    """

    def __init__(self, module: nn.Module, fqn: str) -> None:
        self.module, self.fqn = module, fqn
        self.loaded = False
        self.of_phases: set[str] = set()
        self.tied: list[State] = []
        self._version_of_key = 0
        self._given: tuple[Any, set[str]] = None, set()  # the last load, and the entries that it gave values to
        self._weights: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {}
        module.__dict__[NAME] = self
        module.__dict__.update({method: getattr(self, override) for method, override in _METHODS.items()})

    @staticmethod
    def of(module: nn.Module) -> State | None:
        """Return the state of ``module``, or None."""
        state = module.__dict__.get(NAME)
        return state if isinstance(state, State) else None

    def remove(self) -> None:
        """Remove the state from the module, except the buffers of packed weights."""
        self.waiting = {}
        for name in (NAME, *_METHODS):
            self.module.__dict__.pop(name, None)  # a model that an earlier version pickled lacks later methods
        names = [name for name in self.module._buffers if is_ours(name)]  # a value may be None
        for name in [name for name in names if not name.startswith(PACKED)]:
            delattr(self.module, name)

    @property
    def key(self) -> Tensor:
        """The noise key of the module's sites."""
        return self.module.get_buffer(KEY)

    @property
    def has_sites(self) -> bool:
        """Return whether the module has planned sites, and so a key."""
        return KEY in self.module._buffers

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers that fp4graph keeps in the module, by name."""
        named = self.module._buffers.items()
        return {name: buffer for name, buffer in named if buffer is not None and is_ours(name)}

    @property
    def waiting(self) -> dict[str, Tensor]:
        """Loaded values of entries of another phase, until a training forward begins in this one. A model that resumes
        is in the first phase when its state dict is loaded, and enters the saved phase afterwards.

        They are attributes of the module, because torch's distributed checkpoints look there for every entry.
        """
        attributes = self.module.__dict__
        return {name: attributes[name] for name in sorted(self.of_phases) if name in attributes}

    @waiting.setter
    def waiting(self, values: Mapping[str, Tensor]) -> None:
        for name in self.waiting:
            del self.module.__dict__[name]
        self.module.__dict__.update(values)

    def add_key(self, device: torch.device) -> None:
        """Add the noise key. It is not saved, because it follows from the module's name."""
        self.module.register_buffer(KEY, None, persistent=False)
        self._make_key(device)

    def add(
        self, name: str, init: Callable[[Tensor], Tensor], weight: Callable[[], Tensor], *, persistent: bool = True
    ) -> None:
        """Add the technique entry in buffer ``name``, with the initial value ``init(weight())``."""
        self._weights[name] = (init, weight)
        self.module.register_buffer(name, self._initial(name), persistent)

    def _initial(self, name: str) -> Tensor:
        init, weight = self._weights[name]
        with torch.no_grad():
            parameter = weight().detach()
            value = init(whole(parameter))
            return like(value, parameter) if value.shape == parameter.shape else value

    def _reset(self, name: str) -> None:
        buffer, initial = self.module._buffers[name], self._initial(name)
        self.module._buffers[name] = initial if buffer is None else like(initial, buffer)

    def restart(self) -> None:
        """Reset every entry to its initial value for the present weights, unless values were loaded, or
        ``functional_call`` has put another tensor in the weight's place."""
        for name, (_, weight) in () if self.loaded else self._weights.items():
            if isinstance(weight(), nn.Parameter):
                self._reset(name)

    def renew(self, name: str) -> None:
        """Reset one entry, in place, to its initial value for the present weight, unless values were loaded."""
        if not self.loaded:
            buffer = self.module.get_buffer(name)
            buffer.copy_(like(self._initial(name), buffer))

    def settle(self, device: torch.device) -> None:
        """Replace buffers on the meta device by buffers on ``device``, shard entries of the weight's shape like the
        weight, and restore a key that other code wrote to, such as ``AveragedModel(use_buffers=True)``."""
        self._leave_meta(device)
        if self.has_sites and self.key._version != self._version_of_key:
            self.key.copy_(noise.make_key("site", self.fqn))
            self._version_of_key = self.key._version
        for name, (_, weight) in self._weights.items():
            buffer, parameter = self.module._buffers[name], weight()
            if buffer is not None and buffer.shape == parameter.shape:
                self.module._buffers[name] = like(buffer, parameter)

    def convert(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        """Override the module's ``_apply``, which ``.to``, ``.half`` and ``.to_empty`` call."""
        for source in sources_of(self.module):
            source.require_dtype(fn(torch.empty(0, dtype=source.stand_in.dtype, device=self.key.device)).dtype)
        buffers, entries = self.module._buffers, self.buffers
        buffers.update(dict.fromkeys(entries))  # torch leaves None alone
        try:
            type(self.module)._apply(self.module, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            buffers.update(entries)
        for name, buffer in entries.items():
            moved = _moved(fn, buffer)
            buffers[name] = moved if moved.dtype is buffer.dtype else buffer.to(moved.device)
        self._restore()
        return self.module

    def _restore(self) -> None:
        """Write the values that ``to_empty()`` left undefined."""
        if self.has_sites:
            self._make_key(self.key.device)

    def _leave_meta(self, device: torch.device) -> None:
        """Make buffers on ``device`` for those that ``load_state_dict(assign=True)`` left on the meta device."""
        for name, (_, weight) in self._weights.items():
            buffer = self.module._buffers[name]
            if buffer is not None and buffer.is_meta and not weight().is_meta:
                self.module._buffers[name] = self._initial(name)
        derived = [name for name in (KEY, FORWARDS) if name in self.module._buffers]
        if any(self.module.get_buffer(name).is_meta for name in derived):
            for name in derived:
                self.module._buffers[name] = torch.empty_like(self.module.get_buffer(name), device=device)
            self._restore()

    def _make_key(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # tensors made in inference mode have no version
            self.module._buffers[KEY] = key = noise.make_key("site", self.fqn, device=device)
        self._version_of_key = key._version

    def load(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        """Override the module's ``_load_from_state_dict``: read former layouts, and give entries that the load lacks
        their initial values for the loaded weights, under every name of a tied weight. ``state_dict`` is changed in
        place, as hooks of the module change it that rename the keys of children."""
        local_metadata, strict, missing, *errors = args  # all modules of a load have one list of missing keys
        present, count = from_former(state_dict)
        state_dict.clear()
        state_dict.update(present)
        entries = {f"{prefix}{name}": buffer for name, buffer in self.buffers.items()}
        keys = {name: f"{prefix}{name}" for name in self.of_phases if name not in self.module._buffers}
        self.waiting |= {name: state_dict.pop(key).clone() for name, key in keys.items() if key in state_dict}
        absent: list[str] = []
        kind = type(self.module)
        kind._load_from_state_dict(self.module, state_dict, prefix, local_metadata, strict, absent, *errors)
        missing.extend(key for key in absent if key not in entries)
        loaded = {id(x) for name, x in self.module._parameters.items() if f"{prefix}{name}" in state_dict}
        given = self._given[1] if self._given[0] is missing else set()
        self._given = missing, given | {name for name in self._weights if f"{prefix}{name}" in state_dict}
        for tied in self.tied if loaded else ():
            tied._begin_anew(loaded, missing)
        self.loaded |= any(key in state_dict and not _share(state_dict[key], buffer) for key, buffer in entries.items())
        self._loaded_count(count)

    def save(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Override the module's ``_save_to_state_dict``: a model that was loaded and not yet trained saves again what
        waits for another phase."""
        type(self.module)._save_to_state_dict(self.module, destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": value for name, value in self.waiting.items()})

    def _begin_anew(self, loaded: set[int], load: Any) -> None:
        """Reset the entries for parameters with an id in ``loaded`` to which this load gave no values so far."""
        given = self._given[1] if self._given[0] is load else set()
        for name, (_, weight) in self._weights.items():
            saved = name not in self.module._non_persistent_buffers_set
            if saved and name not in given and id(weight()) in loaded:
                self._reset(name)

    def _loaded_count(self, count: int | None) -> None:
        """Record the count that a state dict of a former layout held, or None."""

    def refuse_script(self) -> None:
        """Refuse torch.jit.script, which calls ``__prepare_scriptable__`` and would leave out the quantizers."""
        refuse("torch.jit.script")

    def __getstate__(self) -> dict[str, Any]:
        # Closures over the weight cannot be pickled; apply() makes them again.
        return {**self.__dict__, "_weights": {}, "tied": [], "_given": (None, set())}


def _moved(fn: Callable[[Tensor], Tensor], buffer: Tensor) -> Tensor:
    """Return ``fn(buffer)``, with undefined values where ``fn`` cannot copy them from the meta device."""
    try:
        return fn(buffer)
    except NotImplementedError:
        if not buffer.is_meta:
            raise
        return torch.empty_like(buffer, device=fn(torch.empty(0)).device)


def _share(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors share memory. For keys that a checkpoint lacks, torch's distributed checkpoint loads
    the tensors that the model has already."""
    first, second = (t.to_local() if is_sharded(t) else t for t in (x, y))
    return first.device == second.device and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def states(root: nn.Module) -> list[State]:
    """Return the state of every module of ``root`` that has a state."""
    return [state for module in root.modules() if (state := State.of(module)) is not None]


def buffers_to_keep(root: nn.Module) -> dict[str, Tensor]:
    """Return, by name, the buffers of an applied policy that the next policy or phase takes over, and loaded values
    that wait for a phase.

    Before the first training forward these are only the buffers of states that were loaded. All other buffers are
    computed from the weights at that forward.
    """
    trained = any(isinstance(state, RootState) and state.count for state in states(root))
    return {
        f"{fqn}.{name}".removeprefix("."): buffer
        for fqn, module in root.named_modules(remove_duplicate=False)
        if (state := State.of(module)) is not None
        for name, buffer in {**(state.buffers if trained or state.loaded else {}), **state.waiting}.items()
    }


def of_some_phases(root: nn.Module) -> set[str]:
    """Return the state-dict keys of the entries of techniques that only some phases of the policy keep."""
    return {
        f"{fqn}.{name}".removeprefix(".")
        for fqn, module in root.named_modules(remove_duplicate=False)
        if (state := State.of(module)) is not None
        for name in state.of_phases
    }


class RootState(State):
    """The state of the root, with the count of root forwards with gradients enabled.

    The count is not in the model's state dict; the optimizer's state and fp4graph's checkpoints hold it.

    Attributes:
        followed: in a copy, the count of the original, until the copy trains and goes on from the count at which it was
            made; then, and in other models, None.
        count_unknown: whether a state dict was loaded without the number of forwards that its weights were trained for;
            None until a count is set or a state dict is loaded.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        super().__init__(root, "")
        root.register_buffer(FORWARDS, torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        self._count = 0  # mirror of the buffer, so that no forward waits for a device
        self.followed: int | None = None
        self.count_unknown: bool | None = None

    @property
    def forwards(self) -> Tensor:
        """The buffer with the count."""
        return self.module.get_buffer(FORWARDS)

    @property
    def count(self) -> int:
        """The number of root forwards with gradients enabled."""
        return self._count if self.followed is None else self.followed

    def advance(self) -> None:
        """Count one more root forward with gradients enabled."""
        self.count_from(self._count + 1)

    def count_from(self, count: int) -> None:
        """Set the count."""
        self._count, self.count_unknown = count, False
        self.forwards.fill_(count)

    def recount(self) -> None:
        """Take the count from the buffer, which another process may have changed."""
        self._count = int(self.forwards)

    def _loaded_count(self, count: int | None) -> None:
        if count is not None:
            self.count_from(count)
        elif self.count_unknown is None:
            self.count_unknown = True

    def _restore(self) -> None:
        super()._restore()
        self.forwards.fill_(self._count)
