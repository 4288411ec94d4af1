"""Names of matrices that servers fuse into one: q, k and v, or gate and up."""

from __future__ import annotations

from collections.abc import Iterable

#: The last names of modules that a server fuses if they have one parent: the values of vLLM's packed_modules_mapping.
#: The first family that has a name decides.
SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("encoder_attn.k_proj", "encoder_attn.v_proj"),  # q_proj reads another tensor, so servers leave it alone
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


def family_of(name: str, families: Iterable[tuple[str, ...]] = SIBLINGS) -> tuple[str, tuple[str, ...]]:
    """Return the module that holds the siblings of the layer ``name``, and their names in it.

    The first of ``families`` decides that has the last names of the layer; a layer of no family is its only sibling.
    """
    for family in families:
        for last in family:
            if f".{name}".endswith(f".{last}"):
                return name.removesuffix(last).removesuffix("."), family
    owner, _, last = name.rpartition(".")
    return owner, (last,)


def layer_of(name: str) -> str:
    """Return the name of the layer that a weight belongs to, as in the model without adapters."""
    return name.removesuffix(".weight").removesuffix(".base_layer")
