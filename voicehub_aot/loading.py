"""Opens a built artifact: `load(path)` -> `Runtime`.

Nothing here imports an adapter, an exporter or a compiler, and nothing of the artifact is run before every file's
digest was checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from voicehub_aot import engines
from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.manifest import EngineEntry, Manifest
from voicehub_aot.bucket import Ladder
from voicehub_aot.engines import Source, StageEngine
from voicehub_aot.errors import ArtifactCorrupt, EngineUnavailable, OptionUnsupported, VersionUnsupported
from voicehub_aot.program import Program
from voicehub_aot.region import DTYPES
from voicehub_aot.runtime import Overflow, Runtime
from voicehub_aot.staged import StagedEvaluator
from voicehub_aot.target import check_target, torch_minor, usable_threads


def load(
    path: str | Path,
    *,
    device: str = "cpu",
    threads: int | None = None,
    engine: str | None = None,
    overflow: Overflow = "error",
    concurrency: int = 1,
) -> Runtime:
    """Open an artifact built by `voicehub-aot build`.

    threads: compute threads, process-wide; default what affinity and cgroup allow. engine: open this one; default the
    one chosen for each bucket by measurement, else the first that was built.
    overflow: "run" lets a dynamic engine take lengths over the largest promised bucket, and counts them in
    `Runtime.overflowed`. concurrency: requests that run at once. Needs no compiler and writes no file. Raises
    ArtifactCorrupt, VersionUnsupported, TargetMismatch, EngineUnavailable or OptionUnsupported.
    """
    root = Path(path)
    manifest = store.read_manifest(root)
    where = str(path)
    if device != "cpu":
        raise OptionUnsupported(f"{where}: device {device!r}; this artifact was built for {manifest.target.name}")
    entries = _chosen(manifest, engine, where)
    native = any(engines.get(e.engine).NATIVE for e in entries)
    if native:
        check_target(manifest.target, where)
    if native and manifest.versions["torch"].rsplit(".", 1)[0] != torch_minor():
        raise VersionUnsupported(
            f"{where}: built with torch {manifest.versions['torch']}, this is {torch.__version__}; "
            "compiled code needs the same minor version: rebuild, or install that torch"
        )
    store.verify_files(root, manifest)
    if (threads is not None and threads < 1) or concurrency < 1:
        raise OptionUnsupported(f"{where}: threads={threads!r}, concurrency={concurrency!r}; wanted 1 or more of each")
    torch.set_num_threads(threads or usable_threads())
    programs = store.read_programs(root, manifest)
    tensors = store.map_tensors(root / store.WEIGHTS)
    prepare, *steps = [(entry, _open(root, entry, manifest, tensors, concurrency)) for entry in entries]
    tables = {name: _table(program, manifest, tensors, where) for name, program in programs.items()}
    keeps = any(engines.kernel_bytes(e.engine, manifest.weights_mode) for e in entries)
    evaluator = StagedEvaluator(manifest.region, manifest.buckets, prepare, steps, tables)
    return Runtime(
        manifest.region,
        evaluator,
        programs,
        manifest.buckets,
        shapes=manifest.shapes,
        ladder=manifest.ladder if keeps else Ladder(),
        overflow=overflow,
        concurrency=concurrency,
        name=manifest.model,
        manifest=manifest,
    )


def _chosen(manifest: Manifest, engine: str | None, where: str) -> list[EngineEntry]:
    """The entries to open: one `prepare`, then the steps.

    engine: None = the one chosen for each bucket, else the first that was built. An engine that was chosen for some
    buckets serves all it fits when it is asked for by name.
    """
    built = manifest.engine_names
    if engine is not None and engine not in built:
        raise EngineUnavailable(f"{where}: engine {engine!r} was not built; built are {', '.join(built)}")
    wanted = engine or (None if manifest.mixed else built[0])
    mine = [e for e in manifest.engines if wanted in (None, e.engine)]
    prepare = [e for e in (*mine, *manifest.engines) if e.stage == "prepare"]
    steps = [e for e in mine if e.stage == "step"]
    if not prepare or not steps:
        raise ArtifactCorrupt(f"{where}: holds no engine for a stage; rebuild the artifact")
    return [prepare[0], *(e.model_copy(update={"serves": ()}) if engine else e for e in steps)]


def _open(
    root: Path, entry: EngineEntry, manifest: Manifest, tensors: Mapping[str, torch.Tensor], runners: int
) -> StageEngine:
    where = f"{root.name}: {entry.path}"
    for spec in entry.constants:
        have = tensors.get(spec.name)
        if have is None or list(have.shape) != list(spec.shape) or have.dtype != DTYPES[spec.dtype]:
            raise ArtifactCorrupt(f"{where}: weight {spec.name!r} is missing or not {spec.dtype} {list(spec.shape)}")
    digests = {name: file.sha256 for name, file in manifest.files.items()}
    constants = {spec.name: tensors[spec.name] for spec in entry.constants}
    source = Source(root, entry.path, digests, entry.inputs, entry.outputs, constants, where)
    return engines.get(entry.engine).open_stage(source, runners)


def _table(
    program: Program, manifest: Manifest, tensors: Mapping[str, torch.Tensor], where: str
) -> dict[str, torch.Tensor]:
    table = {}
    for spec in manifest.stages["table"].outputs:
        key, shape = store.table_key(program.name, spec.name), [len(program.times), *spec.shape]
        have = tensors.get(key)
        if have is None or list(have.shape) != shape or have.dtype != DTYPES[spec.dtype]:
            raise ArtifactCorrupt(f"{where}: time table {key!r} is missing or not {spec.dtype} {shape}")
        table[spec.name] = have
    return table
