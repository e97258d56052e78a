"""manifest.json: everything the runtime knows about an artifact, as data.

The manifest's own `digest` covers all its other fields, so an edited manifest is not taken for the built one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from voicehub_aot.artifacts.relations import check_path, problems
from voicehub_aot.spec.bucket import Buckets, Ladder
from voicehub_aot.spec.region import Name, RegionSpec, Size, TensorSpec
from voicehub_aot.spec.safety import Decision
from voicehub_aot.spec.target import Target

SCHEMA_VERSION = 2
InsidePath = Annotated[str, AfterValidator(check_path)]  # of a file or folder of the artifact
RELIED_ON = {"inputs", "dims", "outputs"}  # of the region, by an engine's code
Count = Annotated[int, Field(strict=True, ge=0)]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Data):
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: Count


class EngineEntry(_Data):
    """One compiled stage. bucket: the sizes it was fixed to; empty = any size.

    most_requests: it was made for so many and no more; None = any number. serves: the buckets it was chosen for by
    measurement; empty = all that it fits. constants: weights it reads from the weight file, under these names (none
    when they are packed inside). made_for: digest of what its code relies on and cannot check (`made_for`); empty in
    artifacts of earlier versions.
    """

    engine: Name
    stage: Literal["prepare", "step"]
    bucket: dict[str, Size]
    most_requests: Size | None = None
    serves: tuple[dict[str, Size], ...] = ()
    path: InsidePath
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    constants: tuple[TensorSpec, ...]
    key: str
    seconds: FiniteFloat
    reason: str
    made_for: str = ""


class StageReport(_Data):
    """What `inspect` shows of a stage. flops: matrix operations of one call by bucket label."""

    nodes: Count
    parameters: Count
    weight_bytes: Count
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    flops: dict[str, Count]


class Checkpoint(_Data):
    """source: as given on the command line. digest: sha256 over the weights' names, shapes and bytes.

    notes: what was decided while it was read: which of several weights, sizes that are not the configuration's.
    """

    source: str
    digest: str
    notes: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_nothing(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """No notes leave no trace, as in manifests of before there were any: their digests stay right."""
        return {name: value for name, value in written(self).items() if name != "notes" or value}


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
    programs: tuple[Name, ...]
    decisions: tuple[Decision, ...] = ()
    files: dict[InsidePath, FileEntry]
    digest: str = ""

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        for problem in problems(self):
            raise ValueError(problem)
        return self

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
        return digest_of(self.model_dump(mode="json", exclude={"digest"}))


def made_for(entry: EngineEntry, region: RegionSpec, weights: Mapping[str, torch.Tensor]) -> str:
    """sha256 over what an engine's code relies on and cannot check while it runs.

    That is the region's inputs and dimensions with their ranges, the entry's own border and sizes, and those of its
    `weights`, by name, that are integers: places where it will read.
    """
    integers = {n: t for n, t in weights.items() if not t.is_floating_point()}
    border = entry.model_dump(mode="json", exclude={"serves", "key", "seconds", "reason", "made_for"})
    return digest_of(
        [
            region.model_dump(mode="json", include=RELIED_ON, exclude_defaults=True),
            border,
            {n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in integers.items()},
        ]
    )


def digest_of(value: Any) -> str:
    """sha256 of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
