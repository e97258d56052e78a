"""Linears of few rows as reductions, and which linears of a stage they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from voicehub_aot.compiler import fuse
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.split import split
from voicehub_aot.kernels.linear import FEW_ROWS, few, reduced
from voicehub_aot.spec.region import Call, Input, Region, RegionSpec


@pytest.mark.parametrize("outputs", [1, 7, 24])
@pytest.mark.parametrize("shape", [(1, 5), (3, 5), (2, 2, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_reduction_is_the_linear(outputs, shape, biased):
    generator = torch.Generator().manual_seed(outputs)
    x, weight = torch.randn(shape, generator=generator), torch.randn(outputs, 5, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None

    torch.testing.assert_close(reduced(x, weight, bias, most=4), F.linear(x, weight, bias))


def test_a_narrow_weight_is_widened_before_it_is_used():
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(2, 64, generator=generator), torch.randn(8, 64, generator=generator).bfloat16()

    torch.testing.assert_close(reduced(x, weight, None, most=2), F.linear(x, weight.float()))


def test_few_is_a_rule_of_rows_and_device():
    assert few(FEW_ROWS)
    assert not few(FEW_ROWS + 1)
    assert not few(1, device="cuda")


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


def stage_of(narrow):
    generator = torch.Generator().manual_seed(1)
    module = TwoLinears().eval().requires_grad_(False)
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(drawn.bfloat16() if narrow else drawn)
    graph, symbols = export_region(Region(SPEC, module))
    return split(graph, SPEC, symbols).step


def spans(requests):
    return {"B": ((1, requests),)}


@pytest.mark.parametrize("narrow", [True, False])
def test_only_linears_of_few_rows_are_fused_and_weights_narrowed_where_nothing_is_lost(narrow):
    stage = stage_of(narrow)

    module = fuse.fused(stage, spans(2))  # 6 rows and 2

    x, time = torch.randn(2, 3, WIDTH), torch.full((1,), 0.5)
    torch.testing.assert_close(module(x, time)[0], stage.module(x, time)[0])
    assert [n.target for n in module.graph.nodes].count(reduced) == 1
    dtypes = {name: tensor.dtype for name, tensor in module.named_buffers()}
    assert ("single.weight_bfloat16" in dtypes) is narrow
    assert dtypes["many.weight"] == torch.float32


def test_the_stage_itself_is_left_as_it_was():
    stage = stage_of(narrow=True)
    before = str(stage.module.graph)

    fuse.fused(stage, spans(1))

    assert str(stage.module.graph) == before
    assert "single.weight_bfloat16" not in dict(stage.module.named_buffers())


@pytest.mark.parametrize(("requests", "serves"), [(1, True), (2, False)])
def test_packed_weights_are_given_up_where_every_linear_has_few_rows(requests, serves):
    assert fuse.serves_few(stage_of(narrow=False), spans(requests)) is serves
