"""Depthwise convolution with replicated edges: padding and conv1d, as upstream has it, against the gather form.

    python bench/bench_depthwise.py [--frames 64 128 250] [--compile]

Eager by default; --compile adds both under torch.compile. Medians and 95th percentiles of one call.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import timeit
from collections.abc import Callable

import torch
import torch.nn.functional as F

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


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--frames", type=int, nargs="+", default=[64, 128, 250])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dilations", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--compile", action="store_true")
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


if __name__ == "__main__":
    main()
