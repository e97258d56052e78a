"""Operators of ours, on every engine that runs here: one node in the exported stage, the same numbers from each."""

import onnx
import pytest
import torch
from safetensors.torch import save_file

from voicehub_aot import engines
from voicehub_aot.artifacts import store
from voicehub_aot.compiler.export import export_program
from voicehub_aot.engines import Source, StageCode, _onnx
from voicehub_aot.kernels.depthwise import depthwise
from voicehub_aot.spec.region import TensorSpec
from voicehub_aot.spec.target import default_target, parse_target

D = 8
DEPTHWISE = torch.ops.voicehub_aot.depthwise.default
INPUTS = (
    TensorSpec(name="x", shape=("B", "frames", D), dtype="float32"),
    TensorSpec(name="extent", shape=("B",), dtype="int64"),
)
OUTPUTS = (TensorSpec(name="y", shape=("B", "frames", D), dtype="float32"),)


class Convolutions(torch.nn.Module):
    """Two layers: kernel 5 with dilation 3, kernel 3 without."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"first": (D, 1, 5), "second": (D, 1, 3), "bias": (D,)}.items():
            self.register_buffer(name, torch.randn(shape, generator=generator))

    def forward(self, *inputs):
        x, extent = inputs
        x = depthwise(x, self.first, self.bias, extent, 3)
        return (depthwise(x, self.second, self.bias, extent, 1),)


@pytest.fixture(scope="module")
def code():
    rows, frames = torch.export.Dim("B", max=64), torch.export.Dim("frames", max=512)
    examples = (torch.randn(3, 37, D), torch.tensor([37, 5, 1]))
    program = export_program(Convolutions(), examples, {"x": {0: rows, 1: frames}, "extent": {0: rows}}, "test")
    return StageCode("step", program, INPUTS, OUTPUTS, examples)


def test_a_stage_holds_one_node_a_layer(code):
    assert [n.target for n in code.graph.graph.nodes].count(DEPTHWISE) == 2


@pytest.mark.parametrize("name", ["aoti", "onnxruntime", "openvino"])
def test_every_engine_computes_them_at_every_size(code, name, tmp_path):
    engine, target, root = engines.get(name), parse_target(default_target()), tmp_path / "artifact"
    root.mkdir()
    save_file(code.weights, root / store.WEIGHTS)
    engine.compile_stage(code, "shared", target, tmp_path / "compiled")
    path = engine.install(tmp_path / "compiled", root, "step", target)
    digests = {file: entry.sha256 for file, entry in store.list_files(root).items()}
    opened = engine.open_stage(Source(root, path, digests, INPUTS, OUTPUTS, code.weights, "step"), 1)

    for lengths in ([1], [2, 1], [40, 3, 39], [9, 9]):
        x, extent = torch.randn(len(lengths), max(lengths), D), torch.tensor(lengths)
        (got,) = opened([x, extent])
        torch.testing.assert_close(got, Convolutions()(x, extent)[0], atol=1e-5, rtol=1e-5)


def test_in_onnx_each_is_one_convolution_over_sizes_read_once(code, tmp_path):
    _onnx.write(code, tmp_path / "graph")

    nodes = [n.op_type for n in onnx.load(tmp_path / "graph" / _onnx.MODEL, load_external_data=False).graph.node]
    assert nodes.count("Conv") == nodes.count("Gather") == 2
    assert nodes.count("Shape") == 2


def test_an_operator_may_be_left_composed(code, tmp_path):
    _onnx.write(code, tmp_path / "graph", composed=(DEPTHWISE,))

    nodes = [n.op_type for n in onnx.load(tmp_path / "graph" / _onnx.MODEL, load_external_data=False).graph.node]
    assert "Conv" not in nodes
