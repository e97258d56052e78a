"""A new artifact for a fine-tune: the same engines over other weights."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import tomli_w

from voicehub_aot import engines
from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.manifest import Manifest
from voicehub_aot.artifacts.reading import read_bytes, reason
from voicehub_aot.compiler.build import build
from voicehub_aot.compiler.choose import Choice
from voicehub_aot.compiler.models import resolve
from voicehub_aot.compiler.options import Options
from voicehub_aot.errors import ArtifactCorrupt, OptionUnsupported
from voicehub_aot.progress import Progress


def reweight(
    artifact: Path,
    checkpoint: str,
    output: Path,
    force: bool = False,
    progress: Progress | None = None,
    weights_kind: str | None = None,
) -> Manifest:
    """Weights and time tables anew, engines copied byte for byte, parity measured again. Shared mode only.

    Raises CheckpointMismatch if the shapes are not the artifact's, BuildError if this package would compile other
    engines than the artifact holds, ParityFailed if the engines do not fit the new weights.
    """
    manifest = store.read_manifest(artifact)
    store.verify_files(artifact, manifest)
    if not all(engines.get(name).reads_weight_file(manifest.weights_mode) for name in manifest.engine_names):
        raise OptionUnsupported(
            f"{artifact}: its engines hold packed weights; only artifacts built with --weights-mode shared can be "
            "reweighted. Build the fine-tune instead"
        )
    progress = progress or Progress()
    model = resolve(manifest.model, manifest.config_name, checkpoint, manifest.config, weights_kind, progress.stage)
    model = replace(model, config_name=manifest.config_name)
    options = Options(
        buckets=manifest.buckets,
        programs=tuple(store.read_programs(artifact, manifest).values()),
        target=manifest.target,
        engines=manifest.engine_names,
        weights_mode=manifest.weights_mode,
        choice=_choice(manifest),
        shapes=manifest.shapes,
        replace=force,
        engines_from={e.key: artifact / e.path for e in manifest.engines},
    )
    return build(model, options, output, progress, _settings(artifact, manifest, checkpoint, weights_kind))


def _settings(artifact: Path, manifest: Manifest, checkpoint: str, weights_kind: str | None) -> str | None:
    """The options the artifact was built with, if it keeps them, over the other checkpoint."""
    if store.SETTINGS not in manifest.files:
        return None
    try:
        text = read_bytes(artifact / store.SETTINGS, store.LARGEST_DOCUMENT).decode("utf-8")
        values = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ArtifactCorrupt(f"{artifact}: {store.SETTINGS} is unreadable ({reason(error)}); rebuild it") from error
    values.pop("weights_kind", None)
    new = {"checkpoint": checkpoint} | ({"weights_kind": weights_kind} if weights_kind else {})
    heading = text.partition("\n")[0] + "\n" if text.startswith("#") else ""
    return heading + tomli_w.dumps({**new, **{n: v for n, v in values.items() if n not in new}})


def _choice(manifest: Manifest) -> Choice | None:
    """The choice an artifact was built by, if it was."""
    if not manifest.mixed:
        return None
    steps: dict[str, tuple[Mapping[str, int], ...]] = {}
    for entry in manifest.engines:
        if entry.stage == "step":
            steps[entry.engine] = (*steps.get(entry.engine, ()), *entry.serves)
    prepare = next(e.engine for e in manifest.engines if e.stage == "prepare")
    return Choice(prepare, steps, {e.engine: e.reason for e in manifest.engines})
