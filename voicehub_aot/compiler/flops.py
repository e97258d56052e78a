"""Floating-point operations of a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from voicehub_aot.compiler.stages import Stage

aten = torch.ops.aten


def _product(result: Sequence[int], left: Sequence[int], *_: Sequence[int]) -> int:
    return 2 * math.prod(result) * left[-1]


def _added_product(result: Sequence[int], _: Sequence[int], *operands: Sequence[int]) -> int:
    return _product(result, *operands)


def _convolution(result: Sequence[int], _: Sequence[int], weight: Sequence[int], *__: Sequence[int]) -> int:
    return 2 * math.prod(result) * math.prod(weight[1:])


def _attention(_: Sequence[int], query: Sequence[int], key: Sequence[int], *__: Sequence[int]) -> int:
    return 4 * math.prod(query) * key[-2]


MATRIX_OPERATIONS: Mapping[Any, Callable[..., int]] = {  # of the sizes of the result, then of the operands
    aten.linear.default: _product,
    aten.matmul.default: _product,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _added_product,
    aten.conv1d.default: _convolution,
    aten.convolution.default: _convolution,
    aten.scaled_dot_product_attention.default: _attention,
}


def matrix_flops(stage: Stage, sizes: Mapping[str, int], symbols: Mapping[str, str]) -> int:
    """Floating-point operations of the stage's matrix products, convolutions and attention at the given sizes."""

    def number(size: Any) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        return int(expression.subs({s: sizes[symbols[str(s)]] for s in expression.free_symbols}))

    def shape(node: Any) -> list[int]:
        return [number(s) for s in node.meta["val"].shape]

    return sum(
        MATRIX_OPERATIONS[node.target](shape(node), *(shape(a) for a in node.args if isinstance(a, torch.fx.Node)))
        for node in stage.graph.nodes
        if node.target in MATRIX_OPERATIONS
    )
