"""Depthwise convolution with replicated edges: padding and conv1d, as upstream has it, against the gather form.

    python bench/bench_depthwise.py [--frames 64 128 250] [--compile] [--engines onnxruntime openvino]

Eager by default; --compile adds both under torch.compile. Medians and 95th percentiles of one call. --engines: there,
the gathers of its composition against the convolution that our ONNX graphs have in their place.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

import torch
import torch.nn.functional as F
from timing import interleaved, report

from voicehub_aot.kernels.depthwise import depthwise

Operation = Callable[..., torch.Tensor]


def pad_and_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, extent: torch.Tensor, dilation: int
) -> torch.Tensor:
    """Upstream's form, from and to channels-last; it knows no extent, so rows must be whole."""
    pad = weight.shape[-1] // 2 * dilation
    padded = F.pad(x.transpose(1, 2), (pad, pad), mode="replicate")
    return F.conv1d(padded, weight, bias, dilation=dilation, groups=x.shape[2]).transpose(1, 2)


def measure_ms(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(median, 95th percentile) after a warm-up that is not counted."""
    timeit.repeat(call, number=1, repeat=5)
    times = sorted(1e3 * t for t in timeit.repeat(call, number=1, repeat=repeats))
    return statistics.median(times), times[int(0.95 * (len(times) - 1))]


class Layer(torch.nn.Module):
    """One layer, as a stage has it: the inputs are x and extent."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.register_buffer("weight", torch.randn(width, 1, 5))
        self.register_buffer("bias", torch.randn(width))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor]:
        x, extent = inputs
        return (depthwise(x, self.weight, self.bias, extent, self.dilation),)


def on_engine(name: str, rows: int, lengths: list[int], width: int, dilation: int, rounds: int) -> None:
    """One line a length: the composition, then the convolution that our graphs hold."""
    from safetensors.torch import save_file

    from voicehub_aot import engines
    from voicehub_aot.artifacts import store
    from voicehub_aot.compiler.export import export_program
    from voicehub_aot.engines import Source, StageCode, _onnx
    from voicehub_aot.spec.region import TensorSpec

    inputs = (
        TensorSpec(name="x", shape=("B", "frames", width), dtype="float32"),
        TensorSpec(name="extent", shape=("B",), dtype="int64"),
    )
    outputs = (inputs[0].model_copy(update={"name": "y"}),)
    batch, frames = torch.export.Dim("B", max=64), torch.export.Dim("frames", max=4096)
    examples = (torch.randn(3, 37, width), torch.full((3,), 37))
    program = export_program(Layer(width, dilation), examples, {"x": {0: batch, 1: frames}, "e": {0: batch}}, name)
    code = StageCode("step", program, inputs, outputs, examples)
    forms = {"gathers": (torch.ops.voicehub_aot.depthwise.default,), "convolution": ()}
    with TemporaryDirectory() as scratch:
        opened = {}
        for form, composed in forms.items():
            root = Path(scratch) / form
            _onnx.write(code, root / "graph", composed)
            save_file(code.weights, root / store.WEIGHTS)
            path = _onnx.place(root / "graph", root, "step")
            digests = {file: entry.sha256 for file, entry in store.list_files(root).items()}
            source = Source(root, path, digests, inputs, outputs, code.weights, form)
            opened[form] = engines.get(name).open_stage(source, 1)
        for length in lengths:
            given = [torch.randn(rows, length, width), torch.full((rows,), length)]
            calls = {form: functools.partial(stage, given) for form, stage in opened.items()}
            times = interleaved(calls, rounds, calls=10)
            report(f"{name}, {length} frames, dilation {dilation}", times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--frames", type=int, nargs="+", default=[64, 128, 250])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dilations", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--engines", nargs="+", default=[], choices=["onnxruntime", "openvino"])
    options = parser.parse_args()

    candidates: dict[str, Operation] = {"pad+conv1d": pad_and_conv, "depthwise": depthwise}
    if options.compile:
        candidates |= {f"{name}, compiled": torch.compile(f, dynamic=True) for name, f in candidates.items()}
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"float32, {options.rows} rows, width {options.width}, kernel 5, {options.repeats} repeats")
    print(f"{'frames':>6} {'dilation':>8}  {'variant':<22} {'median ms':>9} {'p95 ms':>9} {'ratio':>6}")
    for frames in options.frames:
        for dilation in options.dilations:
            x = torch.randn(options.rows, frames, options.width)
            weight, bias = torch.randn(options.width, 1, 5), torch.randn(options.width)
            extent = torch.full((options.rows,), frames)
            wanted = pad_and_conv(x, weight, bias, extent, dilation)
            first: float | None = None
            for name, operation in candidates.items():
                call = functools.partial(operation, x, weight, bias, extent, dilation)
                torch.testing.assert_close(call(), wanted, atol=1e-4, rtol=1e-4)
                median, p95 = measure_ms(call, options.repeats)
                first = median if first is None else first
                print(f"{frames:>6} {dilation:>8}  {name:<22} {median:>9.3f} {p95:>9.3f} {first / median:>5.2f}x")
    for name in options.engines:
        for dilation in options.dilations:
            on_engine(name, options.rows, options.frames, options.width, dilation, options.repeats)


if __name__ == "__main__":
    main()
