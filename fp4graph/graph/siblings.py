"""Names of matrices that servers fuse into one: q, k and v, or gate and up."""

from __future__ import annotations

#: The last names of modules that a server fuses if they have one parent: the values of vLLM's packed_modules_mapping.
SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("c_fc_0", "c_fc_1"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


def layer_of(name: str) -> str:
    """Return the name of the layer that a weight belongs to, as in the model without adapters."""
    return name.removesuffix(".weight").removesuffix(".base_layer")
