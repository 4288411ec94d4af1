"""Attention layers and fused attention, written out as matrix products."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``softmax(Q Kᵀ·scale + mask) V`` as ``scaled_dot_product_attention`` documents it.

    Shapes: query ``[..., H, L, E]``, key ``[..., H', S, E]``, value ``[..., H', S, Ev]``, H' dividing H with
    ``enable_gqa``; mask broadcastable to ``[..., L, S]``, boolean (True takes part) or additive. A query whose keys are
    all masked gets 0. Unlike the fused kernel, it writes the O(L·S) weights to memory.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = torch.matmul(query * (1 / math.sqrt(query.size(-1)) if scale is None else scale), key.transpose(-2, -1))
    if is_causal:
        allowed = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype is torch.bool else scores + attn_mask
        masked = (scores == float("-inf")).all(-1, keepdim=True)  # the weights of a query without keys are 0, not NaN
        weights = torch.softmax(scores.masked_fill(masked, 0.0), -1).masked_fill(masked, 0.0)
        if weights.dtype is not value.dtype and not torch.is_autocast_enabled(value.device.type):
            weights = weights.to(value.dtype)  # an fp32 mask is added to 16-bit scores in fp32
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)


def native_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    in_weight: Tensor,
    in_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute what the fused inference kernel of ``nn.MultiheadAttention`` does: batch first, True masks out."""
    attn_mask, padding_mask = _split_mask(mask, mask_type, num_heads, query)
    out, weights = F.multi_head_attention_forward(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), embed_dim, num_heads, in_weight, in_bias,
        None, None, False, 0.0, out_weight, out_bias, training=False, key_padding_mask=padding_mask,
        need_weights=need_weights, attn_mask=attn_mask, average_attn_weights=average_weights,
    )  # fmt: skip
    return out.transpose(0, 1), weights


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    in_weight: Tensor,
    in_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    linear1_weight: Tensor,
    linear1_bias: Tensor,
    linear2_weight: Tensor,
    linear2_bias: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Compute what the fused inference kernel of ``nn.TransformerEncoderLayer`` does."""

    def attend(x: Tensor) -> Tensor:
        return native_attention(
            x, x, x, embed_dim, num_heads, in_weight, in_bias, out_weight, out_bias, mask, False, True, mask_type
        )[0]

    def feed(x: Tensor) -> Tensor:
        hidden = F.linear(x, linear1_weight, linear1_bias)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), linear2_weight, linear2_bias)

    def norm1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm1_weight, norm1_bias, eps)

    def norm2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm2_weight, norm2_bias, eps)

    if norm_first:
        src = src + attend(norm1(src))
        return src + feed(norm2(src))
    src = norm1(src + attend(src))
    return norm2(src + feed(src))


def _split_mask(
    mask: Tensor | None, mask_type: int | None, heads: int, query: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return (attention mask, key padding mask) for a fused kernel's mask of type 0, 1, or 2 (merged: the first)."""
    if mask is None or mask_type == 0:
        return mask, None
    if mask_type == 1:
        return None, mask
    batch, length = query.size(0), query.size(1)
    return mask.expand(batch, heads, length, length).reshape(batch * heads, length, length), None
