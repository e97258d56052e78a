"""Linears of few rows: the matrix library against fused reductions, and how many weight rows are read side by side.

    python bench/bench_linear.py [--rows 1 2 4 8 16] [--streams 1 4 8] [--width 1536] [--outputs 4608]

library   F.linear on float32 weights, not packed: what a shared engine would call
fused     kernels.linear.reduced under torch.compile, weights in float32 and in bfloat16, by number of streams

Each call runs eight different weights, so that none is found in the cache. The rule `few` is where fused bfloat16
stops being faster.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

import torch
import torch.nn.functional as F
from timing import environment, interleaved, report

from voicehub_aot.kernels import linear
from voicehub_aot.spec.target import usable_threads

WEIGHTS = 8


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    arguments.add_argument("--streams", type=int, nargs="+", default=[linear.STREAMS])
    arguments.add_argument("--width", type=int, default=1536)
    arguments.add_argument("--outputs", type=int, default=4608)
    arguments.add_argument("--rounds", type=int, default=15)
    options = arguments.parse_args()
    torch.set_num_threads(usable_threads())
    print(environment())
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(options.outputs, options.width, generator=generator).bfloat16() for _ in range(WEIGHTS)]
    narrow, wide = drawn, [weight.float() for weight in drawn]

    def every(product, weights, x):  # type: ignore[no-untyped-def]
        return [product(x, weight) for weight in weights]

    with torch.no_grad():
        for rows in options.rows:
            x = torch.randn(rows, options.width, generator=generator) / math.sqrt(options.width)
            candidates = {"library": functools.partial(every, F.linear, wide, x)}
            for streams in options.streams:
                linear.STREAMS = streams
                torch._dynamo.reset()
                fused = torch.compile(functools.partial(linear.reduced, bias=None, most=rows), dynamic=False)
                torch.testing.assert_close(fused(x, wide[0]), F.linear(x, wide[0]), rtol=1e-4, atol=1e-4)
                candidates[f"float32 x{streams}"] = functools.partial(every, fused, wide, x)
                candidates[f"bfloat16 x{streams}"] = functools.partial(every, fused, narrow, x)
            report(f"{rows} rows", interleaved(candidates, options.rounds, pause_s=0.02, warm_up=2))


if __name__ == "__main__":
    main()
