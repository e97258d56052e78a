"""Scaled dot-product attention with per-row valid keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def key_bias(valid: torch.Tensor) -> torch.Tensor:
    """valid: [B, L] bool, True = real key, at least one per row -> [B, 1, 1, L] float32, 0 or -inf.

    A request value: as a bias it is built once, where a bool mask would be converted in every attention call.
    """
    bias = torch.zeros(valid.shape, dtype=torch.float32, device=valid.device).masked_fill(~valid, float("-inf"))
    return bias[:, None, None, :]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """query: [B, H, T, E]; key, value: [B, H, L, E]; bias: added to the scores, broadcasts to [B, H, T, L].

    scale: None = 1 / sqrt(E). Returns [B, H, T, E]. Stays one `scaled_dot_product_attention` node in the graph.
    The bias takes the query's dtype: torch 2.13 on CPU misreads a float32 bias beside float64 queries, silently.
    """
    if bias is not None and bias.dtype != query.dtype:
        bias = bias.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
