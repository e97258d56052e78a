"""Mish: torch's own kernel against one exponential, eager and compiled."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

import torch
import torch.nn.functional as F
from timing import environment, interleaved, report

from voicehub_aot.kernels.mish import mish_by_one_exponential


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="also what Inductor makes of them")
    arguments = parser.parse_args()
    print(environment())
    for frames in (128, 512):
        x = torch.randn(2, 1024, frames)
        candidates = {"torch": F.mish, "one exponential": mish_by_one_exponential}
        if arguments.compile:
            candidates |= {f"{name} compiled": torch.compile(run) for name, run in candidates.items()}
        report(
            f"[2, 1024, {frames}]", interleaved({n: partial(r, x) for n, r in candidates.items()}, rounds=15, calls=5)
        )


if __name__ == "__main__":
    main()
