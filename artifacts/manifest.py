"""manifest.json: everything the runtime knows about an artifact, as data.

The manifest's own `digest` covers all its other fields, so an edited manifest is not taken for the built one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from voicehub_aot.bucket import Buckets, Ladder
from voicehub_aot.region import RegionSpec, TensorSpec
from voicehub_aot.target import Target

SCHEMA_VERSION = 1


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Data):
    sha256: str
    size: int


class EngineEntry(_Data):
    """One compiled stage. bucket: the sizes it was fixed to; empty = any size.

    most_requests: it was made for so many and no more; None = any number. serves: the buckets it was chosen for by
    measurement; empty = all that it fits. constants: weights it reads from the weight file, under these names (none
    when they are packed inside).
    """

    engine: str
    stage: Literal["prepare", "step"]
    bucket: dict[str, int]
    most_requests: int | None = None
    serves: tuple[dict[str, int], ...] = ()
    path: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    constants: tuple[TensorSpec, ...]
    key: str
    seconds: float
    reason: str


class StageReport(_Data):
    """What `inspect` shows of a stage. flops: matrix operations of one call by bucket label."""

    nodes: int
    parameters: int
    weight_bytes: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    flops: dict[str, int]


class Checkpoint(_Data):
    """source: as given on the command line. digest: sha256 over the weights' names, shapes and bytes."""

    source: str
    digest: str


class Manifest(_Data):
    schema_version: int = SCHEMA_VERSION
    created_by: str
    model: str
    config_name: str
    config: dict[str, Any]
    checkpoint: Checkpoint
    target: Target
    versions: dict[str, str]
    region: RegionSpec
    buckets: Buckets
    ladder: Ladder = Ladder()
    shapes: Literal["dynamic", "static"]
    weights_mode: Literal["packed", "shared"]
    engines: tuple[EngineEntry, ...]
    stages: dict[str, StageReport]
    folded: tuple[str, ...]
    programs: tuple[str, ...]
    files: dict[str, FileEntry]
    digest: str = ""

    @property
    def mixed(self) -> bool:
        """True if every bucket has the engine that was chosen for it; else each engine named serves all of them."""
        return any(e.serves for e in self.engines)

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(e.engine for e in self.engines))

    def signed(self) -> Manifest:
        """This manifest with its digest filled in."""
        return self.model_copy(update={"digest": self.computed_digest()})

    def computed_digest(self) -> str:
        absent = set() if self.ladder.axes else {"ladder"}  # as in artifacts from before there were ladders
        return _digest(self.model_dump(mode="json", exclude={"digest", *absent}))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
