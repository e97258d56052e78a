"""Attention with a bias built once a request, against the bool mask that every call converts.

python bench/bench_attention.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

import torch
import torch.nn.functional as F
from timing import environment, interleaved, report

from voicehub_aot.kernels.attention import attention, key_bias

# batch, heads, queries, keys, width: text and self attention of a small and a large denoiser
SHAPES = [(1, 4, 64, 50, 64), (2, 4, 256, 100, 64), (2, 16, 256, 256, 64), (2, 16, 512, 512, 64)]


@torch.inference_mode()
def main() -> None:
    print(environment())
    for batch, heads, queries, keys, width in SHAPES:
        q = torch.randn(batch, heads, queries, width)
        k, v = (torch.randn(batch, heads, keys, width) for _ in range(2))
        valid = (torch.arange(keys) < keys * 3 // 4).expand(batch, keys)
        mask, bias = valid[:, None, None, :], key_bias(valid)
        candidates = {
            "bool mask": lambda q=q, k=k, v=v, mask=mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
            "bias": lambda q=q, k=k, v=v, bias=bias: attention(q, k, v, bias),
            "no mask": lambda q=q, k=k, v=v: attention(q, k, v),
        }
        title = f"B{batch} H{heads} T{queries} L{keys} E{width}"
        report(title, interleaved(candidates, rounds=31, calls=10))


if __name__ == "__main__":
    main()
