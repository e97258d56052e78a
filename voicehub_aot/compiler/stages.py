"""A region in stages, and how far a rewrite of them is from what it was made from."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from voicehub_aot.compiler.export import example_inputs
from voicehub_aot.errors import StageFailed
from voicehub_aot.spec.region import RegionSpec, TensorSpec

SEEDS = (1, 2)  # of random inputs
ROUNDING = 1e-5  # of the largest value: what another order of float32 sums may change


@dataclass(frozen=True)
class Stage:
    """module(*inputs) -> tuple(outputs), both in the order given here.

    row_bound: its code is made for as many rows as were promised, and no more.
    """

    name: str
    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    row_bound: bool = False

    def __call__(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        results = self.module(*(values[i.name] for i in self.inputs))
        return dict(zip((o.name for o in self.outputs), results, strict=True))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights and folded constants this stage reads."""
        return sum(t.numel() * t.element_size() for t in self.constants.values())

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    @property
    def nodes(self) -> int:
        return sum(n.op == "call_function" for n in self.graph.nodes)

    @property
    def graph(self) -> fx.Graph:
        """Of a stage as `split` makes it, or rewritten node by node."""
        assert isinstance(self.module, fx.GraphModule)
        return self.module.graph


@dataclass(frozen=True)
class Stages:
    """The region in stages. Value names are unique across stages.

    table: time -> its outputs. mixed: the part of `prepare` that also depends on time, None if there is none.
    folded: constants computed at build, by name. deviations: what `split` and each pass since measured of itself.
    """

    spec: RegionSpec
    table: Stage
    prepare: Stage
    mixed: Stage | None
    step: Stage
    folded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    deviations: Mapping[str, Deviation] = field(default_factory=dict)


@dataclass(frozen=True)
class Deviation:
    """Largest difference on random inputs between what a rewrite was made from and its result, and the most it may be.

    seconds: what measuring it took.
    """

    worst: float
    allowed: float
    seconds: float | None = None


Run = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]  # region inputs -> outputs by name


def deviation(what: str, spec: RegionSpec, sizes: Mapping[str, int], wanted: Run, got: Run) -> Deviation:
    """Two ways to compute the region, on random inputs of these sizes: equal up to float32 rounding, else StageFailed.

    what: came out wrong, for the error.
    """
    start, found = clock.perf_counter(), Deviation(0.0, 0.0)
    with torch.no_grad():
        for seed in SEEDS:
            inputs = example_inputs(spec, sizes, seed)
            results = got(inputs)
            for name, want in wanted(inputs).items():
                worst, allowed = (want - results[name]).abs().max().item(), ROUNDING * want.abs().max().item()
                found = max(found, Deviation(worst, allowed), key=lambda d: d.worst)
                if not worst <= allowed:
                    raise StageFailed(f"{what} {name!r} is off by {worst:.3g} (seed {seed})")
    return replace(found, seconds=clock.perf_counter() - start)


def run_stages(stages: Stages, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All stages in turn on one set of region inputs: every output of the region. For checks, not for speed.

    What a stage takes or gives for all evaluations at once, [N, ...], is of one evaluation here.
    """
    values = dict(inputs)
    for stage in (stages.table, stages.prepare, stages.mixed, stages.step):
        if stage is not None:
            given = {v.name: values[v.name][None] if v.stacked else values[v.name] for v in stage.inputs}
            results = stage(given)
            values.update({v.name: results[v.name][0] if v.stacked else results[v.name] for v in stage.outputs})
    return {name: values[name] for name in stages.spec.outputs}


def attribute(module: nn.Module, target: str) -> torch.Tensor:
    """The tensor under a dotted name."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value.detach()  # type: ignore[no-any-return]


def set_attribute(root: nn.Module, target: str, tensor: torch.Tensor) -> None:
    """Register a buffer under a dotted name."""
    *path, leaf = target.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    root.register_buffer(leaf, tensor)
