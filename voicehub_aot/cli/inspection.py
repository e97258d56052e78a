"""What is in an artifact, and what is on this machine, for people and for --json."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from voicehub_aot import engines
from voicehub_aot.artifacts.manifest import Manifest
from voicehub_aot.artifacts.report import number
from voicehub_aot.cli import console
from voicehub_aot.compiler.cache import cache_dir
from voicehub_aot.engines import toolchain
from voicehub_aot.errors import AotError, UsageError
from voicehub_aot.spec.bucket import Ladder, label, waste
from voicehub_aot.spec.target import default_target, host_features, parse_target, usable_threads

PACKAGES = ("voicehub-aot", "torch", "numpy", "onnx", "onnxruntime", "openvino", "triton", "tensorrt")


def summary(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Everything `inspect` shows, as plain values. Sizes in bytes."""
    spec = manifest.region
    return {
        "artifact": str(path),
        "model": manifest.model,
        "config": manifest.config_name,
        "checkpoint": manifest.checkpoint.model_dump(),
        "target": manifest.target.name,
        "versions": manifest.versions,
        "weights_mode": manifest.weights_mode,
        "shapes": manifest.shapes,
        "buckets": {axis: list(sizes) for axis, sizes in manifest.buckets.axes.items()},
        "ladder": _ladder(manifest.ladder),
        "programs": list(manifest.programs),
        "decisions": [d.model_dump() for d in manifest.decisions],
        "guidance": spec.guidance.model_dump() if spec.guidance else None,
        "inputs": [
            {
                "name": i.name,
                "shape": list(i.shape),
                "dtype": i.dtype,
                "known": "as noise or state" if i.binding == "STATE" else "per request",
                "doc": i.doc,
            }
            for i in spec.inputs
            if i.binding != "TIME" and not i.flag
        ],
        "stages": {name: stage.model_dump() for name, stage in manifest.stages.items()},
        "hoisted": {
            "to the time table": [v.name for v in manifest.stages["table"].outputs],
            "to prepare": [v.name for v in manifest.stages["prepare"].outputs],
            "folded into constants": list(manifest.folded),
        },
        "engines": [e.model_dump(exclude={"inputs", "outputs", "constants"}) for e in manifest.engines],
        "bytes": sum(f.size for f in manifest.files.values()),
        "files": {name: f.size for name, f in manifest.files.items()},
    }


def _ladder(ladder: Ladder) -> dict[str, dict[str, Any]]:
    """Rungs by axis, the most positions they add, and the padding expected when every length up to the last is as
    likely; both None where no bucket was promised."""
    found = {}
    for axis, rungs in ladder.axes.items():
        most = max((high - low - 1 for low, high in itertools.pairwise((0, *rungs))), default=None)
        expected = waste(dict.fromkeys(range(1, rungs[-1] + 1), 1), rungs) if rungs else None
        found[axis] = {"rungs": list(rungs), "most": most, "expected_waste": expected}
    return found


def _rungs(axis: str, value: Mapping[str, Any]) -> str:
    beyond = "then steps of at most a quarter"
    if not value["rungs"]:
        return f"{axis}: steps of 8, {beyond}"
    rungs = ",".join(map(str, value["rungs"]))
    return f"{axis}={rungs}, {beyond}; adds at most {value['most']}, {value['expected_waste']:.1%} expected"


def _guidance(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "none"
    defaults = ", ".join(f"{branch['name']} {branch['scale']:g}" for branch in value["branches"][1:])
    return f"{value['equation']}, default scales: {defaults}"


def show(value: Mapping[str, Any]) -> None:
    """Tables on stdout."""
    table = console.show_table
    facts = {
        "checkpoint": value["checkpoint"]["source"],
        "target": value["target"],
        "weights": f"{value['weights_mode']}, {value['shapes']} shapes",
        "buckets": " ".join(f"{a}={','.join(map(str, s))}" for a, s in value["buckets"].items()) or "none promised",
        "runs at": "\n".join(_rungs(axis, item) for axis, item in value["ladder"].items()) or "the sizes asked for"
        if value["shapes"] == "dynamic"
        else "the buckets",
        "programs": ", ".join(value["programs"]),
        "guidance": _guidance(value["guidance"]),
        "size": megabytes(value["bytes"]),
    }
    table(f"{value['artifact']}: {value['model']} {value['config']}", ("what", "value"), list(facts.items()))
    table(
        "what can move a number",
        ("decision", "class", "why", "measured against", "distance"),
        [
            (f"{d['kind']} {d['name']}", d["safety"], d["reason"], d["against"], number(d["distance"]))
            for d in value["decisions"]
        ],
    )
    table(
        "inputs",
        ("name", "shape", "dtype", "meaning"),
        [(i["name"], ", ".join(map(str, i["shape"])), i["dtype"], i["doc"]) for i in value["inputs"]],
    )
    buckets = list(next(iter(value["stages"].values()))["flops"])
    table(
        "stages (per call, one guided request)",
        ("stage", "nodes", "parameters", "weights read", *(f"GFLOP {b}" for b in buckets), "values out"),
        [
            (
                name,
                s["nodes"],
                f"{s['parameters'] / 1e6:.2f} M",
                megabytes(s["weight_bytes"]),
                *(f"{s['flops'][b] / 1e9:.2f}" for b in buckets),
                len(s["outputs"]),
            )
            for name, s in value["stages"].items()
        ],
    )
    hoisted = value["hoisted"]
    table("what left the step", ("where", "values"), [(k, _listed(v)) for k, v in hoisted.items()])
    table(
        "engines",
        ("engine", "stage", "bucket", "compiled in", "why"),
        [
            (e["engine"], e["stage"], label(e["bucket"]),
             f"{e['seconds']:.1f} s" if e["seconds"] else "cached", e["reason"])
            for e in value["engines"]
        ],
    )  # fmt: skip


def _listed(names: list[str], most: int = 8) -> str:
    tail = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)}: {', '.join(names[:most])}{tail}" if names else "nothing"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _able(name: str) -> str:
    """Whether an engine could be built here: "ok", or what is wrong and what to do."""
    engine = engines.get(name)
    try:
        engine.check()
        engine.check_build(cache_dir(), parse_target(default_target()))
    except AotError as error:
        return str(error)
    return "ok"


def _cache() -> str:
    try:
        return str(cache_dir())
    except UsageError as error:
        return str(error)


def doctor() -> dict[str, str]:
    """Facts that decide what can be built and run here."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        **versions,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "compiler": toolchain.compiler_version(),
        **{f"build with {name}": _able(name) for name in engines.ENGINES},
        "default target": default_target(),
        "vector extensions": " ".join(sorted(f for f in host_features() if f.startswith(("avx", "amx", "fma")))) or "-",
        "threads": str(usable_threads()),
        "torch matrix kernels": torch.backends.cpu.get_cpu_capability(),
        "cache": _cache(),
    }
