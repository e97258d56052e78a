"""Buckets: the sizes a build promises, how a request finds its own, and which sizes waste least.

An axis is the name of a region's `Dim`, or "batch". An axis without buckets is not promised: what happens to its
sizes is the engine's business.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from voicehub_aot.errors import NoBucketFits, UsageError
from voicehub_aot.spec.region import BATCH, Dim, RegionSpec

BATCH_AXIS = "batch"
Overflow = Literal["error", "run"]
SIZE = re.compile(r"[1-9][0-9]{0,8}")
LONGEST = 10**9
LEAST_STEP = 8  # of a ladder beyond its rungs
LEAST_RUNG = 32  # of a dimension that is read once per request
LARGEST_WEIGHT = 1e15  # the padded work of any histogram stays a finite float64
SYNTAX = "wanted sizes as in 64,128,256, or axis=sizes as in frames=64,128 batch=1,2"
HISTOGRAM = 'wanted a JSON list of lengths as in [120, 95, 120], or of their counts as in {"120": 2, "95": 1}'


class Buckets(BaseModel):
    """axes: promised sizes by axis, ascending, e.g. {"frames": (64, 128, 256), "batch": (1, 2, 4)}."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    axes: dict[str, tuple[Annotated[int, Field(strict=True, ge=1)], ...]]

    @field_validator("axes")
    @classmethod
    def _ascending(cls, axes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        for axis, sizes in axes.items():
            if not sizes or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"buckets of {axis!r} must be one or more strictly ascending sizes, got {sizes!r}")
        return axes

    def largest(self, axis: str) -> int | None:
        """The largest promised size, None if the axis is not promised."""
        return self.axes[axis][-1] if axis in self.axes else None

    def pick(self, axis: str, size: int, where: str) -> int:
        """The smallest promised size that holds `size`; NoBucketFits, starting with `where`, if there is none."""
        sizes = self.axes.get(axis, ())
        position = bisect_left(sizes, size)
        if position < len(sizes):
            return sizes[position]
        problem = f"exceeds the largest bucket {sizes[-1]} of {sizes}" if sizes else "has no bucket on this axis"
        flag = ",".join(str(s) for s in (*sizes, size))
        raise NoBucketFits(
            f"{where}: {axis}={size} {problem}; rebuild with a bucket >= {size}, e.g. --buckets {axis}={flag}, "
            "or load with overflow='run'"
        )

    def nearest(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The promised bucket of these sizes by axis: the smallest that holds them, else the largest. Without batch."""
        axes = {axis: promised for axis, promised in self.axes.items() if axis != BATCH_AXIS}
        return {a: p[min(bisect_left(p, sizes[a]), len(p) - 1)] for a, p in axes.items()}

    def combinations(self, axes: Iterable[str]) -> list[dict[str, int]]:
        """Every combination of the promised sizes of `axes`, ascending, the last axis fastest.

        Axes that are not promised are left out; without any promised axis the one combination is {}.
        """
        promised = [axis for axis in axes if axis in self.axes]
        product = itertools.product(*(self.axes[axis] for axis in promised))
        return [dict(zip(promised, sizes, strict=True)) for sizes in product]


class Ladder(BaseModel):
    """Sizes that requests are padded to where an engine keeps memory for every size it has seen.

    axes: rungs by dimension, ascending, the promised buckets among them; a dimension that is absent runs at its own
    sizes. Beyond the last rung (at once, if there is none) the ladder goes on in steps of LEAST_STEP, or a quarter of
    the power of two below where that is more: then at most a quarter of the size is padding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    axes: dict[str, tuple[Annotated[int, Field(strict=True, ge=1)], ...]] = {}

    @field_validator("axes")
    @classmethod
    def _ascending(cls, axes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        for axis, rungs in axes.items():
            if list(rungs) != sorted(set(rungs)):
                raise ValueError(f"rungs of {axis!r} must be strictly ascending, got {rungs!r}")
        return axes

    def fit(self, dim: Dim, size: int) -> int:
        """The size that `size` of this dimension, within its limits, runs at; its least size is never padded."""
        if dim.name not in self.axes or size == dim.min:
            return size
        rungs = self.axes[dim.name]
        position = bisect_left(rungs, size)
        if position < len(rungs):
            return min(rungs[position], dim.max)
        step = max(LEAST_STEP, (1 << ((size - 1).bit_length() - 1)) // 4)
        return min(-(-size // step) * step, dim.max)


def label(bucket: Mapping[str, int]) -> str:
    """How a bucket is named wherever it is shown: "frames=128 text=64", or "any size" where nothing is fixed."""
    return " ".join(f"{axis}={size}" for axis, size in bucket.items()) or "any size"


@dataclass(frozen=True)
class Fit:
    """The sizes that a request of given sizes runs at.

    Static engines run at the promised buckets; a dynamic one at the ladder's rungs, or at the request's own sizes
    where it has none. overflow: "run" lets a dynamic engine take sizes over the largest promised bucket.
    """

    dims: tuple[Dim, ...]
    buckets: Buckets
    where: str
    ladder: Ladder
    static: bool = False
    overflow: Overflow = "error"

    def sizes(self, given: Mapping[str, int]) -> dict[str, int]:
        """The padded size of every dimension. Raises NoBucketFits for a size that was not promised."""
        beyond = self.beyond(given) if self.overflow == "run" else {}
        sizes = {}
        for axis in self.buckets.axes:
            if axis not in beyond:
                bucket = self.buckets.pick(axis, _size(given, axis), self.where)
                if self.static and axis != BATCH_AXIS:
                    sizes[axis] = bucket
        for dim in self.dims:
            if not dim.min <= given[dim.name] <= dim.max:
                raise NoBucketFits(f"{self.where}: {dim.name}={given[dim.name]}, wanted {dim.min} to {dim.max}")
            sizes.setdefault(dim.name, self.ladder.fit(dim, given[dim.name]))
        return sizes

    def beyond(self, given: Mapping[str, int]) -> dict[str, int]:
        """The sizes over their axis's largest promised bucket, by axis."""
        return {a: _size(given, a) for a, promised in self.buckets.axes.items() if _size(given, a) > promised[-1]}


def _size(given: Mapping[str, int], axis: str) -> int:
    return given[BATCH if axis == BATCH_AXIS else axis]


def rungs_between(buckets: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` sizes, `buckets` (ascending) among them, with the widest step between two as small as can be.

    Fewer if that is every size, more if there are more buckets.
    """
    gaps = list(itertools.pairwise((0, *buckets)))
    parts = [1] * len(gaps)
    while sum(parts) < count:
        steps = [(high - low) / n for (low, high), n in zip(gaps, parts, strict=True)]
        if max(steps, default=1) <= 1:
            break
        parts[steps.index(max(steps))] += 1
    return tuple(
        low - (low - high) * part // n for (low, high), n in zip(gaps, parts, strict=True) for part in range(1, n + 1)
    )


def doubling(largest: int) -> tuple[int, ...]:
    """LEAST_RUNG and its doublings and the rung halfway between two of them, to `largest`: 32, 64, 96, 128, 192, ..."""
    rungs, rung = [], LEAST_RUNG
    while rung < largest:
        rungs.append(rung)
        if rung > LEAST_RUNG and rung * 3 // 2 < largest:
            rungs.append(rung * 3 // 2)
        rung *= 2
    return (*rungs, largest)


def _parse_sizes(text: str, given: str) -> tuple[int, ...]:
    parts = text.split(",")
    for part in parts:
        if not SIZE.fullmatch(part):
            raise UsageError(f"--buckets {given!r}: {part!r} is not a positive integer; {SYNTAX}")
    sizes = sorted(int(part) for part in parts)
    if len(set(sizes)) < len(sizes):
        raise UsageError(f"--buckets {given!r}: a size is given twice; name each size once")
    return tuple(sizes)


def parse_buckets(texts: Sequence[str], main_axis: str, known_axes: Collection[str]) -> Buckets:
    """The --buckets flag, which may be repeated: "64,128", "frames=64,128", "text=100 batch=1,2,4".

    Sizes without an axis are those of `main_axis`; any order is accepted.
    """
    axes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        items = text.split()
        if not items:
            raise UsageError(f"--buckets {text!r}: is empty; {SYNTAX}")
        for item in items:
            name, equals, sizes = item.rpartition("=")
            axis = name if equals else main_axis
            if axis not in known_axes:
                known = ", ".join(sorted(known_axes))
                raise UsageError(f"--buckets {text!r}: unknown axis {axis!r}; this model has {known}")
            if axis in axes:
                raise UsageError(f"--buckets {text!r}: axis {axis!r} is given twice; list all its sizes at once")
            axes[axis] = _parse_sizes(sizes, text)
    return Buckets(axes=axes)


def check_buckets(buckets: Buckets, spec: RegionSpec) -> None:
    """UsageError unless every axis is one of the region's, and every size within what the region accepts."""
    dims = {dim.name: dim for dim in spec.dims}
    for axis, sizes in buckets.axes.items():
        if axis == BATCH_AXIS:
            continue
        if axis not in dims:
            known = ", ".join(sorted((*dims, BATCH_AXIS)))
            raise UsageError(f"{spec.name}: buckets for the unknown axis {axis!r}; this model has {known}")
        low, high = dims[axis].min, dims[axis].max
        outside = [size for size in sizes if not low <= size <= high]
        if outside:
            raise UsageError(f"{spec.name}: {axis} buckets {outside} lie outside {low}..{high}, the sizes of the model")


def _check_entry(where: str, length: object, weight: object) -> None:
    if type(length) is not int or not 0 < length < LONGEST:
        raise UsageError(f"{where}: length {length!r} is not a positive integer below 10^9; {HISTOGRAM}")
    if type(weight) not in (int, float) or not 0 < cast(float, weight) <= LARGEST_WEIGHT:
        raise UsageError(f"{where}: length {length} has weight {weight!r}, not a positive number; {HISTOGRAM}")


def _check_histogram(histogram: Mapping[int, int | float], where: str) -> None:
    """UsageError unless there are lengths, all positive integers, all with positive finite weights."""
    if not histogram:
        raise UsageError(f"{where}: holds no lengths; {HISTOGRAM}")
    for length, weight in histogram.items():
        _check_entry(where, length, weight)


def choose_buckets(
    histogram: Mapping[int, int | float], count: int, multiple_of: int = 1, max_size: int | None = None
) -> tuple[int, ...]:
    """The at most `count` sizes with the least padded work: sum of weight * (bucket(n) - n) over the lengths n.

    histogram: weight (how often, or how much it matters) by length. Sizes are multiples of `multiple_of`, or
    `max_size`, the largest the model accepts, where the next multiple lies beyond it. Every length is covered.
    A further size always helps until every rounded length has its own, so ties are between sets of as many sizes:
    the one whose first differing size is smaller wins.
    """
    _check_histogram(histogram, "histogram")
    if count < 1 or multiple_of < 1:
        raise UsageError(f"count={count!r}, multiple_of={multiple_of!r}: both must be 1 or more")
    limit = math.inf if max_size is None else max_size
    if max(histogram) > limit:
        raise UsageError(f"histogram: length {max(histogram)} exceeds {max_size}, the largest this model accepts")
    weight_of: dict[int, float] = defaultdict(float)
    for length, weight in histogram.items():
        weight_of[int(min(-(-length // multiple_of) * multiple_of, limit))] += weight
    sizes = sorted(weight_of)
    n = len(sizes)
    size = np.array(sizes, dtype=np.float64)
    before = np.concatenate([[0.0], np.cumsum([weight_of[s] for s in sizes])])  # [n + 1] weight below each size

    # work[i]: least work of sizes[i:] in exactly k buckets; ends[k - 1][i]: the index of the first of those buckets.
    work = np.full(n + 1, np.inf)
    work[n] = 0.0
    ends = []
    for _ in range(min(count, n)):
        fewer, work, end = work, np.full(n + 1, np.inf), np.zeros(n, dtype=np.int64)
        for i in range(n):
            candidates = size[i:] * (before[i + 1 :] - before[i]) + fewer[i + 1 :]
            end[i] = i + candidates.argmin()
            work[i] = candidates.min()
        ends.append(end)

    chosen, i = [], 0
    for end in reversed(ends):
        chosen.append(sizes[end[i]])
        i = end[i] + 1
    return tuple(chosen)


def waste(histogram: Mapping[int, int | float], buckets: Sequence[int]) -> float:
    """Padded work / useful work - 1: 0 without padding, 1 when half of the work is padding."""
    _check_histogram(histogram, "histogram")
    ascending = sorted(buckets)
    if not ascending or max(histogram) > ascending[-1]:
        raise NoBucketFits(f"histogram: length {max(histogram)} fits none of the buckets {tuple(ascending)}; add one")
    padded = sum(weight * ascending[bisect_left(ascending, length)] for length, weight in histogram.items())
    return float(padded / sum(weight * length for length, weight in histogram.items()) - 1)


def powers_of_two(histogram: Mapping[int, int | float], count: int | None = None) -> tuple[int, ...]:
    """The powers of two that the lengths round up to, the usual choice; `count` keeps only that many of the largest."""
    _check_histogram(histogram, "histogram")
    if count is not None and count < 1:
        raise UsageError(f"count={count!r}: must be 1 or more")
    used = sorted({1 << (length - 1).bit_length() for length in histogram})
    return tuple(used if count is None else used[-count:])


def read_histogram(path: Path) -> dict[int, float]:
    """Weight by length, from a JSON list of lengths or a JSON mapping of lengths to counts."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: unreadable ({error}); {HISTOGRAM}") from error
    if isinstance(content, list):
        entries = [(length, 1.0) for length in content]
    elif isinstance(content, dict):
        entries = [(int(length) if SIZE.fullmatch(length) else length, weight) for length, weight in content.items()]
    else:
        raise UsageError(f"{path}: holds {content!r:.60}; {HISTOGRAM}")
    histogram: dict[int, float] = defaultdict(float)
    for length, weight in entries:
        _check_entry(str(path), length, weight)
        histogram[length] += weight
    _check_histogram(histogram, str(path))
    return dict(histogram)
