"""An artifact for hosts without this package's runtime, or for a server.

onnx-dir            prepare.onnx, step.onnx, the weight file they read in place, and bundle.json: all that a host
                    needs to lay out a request and run the sampling loop. `examples/run_onnx_dir.py` is such a host.
triton-repository   a model of Triton Inference Server's Python back end: the artifact, `triton_model.py` as its
                    model.py, and config.pbtxt (schema: triton-inference-server/common, protobuf/model_config.proto,
                    message ModelConfig).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.manifest import EngineEntry, Manifest
from voicehub_aot.errors import EngineUnavailable, OptionUnsupported, UsageError
from voicehub_aot.spec.guidance import NO_OP
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import RegionSpec, TensorSpec

BUNDLE = "bundle.json"
BUNDLE_VERSION = 2
ONNX_ENGINE = "onnxruntime"
FORMULAS = {  # v: the velocity of each branch
    "classifier_free": "velocity = v[0] + sum over k of scales[k] * (v[0] - v[k + 1])",
    "zero_star": "velocity = v[0] + scales[0] * (v[0] - p * v[1]), p = <v[0], v[1]> / (|v[1]|^2 + 1e-8) for each row",
}
TRITON_TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64", "bool": "TYPE_BOOL"}
TRITON_VERSION = "1"


def write_bundle(artifact: Path, layout: str, output: Path, replace: bool) -> dict[str, Any]:
    """Write `artifact` as `output`, a folder of a layout in LAYOUTS, whole or not at all. Returns what was written.

    Every digest of the artifact is checked first. Raises OptionUnsupported, EngineUnavailable, UsageError or LoadError.
    """
    if layout not in LAYOUTS:
        raise OptionUnsupported(f"--format {layout!r} is not known; choose {' or '.join(LAYOUTS)}")
    manifest = store.read_manifest(artifact)
    _check_apart(artifact.resolve(), output.resolve())
    store.verify_files(artifact, manifest)
    with store.writing(output, replace) as folder:
        LAYOUTS[layout](artifact, manifest, folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        return {
            "output": str(output),
            "format": layout,
            "model": manifest.model,
            "bytes": sum(p.stat().st_size for p in files),
            "files": [p.relative_to(folder).as_posix() for p in files],
        }


def _check_apart(artifact: Path, output: Path) -> None:
    if artifact.is_relative_to(output) or output.is_relative_to(artifact):
        raise UsageError(f"{output}: holds the artifact {artifact}, or lies in it; give another --output")


# --- onnx-dir


def _write_onnx_dir(artifact: Path, manifest: Manifest, folder: Path) -> None:
    entries: dict[str, EngineEntry] = {e.stage: e for e in manifest.engines if e.engine == ONNX_ENGINE}
    if entries.keys() != {"prepare", "step"}:
        raise EngineUnavailable(
            f"{artifact}: holds {', '.join(manifest.engine_names)}, no {ONNX_ENGINE} graphs; "
            f"rebuild with --engine {ONNX_ENGINE}"
        )
    for source, name in [*((e.path, f"{stage}.onnx") for stage, e in entries.items()), (store.WEIGHTS, store.WEIGHTS)]:
        shutil.copyfile(artifact / source, folder / name)
    programs = store.read_programs(artifact, manifest)
    tensors = store.map_tensors(folder / store.WEIGHTS)
    for program in programs.values():
        store.time_table(program, manifest, tensors)
    described = describe(manifest, entries, programs, store.tensor_places(folder / store.WEIGHTS))
    described["files"] = {name: entry.model_dump() for name, entry in store.list_files(folder).items()}
    (folder / BUNDLE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def describe(
    manifest: Manifest,
    entries: Mapping[str, EngineEntry],
    programs: Mapping[str, Program],
    places: Mapping[str, tuple[int, int]],
) -> dict[str, Any]:
    """bundle.json without its `files`. places: (offset, bytes) of each tensor in the weight file.

    state, conditioning   what a request brings; `pad` fills what lies beyond a row's end
    dims                  each one's sizes, and the [B] int64 inputs with the rows' lengths and ends (`extent`, at least
                          the length and by default the same), null where the model has none
    flags, branches       boolean [B] inputs, and their values for the rows of each guidance branch. Rows [0, B) of a
                          stage's inputs are the first branch, [B, 2B) the second.
    guidance              how velocities of the branches combine, null with one branch; a scale for each but the first.
                          Branches with a scale below `off_below`, and those that an `evaluate` does not name in
                          `against` (null = all), do not count, and need not be run.
    stages                graphs. An input's `source`: the state, the request (conditioning, lengths, ends, flags), the
                          table, or what prepare computed. `by_evaluation`: the part of it that belongs to the
                          evaluation which `evaluate` names.
    programs              the loop, two instructions over named registers, "x" holding the noise and then the result,
                          `noises` fresh noise;
                          `tables`: values known before any request, stacked by evaluation, at an offset in a file
    decisions             what can move a number: each one's class, and its distance from what it was measured against
    promised              largest sizes that the parity report covers, by bucket axis
    """
    spec, table = manifest.region, manifest.stages["table"].outputs
    branches = spec.guidance.branches if spec.guidance else (None,)
    return {
        "format": "onnx-dir",
        "version": BUNDLE_VERSION,
        "created_by": manifest.created_by,
        "model": manifest.model,
        "config": manifest.config_name,
        "promised": manifest.buckets.model_dump(mode="json"),
        "decisions": [d.model_dump() for d in manifest.decisions],
        "dims": [d.model_dump() for d in spec.dims],
        "state": spec.state.model_dump(exclude={"binding", "flag"}),
        "conditioning": [i.model_dump(exclude={"binding", "flag"}) for i in spec.conditioning],
        "flags": list(spec.branch_flags(0)),
        "branches": [
            {"name": branch.name if branch else "conditional", "flags": dict(spec.branch_flags(number))}
            for number, branch in enumerate(branches)
        ],
        "guidance": spec.guidance
        and {
            "equation": spec.guidance.equation,
            "formula": FORMULAS[spec.guidance.equation],
            "scales": [branch.scale for branch in spec.guidance.others],
            "off_below": NO_OP,
        },
        "stages": {
            stage: {
                "file": f"{stage}.onnx",
                "inputs": [{**i.model_dump(), **_source(i, stage, spec, entries, table)} for i in entry.inputs],
                "outputs": [o.model_dump() for o in entry.outputs],
            }
            for stage, entry in entries.items()
        },
        "programs": {
            name: {**program.model_dump(mode="json"), "tables": [_place(v, program, places) for v in table]}
            for name, program in programs.items()
        },
    }


def _source(
    wanted: TensorSpec,
    stage: str,
    spec: RegionSpec,
    entries: Mapping[str, EngineEntry],
    table: Iterable[TensorSpec],
) -> dict[str, Any]:
    """Where a stage's input comes from, as the runtime (stages.py) finds it."""
    if wanted.name == spec.state.name:
        return {"source": "state", "by_evaluation": False}
    if wanted.name in {v.name for v in table}:
        return {"source": "table", "by_evaluation": stage == "step"}
    computed = {o.name: o for o in entries["prepare"].outputs}
    if stage == "step" and wanted.name in computed:
        return {"source": "prepare", "by_evaluation": computed[wanted.name].stacked}
    return {"source": "request", "by_evaluation": False}


