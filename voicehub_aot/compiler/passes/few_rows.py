"""The pass that turns linears of few rows into reductions, which some engines fuse. Its rule: `kernels.linear.few`."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from voicehub_aot.compiler.passes import Spans
from voicehub_aot.compiler.stages import Stage, Stages, attribute, set_attribute
from voicehub_aot.engines import Engine, Weights
from voicehub_aot.kernels.linear import few, reduced

LINEAR = torch.ops.aten.linear.default
NARROW = torch.bfloat16
NARROW_NAME = "{}_bfloat16"


def serves_few(stage: Stage, spans: Spans) -> bool:
    """True if every linear of the stage has few rows whatever is promised, so that packed weights gain nothing."""
    rows = [most_rows(node, stage, spans) for node in _linears(stage)]
    return bool(rows) and all(few(n) for n in rows)


def wanted(engine: Engine, weights: Weights) -> bool:
    """An engine that fuses reductions. One that packs its weights has nothing to gain."""
    return engine.FUSES and weights == "shared"


def rewrite(stages: Stages, spans: Spans) -> Stages:
    """The step's linears of few rows become reductions.

    Their weights are kept in bfloat16, under a name of its own, where that loses nothing: every value is one.
    """
    stage = stages.step
    counts = {n.name: most_rows(n, stage, spans) for n in _linears(stage)}
    chosen = {name: rows for name, rows in counts.items() if few(rows)}
    if not chosen:
        return stages
    module = copy.copy(stage.module)  # weights stay shared
    assert isinstance(module, fx.GraphModule)
    module.graph = copy.deepcopy(stage.graph)
    for node in module.graph.find_nodes(op="call_function", target=LINEAR):
        if node.name in chosen:
            node.target = reduced
            node.args = (*node.args[:2], node.args[2] if len(node.args) > 2 else None, chosen[node.name])
            _narrow(module, node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return replace(stages, step=replace(stage, module=module, row_bound=True))


def most_rows(node: fx.Node, stage: Stage, spans: Spans) -> int:
    """Rows of a linear's input at the largest sizes promised."""
    largest = {symbol: spans[name][-1][1] for symbol, name in _symbols(stage).items()}

    def number(size: Any) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        return int(expression.subs({s: largest[str(s)] for s in expression.free_symbols}))

    source = node.args[0]
    assert isinstance(source, fx.Node)
    return math.prod(number(size) for size in source.meta["val"].shape[:-1])


def _symbols(stage: Stage) -> dict[str, str]:
    """The graph's own symbol of each named size."""
    placeholders = stage.graph.find_nodes(op="placeholder")
    found = {}
    for node, value in zip(placeholders, stage.inputs, strict=True):
        for size, name in zip(node.meta["val"].shape, value.shape, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(name, str) and name.isidentifier():
                found[str(size.node.expr)] = name
    return found


def _linears(stage: Stage) -> Sequence[fx.Node]:
    return stage.graph.find_nodes(op="call_function", target=LINEAR)


def _narrow(module: fx.GraphModule, linear: fx.Node) -> None:
    """Let a linear read its weight in bfloat16, if every value of it is one."""
    weight = linear.args[1]
    assert isinstance(weight, fx.Node)
    if weight.op != "get_attr":
        return
    name = str(weight.target)
    tensor = attribute(module, name)
    narrow = tensor.to(NARROW)
    if tensor.dtype != torch.float32 or not torch.equal(narrow.to(tensor.dtype), tensor):
        return
    set_attribute(module, NARROW_NAME.format(name), narrow)
    with module.graph.inserting_before(linear):
        linear.replace_input_with(weight, module.graph.get_attr(NARROW_NAME.format(name)))
