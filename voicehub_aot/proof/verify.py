"""Is this artifact whole, and does it still compute what it computed when it was built?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from voicehub_aot.artifacts import report as reports, store
from voicehub_aot.artifacts.manifest import Manifest
from voicehub_aot.proof import parity
from voicehub_aot.proof.cases import check_recording, load_recording
from voicehub_aot.runtime.load import load


def verify(
    path: Path, threads: int | None = None, progress: Callable[[str], None] = lambda _: None
) -> reports.ParityReport:
    """Digests, target and versions, then every recorded case on every engine. Needs no adapter and no checkpoint.

    Raises LoadError if it does not open; a report that is false if an engine drifted.
    """
    manifest = store.read_manifest(path)
    store.verify_files(path, manifest)
    recording = load_recording(path / store.PARITY)
    check_recording(recording, manifest.region, store.read_programs(path, manifest))
    findings = []
    for engine in (None,) if manifest.mixed else manifest.engine_names:
        findings += parity.check(load(path, threads=threads, engine=engine), recording, progress)
    return report_of(manifest, findings)


def report_of(
    manifest: Manifest,
    findings: Sequence[reports.Finding],
    timings: Sequence[reports.Timing] = (),
    left_out: Mapping[str, str] | None = None,
) -> reports.ParityReport:
    """A report with the artifact's identity and sizes."""
    return reports.ParityReport(
        model=manifest.model,
        config=manifest.config_name,
        checkpoint=manifest.checkpoint.source,
        target=manifest.target.name,
        weights_mode=manifest.weights_mode,
        versions=manifest.versions,
        findings=tuple(findings),
        decisions=manifest.decisions,
        timings=tuple(timings),
        left_out=dict(left_out or {}),
        sizes=tuple(reports.Size(name=name, bytes=entry.size) for name, entry in manifest.files.items()),
    )
