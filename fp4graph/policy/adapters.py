"""Names of adapters (LoRA and the like), and of the layers and models that Hugging Face PEFT wraps around them.

PEFT replaces a layer ``qkv`` by a wrapper, which holds the layer as ``qkv.base_layer`` beside ``qkv.lora_A.default``,
and moves the model to ``base_model.model``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

#: Matches a part of a module's name that only adapters have, whether or not they wrap a layer.
_ADAPTER = re.compile(r"(lora|dora|hada|lokr|vera|ia3|oft|boft)_\w+")
#: Matches such a part in a glob, where ``*`` may stand for the end of the part.
_NAMED = re.compile(r"(^|[.*?\]])((lora|dora|hada|lokr)([_*?\[]|$)|(vera|ia3|oft|boft)_)")
_WRAPPED = re.compile(r"\.(token_adapter\.base_layer|base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
#: The part of a wrapper that holds trained rows, and the modules inside that part.
_ROWS = re.compile(r"\.token_adapter(\..*)?$")


def is_adapter(name: str, modules: Collection[str]) -> bool:
    """Return whether the module or parameter ``name`` belongs to an adapter; ``modules`` are all names of modules.

    A wrapper counts as an adapter: adapters without layers (LoHa, VeRA) compute their products in its forward.
    """
    parts = name.split(".")
    if any(_ADAPTER.fullmatch(part) for part in parts):
        return True
    if parts[0] == "prompt_encoder" and "base_model" in modules:
        return True
    paths = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    wrappers = [path for path in paths if f"{path}.base_layer" in modules and _wraps(path, modules)]
    return bool(wrappers) and not f"{name}.".startswith(f"{wrappers[-1]}.base_layer.")


def is_of_adapters(name: str, modules: Collection[str]) -> bool:
    """Return whether module ``name`` belongs to an adapter, or to a layer that PEFT trains beside the adapters: all of
    the layer (``modules_to_save``) or some of its rows (``trainable_token_indices``)."""
    layer = name.partition(".original_module")[0]  # original_module: the layer that a merge drops
    copied = "modules_to_save" in name.split(".") or f"{layer}.modules_to_save" in modules
    wrapper = _ROWS.sub("", name)
    return copied or f"{wrapper}.token_adapter.base_layer" in modules or is_adapter(name, modules)


def names_adapters(glob: str) -> bool:
    """Return whether a glob for modules has a part that only adapters have, as ``*lora_A*`` and ``*.lora_*`` do."""
    return _NAMED.search(glob) is not None


def _wraps(name: str, modules: Collection[str]) -> bool:
    """Return whether the module ``name`` holds an adapter beside its ``base_layer``."""
    prefix = f"{name}."
    children = (module.removeprefix(prefix).partition(".")[0] for module in modules if module.startswith(prefix))
    return any(_ADAPTER.fullmatch(child) for child in children)


def names_before(name: str) -> tuple[str, ...]:
    """Return ``name`` and the names that the module may have had before PEFT wrapped it or the model."""
    plain = _WRAPPED.sub("", name).removesuffix(".token_adapter")  # a tied head multiplies in this part
    inside = [plain.removeprefix(prefix) for prefix in ("base_model.model.", "base_model.") if plain.startswith(prefix)]
    return tuple(dict.fromkeys((name, plain, *inside)))
