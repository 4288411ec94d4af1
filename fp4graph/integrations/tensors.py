"""State dicts of applied models for libraries that write safetensors, which hold tensors only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp4graph import state


def only_tensors(model: nn.Module) -> None:
    """Let ``model.state_dict()`` hold the policy's text as the bytes of a tensor from now on."""
    # On the model: what holds the text is made anew when a policy goes over to another phase.
    model.register_state_dict_post_hook(_text_to_bytes)  # type: ignore[no-untyped-call]


def _text_to_bytes(module: nn.Module, entries: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for key, value in entries.items():
        if state.is_ours(key) and isinstance(value, dict):
            entries[key] = torch.tensor(list(value["policy"].encode()), dtype=torch.uint8)
