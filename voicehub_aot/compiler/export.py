"""Region -> a flat graph of core operations with named dynamic sizes.

Sizes stay symbols: "B" and the region's dims. Attention stays one node. Weights are attributes of the graph
module, under the names the region's module gives them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from voicehub_aot.errors import ExportFailed
from voicehub_aot.kernels import depthwise  # noqa: F401  registers an operator that a saved program may hold
from voicehub_aot.spec.region import BATCH, Region, RegionSpec, example_mask

MAX_ROWS = 256  # rows of one call: requests x guidance branches

# Any size greater than 1 will do; primes that no model uses keep torch.export from seeing equalities by chance.
EXAMPLE_SIZES = {BATCH: 3, "frames": 37, "text": 13}
SPARE_EXAMPLE_SIZES = (17, 19, 23, 29, 31)


def example_sizes(spec: RegionSpec) -> dict[str, int]:
    """One size per symbol, all different, for tracing."""
    spare = iter(SPARE_EXAMPLE_SIZES)
    return {name: EXAMPLE_SIZES.get(name) or next(spare) for name in [BATCH, *(d.name for d in spec.dims)]}


def example_inputs(spec: RegionSpec, sizes: Mapping[str, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random but valid region inputs: lengths and extents full, integers in range, flags alternating by row."""
    generator = torch.Generator().manual_seed(seed)
    dim_of = {n: d.name for d in spec.dims for n in (d.length, d.extent) if n}
    inputs = {}
    for item in spec.inputs:
        shape = [sizes[s] if isinstance(s, str) else s for s in item.shape]
        if item.name in dim_of:
            inputs[item.name] = torch.full(shape, sizes[dim_of[item.name]], dtype=torch.int64)
        elif item.flag:
            inputs[item.name] = torch.arange(shape[0]) % 2 == 1
        elif item.binding == "TIME":
            inputs[item.name] = torch.rand(shape, generator=generator)
        elif item.dtype == "bool":
            inputs[item.name] = example_mask(shape, generator)
        elif item.dtype == "int64":
            inputs[item.name] = torch.randint(item.low, item.high, shape, generator=generator)
        else:
            inputs[item.name] = torch.randn(shape, generator=generator)
    return inputs


def named_dims(spec: RegionSpec) -> dict[str, Any]:
    """torch.export dimensions by symbol."""
    dims = {d.name: torch.export.Dim(d.name, min=d.min, max=d.max) for d in spec.dims}
    return {BATCH: torch.export.Dim(BATCH, min=1, max=MAX_ROWS), **dims}


def export_region(region: Region) -> tuple[fx.GraphModule, dict[str, str]]:
    """The region's graph, one placeholder per input, and the graph's own symbol of each named size.

    Raises ExportFailed with torch.export's reason, chained.
    """
    spec = region.spec
    dims = named_dims(spec)
    inputs = example_inputs(spec, example_sizes(spec))
    dynamic = {i.name: {p: dims[s] for p, s in enumerate(i.shape) if isinstance(s, str)} for i in spec.inputs}
    program = export_program(region.module, inputs, dynamic, where=f"region {spec.name}")
    graph = program.module(check_guards=False)
    symbols = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        for size, name in zip(node.meta["val"].shape, spec.input(node.target).shape, strict=True):
            if isinstance(name, str) and isinstance(size, torch.SymInt):
                symbols[str(size.node.expr)] = name
    return graph, symbols


def export_program(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
    dynamic: Mapping[str, Mapping[int, Any]],
    where: str,
) -> torch.export.ExportedProgram:
    """torch.export, non-strict, decomposed no further than attention. Raises ExportFailed.

    inputs: examples, passed by keyword if a mapping, else in order. dynamic: per input, its varying axes.
    """
    shapes: Any = dict(dynamic) if isinstance(inputs, Mapping) else tuple(dynamic.values())
    if not isinstance(inputs, Mapping) and not isinstance(module, fx.GraphModule):
        shapes = (shapes,)  # forward(*values): torch.export wants the tuple as one argument
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own: copying its LeafSpec warns
            exported: torch.export.ExportedProgram = torch.export.export(
                module,
                () if isinstance(inputs, Mapping) else tuple(inputs),
                dict(inputs) if isinstance(inputs, Mapping) else None,
                dynamic_shapes=shapes,
                strict=False,
            )
            decomposed: torch.export.ExportedProgram = exported.run_decompositions({})
            return decomposed
    except Exception as error:  # torch.export raises a dozen unrelated types
        raise ExportFailed(f"{where}: torch.export failed ({type(error).__name__}): {error}") from error
