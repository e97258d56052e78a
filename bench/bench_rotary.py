"""Rotary embedding: interleaved pairs against halves, eager and compiled."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

import torch
from timing import environment, interleaved, report

from voicehub_aot.kernels.rotary import rotate_halves, rotate_pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="also what Inductor makes of them")
    arguments = parser.parse_args()
    print(environment())
    for frames in (128, 512):
        x = torch.randn(2, frames, 16, 64)
        angles = torch.randn(frames, 1, 32)
        candidates = {"pairs": rotate_pairs, "halves": rotate_halves}
        if arguments.compile:
            candidates |= {f"{name} compiled": torch.compile(run) for name, run in candidates.items()}
        calls = {name: partial(run, x, angles.cos(), angles.sin()) for name, run in candidates.items()}
        report(f"[2, {frames}, 16, 64]", interleaved(calls, rounds=15, calls=10))


if __name__ == "__main__":
    main()
