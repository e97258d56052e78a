"""Floating-point operations of a stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from voicehub_aot.stage import Stage

aten = torch.ops.aten


def matrix_flops(stage: Stage, sizes: Mapping[str, int], symbols: Mapping[str, str]) -> int:
    """Floating-point operations of the stage's matrix products, convolutions and attention at the given sizes."""

    def number(size: Any) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        return int(expression.subs({s: sizes[symbols[str(s)]] for s in expression.free_symbols}))

    def shape(node: Any) -> list[int]:
        return [number(s) for s in node.meta["val"].shape]

    total = 0
    for node in stage.module.graph.nodes:
        if node.target in (aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default):
            total += 2 * math.prod(shape(node)) * shape(node.args[0])[-1]
        elif node.target == aten.addmm.default:
            total += 2 * math.prod(shape(node)) * shape(node.args[1])[-1]
        elif node.target in (aten.conv1d.default, aten.convolution.default):
            total += 2 * math.prod(shape(node)) * math.prod(shape(node.args[1])[1:])
        elif node.target == aten.scaled_dot_product_attention.default:
            batch, heads, queries, width = shape(node.args[0])
            total += 4 * batch * heads * queries * shape(node.args[1])[2] * width
    return total
