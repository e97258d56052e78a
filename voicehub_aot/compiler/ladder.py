"""How finely to divide the sizes between the buckets, where an engine keeps memory for every size it has seen.

A rung costs memory: the kernels of every packed product whose number of rows depends on the size. A coarse ladder
costs time: padding. So a ladder gets as many rungs as a fixed share of the weights pays for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from voicehub_aot.compiler.split import Stage, Staged
from voicehub_aot.spec.bucket import Buckets, Ladder, rungs_between

KERNEL_SHARE = 1 / 8  # of the weights, for the kernels of all rungs: what a load and one request leave of 1.25
FEWEST, MOST = 8, 32  # rungs, the promised buckets among them

aten = torch.ops.aten
PRODUCTS = (aten.linear.default, aten.conv1d.default, aten.convolution.default)


def choose_ladder(staged: Staged, buckets: Buckets, symbols: Mapping[str, str], kernel_bytes: int) -> Ladder:
    """kernel_bytes: what stays for each product and number of rows. No rungs where that is nothing."""
    stages = [stage for stage in (staged.prepare, staged.rows, staged.step) if stage is not None]
    counts = {dim.name: sum(products(stage, symbols, dim.name) for stage in stages) for dim in staged.spec.dims}
    kept = {name: count * kernel_bytes for name, count in counts.items() if count * kernel_bytes}
    promised = [name for name in kept if name in buckets.axes]
    allowance = KERNEL_SHARE * sum(stage.weight_bytes for stage in stages)
    axes: dict[str, tuple[int, ...]] = dict.fromkeys(kept, ())
    for name in promised:
        count = round(allowance / len(promised) / kept[name])
        axes[name] = rungs_between(buckets.axes[name], min(max(count, FEWEST), MOST))
    return Ladder(axes=axes)


def products(stage: Stage, symbols: Mapping[str, str], size: str) -> int:
    """Different products with constant weights, by the weight's and the rows' shape, whose rows depend on a size."""
    found = set()
    for node in stage.module.graph.nodes:
        if node.target in PRODUCTS:
            rows, weight = (node.args[n].meta["val"].shape for n in (0, 1))
            if size in _names(rows, symbols) and not _names(weight, symbols):
                found.add((node.target, tuple(weight), tuple(map(str, rows))))
    return len(found)


def _names(shape: Iterable[int | torch.SymInt], symbols: Mapping[str, str]) -> set[str]:
    """Of the sizes that a shape depends on."""
    return {symbols[str(s)] for n in shape if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}
