"""Opens a built artifact: `load(path)` -> `Runtime`.

Nothing here imports an adapter, an exporter or a compiler, and nothing of the artifact is run before every file's
digest was checked.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from voicehub_aot import engines
from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.manifest import EngineEntry, FileEntry, Manifest
from voicehub_aot.artifacts.watch import Watch
from voicehub_aot.engines import Source, StageEngine
from voicehub_aot.errors import (
    ArtifactCorrupt,
    EngineUnavailable,
    LoadError,
    OptionUnsupported,
    TargetMismatch,
    VersionUnsupported,
)
from voicehub_aot.runtime import forks
from voicehub_aot.runtime.evaluator import EngineEvaluator
from voicehub_aot.runtime.heap import HeapTrim
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Overflow
from voicehub_aot.spec.target import check_target, torch_minor, usable_threads


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

    threads: compute threads, process-wide; default OMP_NUM_THREADS, else what affinity and cgroups allow.
    engine: open this one; default the one chosen for each bucket by measurement, else the first that was built.
    overflow: "run" lets a dynamic engine take lengths over the largest promised bucket, and counts them in
    `Runtime.overflowed`. concurrency: requests that run at once. Needs no compiler and writes no file. Raises
    ArtifactCorrupt, VersionUnsupported, TargetMismatch, EngineUnavailable or OptionUnsupported, a LoadError if this
    process may open no further file, and ProcessForked in a fork of a process whose compute threads it cannot have.
    """
    options = {"threads": threads, "engine": engine, "overflow": overflow, "concurrency": concurrency}
    try:
        manifest = store.read_manifest(Path(path))
        reopen = partial(_load_again, str(Path(path).absolute()), manifest.digest, device, options)
        with torch.inference_mode(False):  # a runtime outlives the mode it was loaded in
            return open_artifact(
                Path(path),
                manifest,
                device=device,
                threads=threads,
                engine=engine,
                overflow=overflow,
                concurrency=concurrency,
                reopen=reopen,
            )
    except (OSError, RuntimeError, LoadError) as error:
        if _ran_out_of_descriptors(error):
            raise LoadError(
                f"{path}: this process has too many files open ({error}); close some, or raise its limit (ulimit -n). "
                "Every artifact that was opened takes one descriptor for as long as the process lives"
            ) from error
        raise


def _load_again(path: str, digest: str, device: str, options: Mapping[str, Any]) -> Runtime:
    """What unpickling a runtime does. Raises ArtifactCorrupt if another artifact has taken the path."""
    runtime = load(path, device=device, **options)
    if runtime.manifest is None or runtime.manifest.digest != digest:
        raise ArtifactCorrupt(f"{path}: is another artifact than the runtime was pickled with; load it anew")
    return runtime


def _ran_out_of_descriptors(error: BaseException) -> bool:
    chain: BaseException | None = error
    while chain is not None:
        full = isinstance(chain, OSError) and chain.errno in (errno.EMFILE, errno.ENFILE)
        if full or os.strerror(errno.EMFILE) in str(chain):  # torch and safetensors pass on the words only
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def open_artifact(
    root: Path,
    manifest: Manifest,
    *,
    device: str = "cpu",
    threads: int | None = None,
    engine: str | None = None,
    overflow: Overflow = "error",
    concurrency: int = 1,
    reopen: Callable[[], Runtime] | None = None,
) -> Runtime:
    """`load` for a manifest at hand: one just read, or one that a build has yet to write.

    reopen: what unpickling the runtime calls; without it the runtime cannot be pickled.
    """
    where = str(root)
    if device != "cpu":
        raise OptionUnsupported(f"{where}: device {device!r}; this artifact was built for {manifest.target.name}")
    if manifest.target.device != device:
        raise TargetMismatch(f"{where}: built for {manifest.target.name}, wanted {device}; rebuild it here")
    _check_engines(manifest, where)
    entries = _chosen(manifest, engine, where)
    native = any(engines.get(e.engine).NATIVE for e in entries)
    if native:
        check_target(manifest.target, where)
    if native and manifest.versions["torch"].rsplit(".", 1)[0] != torch_minor():
        raise VersionUnsupported(
            f"{where}: built with torch {manifest.versions['torch']}, this is {torch.__version__}; "
            "compiled code needs the same minor version: rebuild, or install that torch"
        )
    watch = Watch(root, _mapped(manifest, entries))
    store.verify_files(root, manifest)
    if (threads is not None and threads < 1) or concurrency < 1:
        raise OptionUnsupported(f"{where}: threads={threads!r}, concurrency={concurrency!r}; wanted 1 or more of each")
    threads = threads or usable_threads()
    forks.check_threads(threads, where)
    torch.set_num_threads(threads)
    programs = store.read_programs(root, manifest)
    tensors = store.map_tensors(root / store.WEIGHTS)
    prepare, *steps = [(entry, _open(root, entry, manifest, tensors, concurrency, threads)) for entry in entries]
    tables = {name: store.time_table(program, manifest, tensors) for name, program in programs.items()}
    keeps = any(engines.kernel_bytes(e.engine, manifest.weights_mode) for e in entries)
    evaluator = EngineEvaluator(manifest.region, manifest.buckets, prepare, steps, tables, watch)
    return Runtime(
        manifest.region,
        evaluator,
        programs,
        manifest.buckets,
        shapes=manifest.shapes,
        ladder=manifest.ladder if keeps else None,
        heap=HeapTrim() if keeps else None,
        overflow=overflow,
        concurrency=concurrency,
        name=manifest.model,
        manifest=manifest,
        threads=threads,
        reopen=reopen,
    )


def _mapped(manifest: Manifest, entries: Sequence[EngineEntry]) -> dict[str, FileEntry]:
    """The files that opened engines go on reading."""
    paths = [entry.path for entry in entries]
    return {
        name: file
        for name, file in manifest.files.items()
        if name == store.WEIGHTS or any(name == p or name.startswith(f"{p}/") for p in paths)
    }


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
    root: Path, entry: EngineEntry, manifest: Manifest, tensors: Mapping[str, torch.Tensor], runners: int, threads: int
) -> StageEngine:
    where = f"{root.name}: {entry.path}"
    digests = {name: file.sha256 for name, file in manifest.files.items()}
    constants = store.constants(entry, manifest, tensors)
    outside = engines.get(entry.engine).reads_weight_file(manifest.weights_mode)
    source = Source(root, entry.path, digests, entry.inputs, entry.outputs, constants, where, outside, threads)
    return engines.get(entry.engine).open_stage(source, runners)


def _check_engines(manifest: Manifest, where: str) -> None:
    """Raises VersionUnsupported for an engine that is not known here, ArtifactCorrupt for weights in two places."""
    for entry in manifest.engines:
        if entry.engine not in engines.ENGINES:
            raise VersionUnsupported(
                f"{where}: engine {entry.engine!r} is not known, known are {', '.join(engines.ENGINES)}; "
                "install the package it was built with, or rebuild it"
            )
        if entry.constants and not engines.get(entry.engine).reads_weight_file(manifest.weights_mode):
            raise ArtifactCorrupt(f"{where}: {entry.path} holds packed weights, and names others; rebuild the artifact")
