"""One request from the command line, and the timing of an artifact's steps."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from voicehub_aot.artifacts import store
from voicehub_aot.compiler.models import resolve
from voicehub_aot.errors import GateFailed, InputMismatch, UsageError
from voicehub_aot.proof import timing
from voicehub_aot.proof.cases import ParityCase, check_recording, draw, load_recording
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.load import load
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import label

RANDOM_TEXT = 64  # tokens of a random request
ENGINE, EAGER = "engine", "eager"


def sample_to_file(
    artifact: Path,
    output: Path,
    lengths: Sequence[int],
    seed: int,
    inputs: Path | None,
    random: bool,
    program: str | int | None,
    guidance: float | dict[str, float] | None,
    threads: int | None,
) -> dict[str, Any]:
    """Sample and write {"latent": …} to `output`, whole or not at all. Returns what was done, for display."""
    if random == (inputs is not None):
        raise UsageError("give either --inputs FILE with the conditioning, or --random for a first try")
    start = time.perf_counter()
    runtime = load(artifact, threads=threads)
    opened = time.perf_counter()
    request = _random_conditioning(runtime, lengths, seed) if random else _read(inputs)
    noise = request.pop("noise", None)
    reserved = sorted({"seed", "lengths", "program", "guidance"} & set(request))
    if reserved:
        raise UsageError(f"--inputs {str(inputs)!r}: holds {reserved}; give these as options")
    sized = runtime.spec.main is not None and runtime.spec.main.name in runtime.spec.state.shape
    if noise is None and sized and not lengths:
        raise UsageError("give --length for each row, or a tensor `noise` in --inputs")
    result = runtime.sample(
        noise=noise,
        seed=None if noise is not None else seed,
        lengths=lengths or None,
        program=program,
        guidance=guidance,
        **request,
    )
    done = time.perf_counter()
    if not torch.isfinite(result).all():
        raise InputMismatch(f"{artifact}: the result is not finite with guidance={guidance!r}; give a smaller one")
    partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        store.save_tensors({"latent": result.contiguous()}, partial)
        partial.replace(output)
    except OSError as error:
        raise UsageError(f"--output {str(output)!r}: cannot be written ({error.strerror}); give another") from error
    finally:
        partial.unlink(missing_ok=True)
    return {
        "output": str(output),
        "shape": list(result.shape),
        "mean": round(result.mean().item(), 6),
        "std": round(result.std().item(), 6),
        "load_s": round(opened - start, 3),
        "sample_s": round(done - opened, 3),
    }


def parse_guidance(texts: Sequence[str] | None) -> float | dict[str, float] | None:
    """--guidance: one SCALE, or BRANCH=SCALE repeated."""
    if not texts:
        return None
    named = [text.partition("=") for text in texts]
    try:
        if len(texts) == 1 and not named[0][1]:
            return float(texts[0])
        return {name: float(value) for name, _, value in named}
    except ValueError as error:
        raise UsageError(f"--guidance {' '.join(texts)!r}: wanted a number, or BRANCH=NUMBER repeated") from error


def _read(file: Path | None) -> dict[str, torch.Tensor]:
    try:
        return dict(load_file(file or Path()))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--inputs {str(file)!r}: unreadable ({error}); wanted a safetensors file") from error


def _random_conditioning(runtime: Runtime, lengths: Sequence[int], seed: int) -> dict[str, Any]:
    spec, dim = runtime.spec, runtime.spec.main
    sizes = {d.name: min(d.max, RANDOM_TEXT) for d in spec.dims} | {"B": max(1, len(lengths))}
    if dim is not None:
        if not lengths:
            raise UsageError("--random needs --length for each row")
        outside = [n for n in lengths if not dim.min <= n <= dim.max]
        if outside:
            raise UsageError(f"--length {outside[0]}: wanted {dim.min} to {dim.max} {dim.name}")
        sizes[dim.name] = max(lengths)
    case = ParityCase(
        name="random", check="evaluation", bucket={}, sizes=sizes, lengths=tuple(lengths), program="", evaluation=None,
        guided=False, seed=seed, budget=0.0,
    )  # fmt: skip
    drawn = draw(spec, case, seed % 2**63)  # the runtime checks the seed
    return {i.name: drawn[i.name] for i in spec.conditioning}


def bench(
    artifact: Path, checkpoint: str | None, threads: int | None, least: float | None, weights_kind: str | None = None
) -> list[dict[str, Any]]:
    """One row per bucket. With the checkpoint the model's own module is timed beside the engine, interleaved.

    least: the speed-up that will be asked for, which needs the checkpoint.
    """
    if least is not None and not (math.isfinite(least) and least > 0):
        raise UsageError(f"--min-speedup {least!r}: wanted a positive number, e.g. 1.1")
    if least is not None and checkpoint is None:
        raise UsageError("--min-speedup compares with eager: give the --checkpoint the artifact was built from")
    runtime = load(artifact, threads=threads)
    recording = load_recording(artifact / store.PARITY)
    check_recording(recording, runtime.spec, runtime.programs)
    candidates = {ENGINE: runtime}
    if checkpoint is not None:
        manifest = store.read_manifest(artifact)
        model = resolve(manifest.model, manifest.config_name, checkpoint, manifest.config, weights_kind)
        candidates[EAGER] = eager_runtime(model.region, runtime.programs.values(), manifest.model)
    return [
        {
            "bucket": label(t.bucket),
            "rows": t.rows,
            "engine_ms": round(t.median_ms(ENGINE), 2),
            "eager_ms": round(t.median_ms(EAGER), 2) if checkpoint else None,
            "speedup": round(t.median_ms(EAGER) / t.median_ms(ENGINE), 3) if checkpoint else None,
        }
        for t in timing.time_steps(candidates, recording)
    ]


def check_speedup(rows: Sequence[dict[str, Any]], least: float | None) -> None:
    """Raises GateFailed for a bucket under the gate."""
    slow = [r for r in rows if least is not None and not r["speedup"] >= least]
    if slow:
        raise GateFailed(f"{slow[0]['bucket']}: {slow[0]['speedup']}x of eager, wanted at least {least}x")
