"""The pass that turns linears of few rows into reductions."""

import pytest
import torch
from torch import nn

from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.passes import few_rows, proven, rewritten
from voicehub_aot.compiler.split import split
from voicehub_aot.errors import StageFailed
from voicehub_aot.kernels.linear import reduced
from voicehub_aot.spec.region import Call, Input, Region, RegionSpec

WIDTH = 6
SPEC = RegionSpec(
    name="two linears",
    inputs=(
        Input(name="x", shape=("B", 3, WIDTH), binding="STATE", doc="state"),
        Input(name="time", shape=(1,), binding="TIME", doc="time"),
    ),
    dims=(),
    main_dim=None,
    call=Call(parameters=(), returns="velocity", source="made up"),
)


class TwoLinears(nn.Module):
    """`many` has three rows a request, `single` one."""

    def __init__(self):
        super().__init__()
        self.many, self.single = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, time):
        return self.many(x) * time + self.single(x.mean(1))[:, None]


def stages_of(narrow):
    generator = torch.Generator().manual_seed(1)
    module = TwoLinears().eval().requires_grad_(False)
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(drawn.bfloat16() if narrow else drawn)
    graph, symbols = export_region(Region(SPEC, module))
    return split(graph, SPEC, symbols)


def spans(requests):
    return {"B": ((1, requests),)}


@pytest.mark.parametrize("narrow", [True, False])
def test_only_linears_of_few_rows_are_fused_and_weights_narrowed_where_nothing_is_lost(narrow):
    stages = stages_of(narrow)

    after = few_rows.rewrite(stages, spans(2)).step  # 6 rows and 2

    x, time = torch.randn(2, 3, WIDTH), torch.full((1,), 0.5)
    torch.testing.assert_close(after.module(x, time)[0], stages.step.module(x, time)[0])
    assert [n.target for n in after.graph.nodes].count(reduced) == 1
    assert after.row_bound
    dtypes = {name: tensor.dtype for name, tensor in after.module.named_buffers()}
    assert ("single.weight_bfloat16" in dtypes) is narrow
    assert dtypes["many.weight"] == torch.float32


def test_the_stages_given_are_left_as_they_were():
    stages = stages_of(narrow=True)
    before = str(stages.step.graph)

    few_rows.rewrite(stages, spans(1))

    assert str(stages.step.graph) == before
    assert "single.weight_bfloat16" not in dict(stages.step.module.named_buffers())
    assert few_rows.rewrite(stages, spans(100)) is stages  # no linear has few rows


@pytest.mark.parametrize(("requests", "serves"), [(1, True), (2, False)])
def test_packed_weights_are_given_up_where_every_linear_has_few_rows(requests, serves):
    assert few_rows.serves_few(stages_of(narrow=False).step, spans(requests)) is serves


def test_only_engines_that_fuse_and_read_their_weights_get_it():
    after = {
        (engine, weights): "few_rows" in rewritten(stages_of(narrow=True), engine, weights, spans(1)).deviations
        for engine in ("aoti", "onnxruntime")
        for weights in ("packed", "shared")
    }

    assert [key for key, rewrote in after.items() if rewrote] == [("aoti", "shared")]


def test_a_pass_that_changes_what_is_computed_is_refused_by_name():
    stages = stages_of(narrow=True)
    after = few_rows.rewrite(stages, spans(1))
    after.step.module.get_buffer("single.weight_bfloat16").mul_(1.01)

    with pytest.raises(StageFailed, match=r"pass few_rows: 'velocity' is off by"):
        proven("few_rows", stages, after, spans(1))
