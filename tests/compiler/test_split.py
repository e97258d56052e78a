"""Staging: each value is computed when it is known, stored only where reading is cheaper, and nothing changes."""

from dataclasses import replace

import pytest
import torch
import toy
from torch import nn

from voicehub_aot.compiler.export import example_inputs, export_region
from voicehub_aot.compiler.flops import matrix_flops
from voicehub_aot.compiler.split import bindings, checked, is_cheap, split
from voicehub_aot.compiler.stages import run_stages
from voicehub_aot.errors import ExportFailed, StageFailed
from voicehub_aot.spec.region import Binding, Region


@pytest.fixture(scope="module")
def exported():
    return export_region(toy.region())


@pytest.fixture(scope="module")
def stages(exported):
    graph, symbols = exported
    return split(graph, toy.SPEC, symbols)


def names(values):
    return {v.name for v in values}


def test_export_keeps_attention_whole_and_sizes_symbolic(exported):
    graph, symbols = exported
    targets = [n.target for n in graph.graph.nodes]

    assert targets.count(torch.ops.aten.scaled_dot_product_attention.default) == 1
    assert set(symbols.values()) == {"B", "frames", "text"}


def test_export_failure_names_the_region_and_keeps_the_reason():
    class Branching(toy.Toy):
        def forward(self, x, time, cond, ids, lengths, drop):
            if lengths.max().item() > 3:
                return x, cond
            return x, x

    with pytest.raises(ExportFailed, match="region toy") as caught:
        export_region(Region(toy.SPEC, Branching().eval()))
    assert caught.value.__cause__ is not None


def test_binding_is_the_union_over_inputs(exported):
    known = bindings(exported[0].graph, toy.SPEC)
    by_target = {}
    for node, binding in known.items():
        by_target.setdefault(node.target, set()).add(binding)

    assert by_target[torch.ops.aten.tanh.default] == {Binding.CONSTANT}
    assert by_target[torch.ops.aten.sin.default] == {Binding.TIME}
    assert by_target[torch.ops.aten.embedding.default] == {Binding.REQUEST}
    assert by_target[torch.ops.aten.silu.default] == {Binding.TIME | Binding.REQUEST}
    assert all(b & Binding.STATE for b in by_target[torch.ops.aten.scaled_dot_product_attention.default])


def test_stages_read_only_the_weights_of_their_own_work(stages):
    assert set(stages.table.constants) == {"clock.weight", "clock.bias"}
    assert {"given.weight", "given.bias", "table.weight"} <= set(stages.prepare.constants)
    assert set(stages.mixed.constants) == {"mixed.weight", "mixed.bias"}
    assert set(stages.step.constants) == {"into.weight", "into.bias", "out.weight", "out.bias"}


def test_constant_expressions_are_folded_at_build(stages):
    (name,) = stages.folded

    assert name in stages.prepare.constants
    torch.testing.assert_close(stages.folded[name], torch.tanh(toy.region().module.bank))


def test_views_and_index_masks_are_recomputed_instead_of_stored(stages):
    assert names(stages.table.outputs) == {"linear"}  # scale, shift and 1 + scale are views and arithmetic of one row
    assert "lengths" in names(stages.step.inputs)  # the mask is rebuilt from it
    assert not any(v.dtype == "bool" for v in stages.step.inputs)


def test_exposed_request_values_leave_prepare(stages):
    assert "summary" in names(stages.prepare.outputs)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 37, 5), (4, 20, 64)])
def test_stages_together_equal_the_whole_at_other_sizes(exported, stages, sizes):
    inputs = example_inputs(toy.SPEC, dict(zip(("B", "frames", "text"), sizes, strict=True)), seed=5)

    whole, parts = exported[0](**inputs), run_stages(stages, inputs)

    torch.testing.assert_close(tuple(parts.values()), whole)


def test_a_stage_that_computes_something_else_is_refused(exported, stages):
    broken = replace(stages.step, module=Doubling(stages.step.module))

    with pytest.raises(StageFailed, match="velocity"):
        checked(replace(stages, step=broken), exported[0])


class Doubling(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *values):
        return tuple(2 * v for v in self.inner(*values))


def test_an_output_that_needs_the_state_may_not_be_exposed():
    class Leaking(toy.Toy):
        def forward(self, x, time, cond, ids, lengths, drop):
            velocity, _ = super().forward(x, time, cond, ids, lengths, drop)
            return velocity, x.mean(1, keepdim=True)

    region = Region(toy.SPEC, Leaking().eval())
    for parameter in region.module.parameters():
        nn.init.normal_(parameter)
    graph, symbols = export_region(region)

    with pytest.raises(StageFailed, match="summary"):
        split(graph, toy.SPEC, symbols)


def test_matrix_flops_follow_the_sizes(exported, stages):
    symbols = exported[1]
    at = {"B": 2, "frames": 10, "text": 4}
    linears = 2 * 2 * 10 * (6 * 16 + 16 * 6)
    scores = 4 * 2 * 2 * 10 * 10 * 8

    assert matrix_flops(stages.step, at, symbols) == linears + scores


def test_products_and_sums_of_tensors_are_not_cheap(exported):
    cheap = {n.target for n in exported[0].graph.nodes if is_cheap(n)}

    assert torch.ops.aten.unsqueeze.default in cheap
    assert torch.ops.aten.linear.default not in cheap
    assert torch.ops.aten.embedding.default not in cheap