def _place(value: TensorSpec, program: Program, places: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """A time table, [evaluations, ...], in the weight file."""
    key = store.table_key(program.name, value.name)
    return {
        "name": value.name,
        "file": store.WEIGHTS,
        "tensor": key,
        "offset": places[key][0],
        "dtype": value.dtype,
        "shape": [len(program.times), *value.shape],
    }


# --- triton-repository


def _write_triton_repository(artifact: Path, manifest: Manifest, folder: Path) -> None:
    name = re.sub(r"[^\w.-]", "_", artifact.resolve().name.removesuffix(".aot"))
    version = folder / name / TRITON_VERSION
    for file in (*manifest.files, store.MANIFEST):
        target = version / f"{name}.aot" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact / file, target)
    shutil.copyfile(Path(__file__).with_name("triton_model.py"), version / "model.py")
    (folder / name / "config.pbtxt").write_text(triton_config(name, manifest), encoding="utf-8")


def triton_config(name: str, manifest: Manifest) -> str:
    """config.pbtxt: the arguments of `Runtime.sample` as inputs, the result as the output `latent`."""
    spec = manifest.region
    main = spec.main and spec.main.length  # `sample` calls it lengths, whatever the model's own name for it
    lengths = [n for d in spec.dims for n in (d.length, d.extent) if n and n != main]
    state = _triton_shape(spec.state.shape)
    inputs = [
        *(
            _tensor("input", i.name, TRITON_TYPES[i.dtype], _triton_shape(i.shape), i.optional or i.branch is not None)
            for i in spec.conditioning
        ),
        _tensor("input", "noise", "TYPE_FP32", state, optional=True),
        _tensor("input", "seed", "TYPE_INT64", [-1], optional=True),
        *(_tensor("input", n, "TYPE_INT64", [-1], optional=True) for n in (*(["lengths"] if main else []), *lengths)),
        _tensor("input", "program", "TYPE_STRING", [1], optional=True),
    ]
    if spec.guidance:
        inputs.append(_tensor("input", "guidance", "TYPE_FP64", [1], optional=True))
        inputs.append(_tensor("input", "guidance_by_branch", "TYPE_STRING", [1], optional=True))
    lines = [
        f"# {manifest.model} {manifest.config_name}, written by {manifest.created_by}.",
        "# Give noise, or seed (one, or one a row) and lengths (of each row). program: a name or a step count.",
        f"name: {_text(name)}",
        'backend: "python"',
        "max_batch_size: 0  # the first dimension of every tensor is the batch",
        *inputs,
        _tensor("output", "latent", "TYPE_FP32", state),
        "instance_group { kind: KIND_CPU count: 1 }",
        f'parameters {{ key: "artifact" value {{ string_value: {_text(f"{name}.aot")} }} }}',
        '# parameters { key: "threads" value { string_value: "8" } }  # default what affinity and cgroup allow',
    ]
    return "\n".join(lines) + "\n"


def _triton_shape(shape: Iterable[int | str]) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in shape]


def _tensor(field: str, name: str, kind: str, dims: list[int], optional: bool = False) -> str:
    ending = " optional: true" if optional else ""
    return f"{field} {{ name: {_text(name)} data_type: {kind} dims: {dims}{ending} }}"


def _text(value: str) -> str:
    """A string of protobuf's text format, whose escapes are those of JSON."""
    return json.dumps(value, ensure_ascii=False)


LAYOUTS = {"onnx-dir": _write_onnx_dir, "triton-repository": _write_triton_repository}
