"""Finished engines, in <cache>/engines/<key>: the key is a digest of everything that shapes the code.

Inductor's own cache lies beside them, so that its headers are compiled once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from voicehub_aot import engines
from voicehub_aot.artifacts import store
from voicehub_aot.compiler.jobs import Job
from voicehub_aot.compiler.options import Options
from voicehub_aot.engines import StageCode
from voicehub_aot.errors import UsageError
from voicehub_aot.spec.target import Target

log = logging.getLogger(__name__)

RECORD = "engine.json"  # of a finished engine in the cache: its payload, and digests of its files


def cache_dir() -> Path:
    """$VOICEHUB_AOT_CACHE_DIR, else $XDG_CACHE_HOME/voicehub-aot, else ~/.cache/voicehub-aot."""
    own = os.environ.get("VOICEHUB_AOT_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own) if own else (Path(base) if base else Path.home() / ".cache") / "voicehub-aot"
    except RuntimeError as error:  # no HOME, and nobody of this number in the system's list
        raise UsageError(f"no folder to keep finished engines in ({error}); set VOICEHUB_AOT_CACHE_DIR") from error


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def engine_payload(code: StageCode, job: Job, options: Options) -> dict[str, Any]:
    """Everything that shapes the compiled code, as JSON: its digest is the engine's key in the cache."""
    engine = engines.get(job.engine)
    shapes = {n: (list(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in code.weights.items()}
    nodes = code.graph.graph.nodes
    graph = "\n".join(f"{n.name} {n.op} {n.target} {n.args} {n.kwargs} {n.meta.get('val')}" for n in nodes)
    return {
        "format": engine.FORMAT,
        "stage": job.stage,
        "bucket": dict(job.bucket),
        "graph": hashlib.sha256(graph.encode()).hexdigest(),
        "border": [v.model_dump(mode="json") for v in (*job.inputs, *job.outputs)],
        "examples": [[list(t.shape), str(t.dtype)] for t in job.examples],
        "constants": shapes,
        "weights": "" if engine.reads_weight_file(options.weights_mode) else weights_digest(code.weights),
        "settings": engine.settings(code, options.weights_mode, options.target),
        "torch": torch.__version__,
    }


def payload_key(payload: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()


def cached_engine(place: Path, payload: Mapping[str, Any]) -> bool:
    """True if a finished engine of exactly this payload lies there, unaltered. A damaged one is removed."""
    record = place / RECORD
    if not record.is_file():
        return False
    try:
        saved = json.loads(record.read_text(encoding="utf-8"))
        intact = all(store.sha256(place / name) == digest for name, digest in saved["files"].items())
        if intact and saved["payload"] == json.loads(json.dumps(payload)):
            return True
    except (OSError, ValueError, KeyError):
        pass
    log.warning("cached engine %s is damaged and will be compiled anew", place)
    shutil.rmtree(place, ignore_errors=True)
    return False


def compile_into_cache(
    code: StageCode,
    engine: str,
    payload: Mapping[str, Any],
    place: Path,
    weights_mode: engines.Weights,
    target: Target,
) -> None:
    """Compile beside the cache entry and rename it in: an interrupted build leaves no half engine."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="tmp-") as scratch:
        folder = Path(scratch) / "engine"
        engines.get(engine).compile_stage(code, weights_mode, target, folder)
        files = {p.relative_to(folder).as_posix(): store.sha256(p) for p in folder.rglob("*") if p.is_file()}
        (folder / RECORD).write_text(json.dumps({"payload": payload, "files": files}, indent=1), encoding="utf-8")
        try:
            folder.rename(place)
        except OSError:  # another build finished the same engine first
            if not cached_engine(place, payload):
                folder.rename(place)
