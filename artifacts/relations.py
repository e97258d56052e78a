"""What must hold between the parts of a manifest, because the runtime relies on it and native code cannot check it.

The region says what a request brings, the stages say what crosses between them, and every engine repeats its stage's
border. A tensor that one of them describes differently would be read past its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from voicehub_aot.errors import UsageError
from voicehub_aot.spec.bucket import BATCH_AXIS, check_buckets
from voicehub_aot.spec.region import BATCH, EVALUATIONS, RegionSpec, TensorSpec

if TYPE_CHECKING:
    from voicehub_aot.artifacts.manifest import EngineEntry, Manifest, StageReport

WEIGHTS = "weights.safetensors"
PROGRAMS = "programs"
TABLE, PREPARE, MIXED, STEP = "table", "prepare", "mixed", "step"
LONGEST_PATH = 1024
MOST_BUCKETS = 100_000  # combinations of promised sizes; a build checks parity in each
Border = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]  # inputs, outputs


def check_path(path: str) -> str:
    """A path inside the artifact, "/" between its parts. Raises ValueError for anything else."""
    parts = path.split("/")
    plain = path.isprintable() and "\\" not in path and len(path) <= LONGEST_PATH
    if not plain or not {"", ".", ".."}.isdisjoint(parts) or PurePosixPath(path).parts != tuple(parts):
        raise ValueError(f"the path {path[:80]!r} must be relative, lie inside the artifact, and hold no '.' or '..'")
    return path


def problems(manifest: Manifest) -> Iterator[str]:
    """Every relation that does not hold; the first one is enough to refuse the manifest."""
    if "torch" not in manifest.versions:
        yield "versions: lacks torch, whose version compiled code depends on"
    if not manifest.programs or len(set(manifest.programs)) < len(manifest.programs):
        yield f"programs: {list(manifest.programs)!r}, wanted one or more distinct names"
    try:
        check_buckets(manifest.buckets, manifest.region)
    except UsageError as error:
        yield f"buckets: {error}"
    if (combinations := prod(map(len, manifest.buckets.axes.values()))) > MOST_BUCKETS:
        yield f"buckets: {combinations} combinations, wanted at most {MOST_BUCKETS}"
    for axis, rungs in manifest.ladder.axes.items():
        if not any(axis == dim.name for dim in manifest.region.dims):
            yield f"ladder: {axis!r} is not a dimension of the region"
        if rungs and not set(manifest.buckets.axes.get(axis, ())) <= set(rungs):
            yield f"ladder: {axis} lacks a promised bucket"
    missing = [stage for stage in (TABLE, PREPARE, STEP) if stage not in manifest.stages]
    missing += [stage for stage in manifest.stages if stage not in (TABLE, PREPARE, MIXED, STEP)]
    if missing:
        yield f"stages: {list(manifest.stages)!r}, wanted {TABLE}, {PREPARE}, {STEP} and perhaps {MIXED}"
        return
    if len({tuple(stage.flops) for stage in manifest.stages.values()}) > 1:
        yield "stages: their flops are not of the same buckets"
    for name in (WEIGHTS, *(f"{PROGRAMS}/{program}.json" for program in manifest.programs)):
        if name not in manifest.files:
            yield f"files: lacks {name!r}, and only what is listed there is checked"
    yield from _border_problems(manifest.region, manifest.stages)
    yield from _engine_problems(manifest)


# --- what crosses the borders of the stages


def _border_problems(spec: RegionSpec, stages: Mapping[str, StageReport]) -> Iterator[str]:
    times = {i.name: TensorSpec(name=i.name, shape=i.shape, dtype=i.dtype) for i in spec.inputs if i.binding == "TIME"}
    raw = {i.name: TensorSpec(name=i.name, shape=i.shape, dtype=i.dtype) for i in spec.request}
    state = TensorSpec(name=spec.state.name, shape=spec.state.shape, dtype=spec.state.dtype)
    known = {name: _by_name(stage.outputs) for name, stage in stages.items()}
    table, prepare, mixed = known[TABLE], known[PREPARE], known.get(MIXED, {})
    brought = {
        TABLE: times,
        PREPARE: raw,
        MIXED: {**raw, **table, **prepare},
        STEP: {state.name: state, **raw, **table, **prepare, **mixed},
    }
    computed = [*raw, state.name, *(o.name for stage in stages.values() for o in stage.outputs)]
    computed += [name for name in times if name not in table]
    if len(set(computed)) < len(computed):
        yield "stages: two values have the same name"
    for name, stage in stages.items():
        if len(_by_name(stage.inputs)) < len(stage.inputs):
            yield f"stages.{name}: an input is given twice"
        for value in stage.inputs:
            source = brought[name].get(value.name)
            if source != value:
                yield f"stages.{name}: input {_text(value)} is brought by nothing; known is {_text(source)}"
    velocity = (state.model_copy(update={"name": spec.outputs[0]}),)
    if stages[STEP].outputs != velocity or state not in stages[STEP].inputs:
        yield f"stages.{STEP}: wanted the state {_text(state)} as an input and {_text(velocity[0])} as the output"
    if absent := [name for name in spec.outputs[1:] if name not in prepare]:
        yield f"stages.{PREPARE}: the region's outputs {absent!r} are not computed"
    if unsized := _unknown_sizes(spec, stages):
        yield f"stages: sizes {unsized!r} are not those of the region"


def _by_name(values: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    return {value.name: value for value in values}


def _text(value: TensorSpec | None) -> str:
    return "nothing of this name" if value is None else f"{value.name!r} {value.dtype} {list(value.shape)}"


def _unknown_sizes(spec: RegionSpec, stages: Mapping[str, StageReport]) -> list[str]:
    """Plain names among the sizes that are not a dimension's. Expressions are only displayed."""
    known = {BATCH, EVALUATIONS, *(dim.name for dim in spec.dims)}
    sizes = [size for stage in stages.values() for v in (*stage.inputs, *stage.outputs) for size in v.shape]
    return sorted({size for size in sizes if isinstance(size, str) and size.isidentifier() and size not in known})


