"""How finely to divide the sizes between the buckets, where an engine keeps memory for every size it has seen.

A rung costs memory: the kernels of every packed product whose number of rows depends on the size. A coarse ladder
costs time: padding. So the main dimension gets as many rungs as a fixed share of the weights pays for. Further
dimensions, such as text, cost little time, because they are read once per request: they get few rungs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from voicehub_aot.compiler.stages import Stage, Stages
from voicehub_aot.spec.bucket import Buckets, Ladder, doubling, rungs_between
from voicehub_aot.spec.region import Dim

KERNEL_SHARE = 5 / 32  # of the weights, for the kernels of all rungs: what a load and one request leave of 1.25
FEWEST, MOST = 8, 32  # rungs, the promised buckets among them

aten = torch.ops.aten
PRODUCTS = (aten.linear.default, aten.conv1d.default, aten.convolution.default)


def choose_ladder(stages: Stages, buckets: Buckets, symbols: Mapping[str, str], kernel_bytes: int) -> Ladder:
    """kernel_bytes: what stays for each product and number of rows. No rungs where that is nothing."""
    work = [stage for stage in (stages.prepare, stages.mixed, stages.step) if stage is not None]
    allowance = KERNEL_SHARE * sum(stage.weight_bytes for stage in work)
    axes = {}
    for dim in stages.spec.dims:
        if kept := kernel_bytes * sum(products(stage, symbols, dim.name) for stage in work):
            axes[dim.name] = _rungs(dim, buckets.axes.get(dim.name, ()), allowance / kept, dim == stages.spec.main)
    return Ladder(axes=axes)


def _rungs(dim: Dim, promised: tuple[int, ...], affordable: float, main: bool) -> tuple[int, ...]:
    if not main:
        return tuple(sorted({*promised, *doubling(dim.max)}))
    return rungs_between(promised, min(max(round(affordable), FEWEST), MOST))


def products(stage: Stage, symbols: Mapping[str, str], size: str) -> int:
    """Different products with constant weights, by the weight's and the rows' shape, whose rows depend on a size."""
    found = set()
    for node in stage.graph.nodes:
        if node.target in PRODUCTS:
            rows, weight = (node.args[n].meta["val"].shape for n in (0, 1))
            if size in _names(rows, symbols) and not _names(weight, symbols):
                found.add((node.target, tuple(weight), tuple(map(str, rows))))
    return len(found)


def _names(shape: Iterable[int | torch.SymInt], symbols: Mapping[str, str]) -> set[str]:
    """Of the sizes that a shape depends on."""
    return {symbols[str(s)] for n in shape if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}
