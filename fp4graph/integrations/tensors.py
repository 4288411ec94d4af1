"""State dicts of applied models for libraries that write safetensors, which hold tensors only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp4graph import state


def only_tensors(model: nn.Module) -> None:
    """Let ``model.state_dict()`` hold the policy's text as the bytes of a tensor from now on."""
    for module in model.modules():
        if isinstance(module, state.RootState):
            module.register_state_dict_post_hook(_text_to_bytes)  # type: ignore[no-untyped-call]


def _text_to_bytes(module: state.RootState, entries: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    entries[f"{prefix}_extra_state"] = torch.tensor(list(module.policy_text.encode()), dtype=torch.uint8)
