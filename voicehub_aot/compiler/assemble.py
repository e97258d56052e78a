"""Stages and finished engines -> an artifact's folder."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

import voicehub_aot
from voicehub_aot import engines
from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.manifest import EngineEntry, Manifest, StageReport, made_for
from voicehub_aot.compiler.choose import Choice
from voicehub_aot.compiler.compile import Compiled, install
from voicehub_aot.compiler.flops import matrix_flops
from voicehub_aot.compiler.jobs import compile_sizes
from voicehub_aot.compiler.ladder import choose_ladder
from voicehub_aot.compiler.models import Model
from voicehub_aot.compiler.options import Options
from voicehub_aot.compiler.stages import Stages
from voicehub_aot.spec.bucket import Buckets, Ladder, label
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import BATCH


@dataclass(frozen=True)
class Parts:
    """What an artifact is assembled from, beside its engines. symbols: the graph's own symbol of each named size.

    settings: the resolved options as TOML, kept as config.toml.
    """

    model: Model
    options: Options
    stages: Stages
    symbols: Mapping[str, str]
    settings: str | None

    @cached_property
    def tables(self) -> dict[str, dict[str, torch.Tensor]]:
        return {p.name: time_table(self.stages, p) for p in self.options.programs}


def time_table(stages: Stages, program: Program) -> dict[str, torch.Tensor]:
    """What depends on time alone, stacked by evaluation: value name -> [N, ...]."""
    clocks = [program.clock(n, stages.spec.time.name) for n in range(len(program.times))]
    with torch.no_grad():
        rows = [stages.table({n: torch.tensor([t], dtype=torch.float32) for n, t in clock.items()}) for clock in clocks]
    return {name: torch.stack([row[name] for row in rows]).contiguous() for name in rows[0]}


def assemble(parts: Parts, compiled: Sequence[Compiled], folder: Path, choice: Choice | None = None) -> Manifest:
    """Fill `folder`, which is empty: weights, programs, engines. choice: keep only what it serves.

    Returns the manifest over these files, which is yet to be written.
    """
    options = parts.options
    kept = [(item, serves) for item in compiled if (serves := _serves(item, choice)) is not None]
    reads = [item.reads_weight_file(options.weights_mode) for item, _ in kept]
    tensors = _tensors(parts, [i for (i, _), r in zip(kept, reads, strict=True) if r])
    store.save_tensors(tensors, folder / store.WEIGHTS)
    entries: list[EngineEntry] = []
    for item, serves in kept:
        reason = choice.reasons.get(item.job.engine, "") if choice else "built by name"
        entry = install(item, folder, options).model_copy(update={"serves": serves, "reason": reason})
        weights = {constant.name: tensors[constant.name] for constant in entry.constants}
        digest = made_for(entry, parts.model.region.spec, weights)
        entries.append(entry.model_copy(update={"made_for": digest}))
    if parts.settings is not None:
        (folder / store.SETTINGS).write_text(parts.settings, encoding="utf-8")
    for program in options.programs:
        path = folder / store.PROGRAMS / f"{program.name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(program.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return Manifest(
        created_by=f"voicehub-aot {voicehub_aot.__version__}",
        model=parts.model.name,
        config_name=parts.model.config_name,
        config=dict(parts.model.config),
        checkpoint=parts.model.checkpoint,
        target=options.target,
        versions=versions(entries),
        region=parts.model.region.spec,
        buckets=options.buckets,
        ladder=_ladder(parts, entries),
        shapes=options.shapes,
        weights_mode="shared" if all(reads) else options.weights_mode,
        engines=tuple(entries),
        stages=stage_reports(parts.stages, options.buckets, parts.symbols),
        folded=tuple(sorted(parts.stages.folded)),
        programs=tuple(p.name for p in options.programs),
        files=store.list_files(folder),
    )


def _ladder(parts: Parts, entries: Sequence[EngineEntry]) -> Ladder:
    """Where one engine serves every size, as many rungs as the kernels it keeps allow; else none."""
    options = parts.options
    kept = max(engines.kernel_bytes(e.engine, options.weights_mode) for e in entries)
    if options.shapes == "static":
        return Ladder()
    return choose_ladder(parts.stages, options.buckets, parts.symbols, kept)


def _serves(item: Compiled, choice: Choice | None) -> tuple[dict[str, int], ...] | None:
    """The buckets an engine serves by choice, () for all that it fits; None if it is left out."""
    if choice is None:
        return ()
    if item.job.stage == "prepare":
        return () if item.job.engine == choice.prepare else None
    return choice.served(item.job.engine, item.job.bucket) or None


def _tensors(parts: Parts, readers: Sequence[Compiled]) -> dict[str, torch.Tensor]:
    """The weight file: time tables, and every weight that an engine reads there, once."""
    tensors = {
        store.table_key(program, name): t for program, table in parts.tables.items() for name, t in table.items()
    }
    for reader in readers:
        tensors.update({n: reader.job.weights[n].detach().contiguous() for n in reader.payload["constants"]})
    return tensors


def versions(entries: Sequence[EngineEntry]) -> dict[str, str]:
    """Of what built it. torch's is checked at load by engines that are bound to it."""
    own = {
        "voicehub_aot": voicehub_aot.__version__,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
    }
    for entry in entries:
        own.update(engines.get(entry.engine).versions())
    return own


def stage_reports(stages: Stages, buckets: Buckets, symbols: Mapping[str, str]) -> dict[str, StageReport]:
    """Node counts, weights and matrix operations of each stage, the latter per bucket at one guided request."""
    rows = len(stages.spec.guidance.branches) if stages.spec.guidance else 1
    axes = [a for a in buckets.axes if a != "batch"]
    result = {}
    for stage in (stages.table, stages.prepare, stages.mixed, stages.step):
        if stage is None:
            continue
        flops = {}
        for bucket in buckets.combinations(axes) or [{}]:
            sizes = compile_sizes(stages, buckets, bucket) | {BATCH: rows}
            flops[label(bucket)] = matrix_flops(stage, sizes, symbols)
        result[stage.name] = StageReport(
            nodes=stage.nodes,
            parameters=sum(t.numel() for t in stage.constants.values()),
            weight_bytes=stage.weight_bytes,
            inputs=stage.inputs,
            outputs=stage.outputs,
            flops=flops,
        )
    return result
