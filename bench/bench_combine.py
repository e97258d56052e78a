"""One combine instruction against the same sum as chained Python arithmetic.

python bench/bench_combine.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

import torch
from timing import environment, interleaved, report

from voicehub_aot.kernels.combine import combine

SHAPES = [(1, 64, 24), (1, 512, 100), (2, 1024, 100), (4, 2048, 100)]  # B, T, C of a state
COEFFICIENTS = [(1.0, 0.03125), (1.0, 0.03125, -0.0625)]  # an Euler step, and one with the previous velocity


def chained(terms: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
    (first, coefficient), *rest = terms
    total = coefficient * first
    for tensor, factor in rest:
        total = total + factor * tensor
    return total


@torch.inference_mode()
def main() -> None:
    print(environment())
    for shape in SHAPES:
        for coefficients in COEFFICIENTS:
            terms = [(torch.randn(shape), c) for c in coefficients]
            candidates = {
                "chained": lambda terms=terms: chained(terms),
                "combine": lambda terms=terms: combine(terms),
            }
            report(f"{list(shape)}, {len(terms)} terms", interleaved(candidates, rounds=31, calls=50))


if __name__ == "__main__":
    main()