def borders(stages: Mapping[str, StageReport]) -> dict[str, Border]:
    """Inputs and outputs of the two stages that engines run. `mixed` is part of prepare, stacked by evaluation."""
    prepare, mixed = stages[PREPARE], stages.get(MIXED)
    inputs, outputs = list(prepare.inputs), list(prepare.outputs)
    if mixed is not None:
        own = {value.name for value in (*inputs, *outputs)}
        further = [value for value in mixed.inputs if value.name not in own]
        inputs += [v for v in further if BATCH in v.shape]
        inputs += [_stacked(v) for v in further if BATCH not in v.shape]
        outputs += [_stacked(v) for v in mixed.outputs]
    return {PREPARE: (tuple(inputs), tuple(outputs)), STEP: (stages[STEP].inputs, stages[STEP].outputs)}


def _stacked(value: TensorSpec) -> TensorSpec:
    return value.model_copy(update={"shape": (EVALUATIONS, *value.shape)})


# --- engines


def _engine_problems(manifest: Manifest) -> Iterator[str]:
    wanted = borders(manifest.stages)
    promised = manifest.buckets.combinations(a for a in manifest.buckets.axes if a != BATCH_AXIS)
    for number, entry in enumerate(manifest.engines):
        at = f"engines.{number} ({entry.engine} {entry.stage})"
        if (entry.inputs, entry.outputs) != wanted[entry.stage]:
            yield f"{at}: its inputs and outputs are not those of the stage"
        if len(_by_name(entry.constants)) < len(entry.constants) or any(_varies(c) for c in entry.constants):
            yield f"{at}: constants must have distinct names and fixed sizes"
        if entry.bucket and (entry.stage == PREPARE or manifest.shapes == "dynamic"):
            yield f"{at}: is fixed to {entry.bucket!r}, wanted any size"
        if not all(size in manifest.buckets.axes.get(axis, ()) for axis, size in entry.bucket.items()):
            yield f"{at}: is fixed to {entry.bucket!r}, which is not a promised bucket"
        if not all(bucket in promised for bucket in entry.serves):
            yield f"{at}: serves {list(entry.serves)!r}, wanted promised buckets"
        if not any(name == entry.path or name.startswith(f"{entry.path}/") for name in manifest.files):
            yield f"{at}: files holds nothing at {entry.path!r}"
    yield from _coverage_problems(manifest, promised)


def _coverage_problems(manifest: Manifest, promised: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """Every stage has its engine, at a place of its own, and every promised bucket a step."""
    if len({(e.path, e.engine) for e in manifest.engines}) < len(manifest.engines):
        yield "engines: two of them lie at the same path"
    if len({(e.path, e.stage) for e in manifest.engines}) > len({e.path for e in manifest.engines}):
        yield "engines: two stages lie at the same path"
    if not any(entry.stage == PREPARE for entry in manifest.engines):
        yield "engines: holds no engine for the stage prepare"
    steps = [entry for entry in manifest.engines if entry.stage == STEP]
    if not steps:
        yield "engines: holds no engine for the stage step"
    for group in [steps] if manifest.mixed else [[e for e in steps if e.engine == n] for n in manifest.engine_names]:
        if unserved := [b for b in promised if not any(_serves(entry, b) for entry in group)]:
            yield f"engines: no step engine serves the promised bucket {unserved[0]!r}"


def _varies(value: TensorSpec) -> bool:
    return not all(isinstance(size, int) for size in value.shape)


def _serves(entry: EngineEntry, bucket: Mapping[str, int]) -> bool:
    fits = all(bucket.get(axis) == size for axis, size in entry.bucket.items())
    return fits and (not entry.serves or bucket in entry.serves)
