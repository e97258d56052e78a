"""The pass that joins `prepare` with the time x request work of all evaluations, computed as one batch per request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from voicehub_aot.compiler.passes import Spans
from voicehub_aot.compiler.stages import Stage, Stages, set_attribute
from voicehub_aot.engines import Engine, Weights
from voicehub_aot.spec.region import BATCH, EVALUATIONS, TensorSpec


def wanted(engine: Engine, weights: Weights) -> bool:
    """An engine has one module per request and one per evaluation, whatever it is."""
    return True


def rewrite(stages: Stages, spans: Spans) -> Stages:
    """`mixed` becomes part of `prepare`.

    The table's values that it reads come in stacked, [N, ...], and its own go out stacked.
    """
    if stages.mixed is None:
        return stages
    module = _PrepareMixed(stages.prepare, stages.mixed)
    raw = tuple(v for v in module.raw if v.name not in {i.name for i in stages.prepare.inputs})
    inputs = (*stages.prepare.inputs, *raw, *map(_stacked, module.tables))
    outputs = (*stages.prepare.outputs, *map(_stacked, stages.mixed.outputs))
    return replace(stages, prepare=Stage("prepare", module, inputs, outputs), mixed=None)


def _stacked(value: TensorSpec) -> TensorSpec:
    """The value of all evaluations, [N, ...]."""
    return value.model_copy(update={"shape": (EVALUATIONS, *value.shape)})


class _PrepareMixed(nn.Module):
    """prepare, then `mixed` mapped over the table's evaluations. Holds the weights of both under their own names."""

    def __init__(self, prepare: Stage, mixed: Stage) -> None:
        super().__init__()
        for name, tensor in {**prepare.constants, **mixed.constants}.items():
            set_attribute(self, name, tensor)
        self.stages = (prepare, mixed)  # in a tuple, or their weights would be registered again, under longer names
        self.prepare_inputs, self.mixed_inputs = prepare.inputs, mixed.inputs
        self.prepare_outputs = tuple(o.name for o in prepare.outputs)
        produced = set(self.prepare_outputs)
        requests = [v for v in mixed.inputs if v.name not in produced]
        self.tables = tuple(v for v in requests if BATCH not in v.shape)
        self.raw = tuple(v for v in requests if BATCH in v.shape)
        self.names = tuple(dict.fromkeys(v.name for v in (*prepare.inputs, *self.raw, *self.tables)))

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(self.names, values, strict=True))
        prepare, mixed_work = (self._bound(stage) for stage in self.stages)
        request = prepare(*(given[i.name] for i in self.prepare_inputs))
        given.update(zip(self.prepare_outputs, request, strict=True))
        stacked = {v.name for v in self.tables}
        over = tuple(0 if i.name in stacked else None for i in self.mixed_inputs)
        mixed = torch.vmap(mixed_work, in_dims=over)(*(given[i.name] for i in self.mixed_inputs))
        return (*request, *mixed)

    def _bound(self, stage: Stage) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The stage reading this module's weights."""
        weights = {name: self.get_buffer(name) for name in stage.constants}
        return lambda *values: torch.func.functional_call(stage.module, weights, values)
