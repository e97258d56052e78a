"""Stand-in weights: a pure function of (checkpoint key, shape), the same on every machine and torch version.

They let a build, its parity report and its benchmarks run at released size where no checkpoint is at hand.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch

VECTORS_NEAR_ONE = ("weight", "gamma", "scale", "alpha")


def synthetic_tensor(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """float32. Matrices and kernels: N(0, 1 / fan_in); vectors named like a gain: 1 + 0.1 N; others: 0.02 N.

    Nothing is left at zero, so a zero-initialised modulation or output layer cannot hide a wrong forward.
    """
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode("utf-8"))))
    z = generator.standard_normal(size=shape, dtype=np.float32)
    if len(shape) >= 2:
        z *= np.float32(1.0 / math.sqrt(max(1, math.prod(shape[1:]))))
    elif key.rsplit(".", 1)[-1] in VECTORS_NEAR_ONE:
        z = np.asarray(np.float32(1.0) + np.float32(0.1) * z)  # asarray: a 0-d sum is a scalar
    else:
        z *= np.float32(0.02)
    return torch.from_numpy(z)


def synthetic_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """A whole checkpoint from its keys and shapes."""
    return {key: synthetic_tensor(key, tuple(shape)) for key, shape in shapes.items()}
