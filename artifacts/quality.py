"""The quality report: what was heard, the bounds it was held to, and the verdict. For machines, CI and people.

It is a document of its own (`"kind": "quality"`): parity speaks about an artifact alone, and is written by its build;
quality speaks about two sides and a set of utterances, and is measured later. `quality.schema.json` beside this file is
the schema of `QualityReport`.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from pydantic import BaseModel, ConfigDict, model_validator

from voicehub_aot.artifacts.pages import html_tools, junit_document, render, xml_text
from voicehub_aot.artifacts.reading import parse_json, read_bytes, reason
from voicehub_aot.artifacts.report import Number, number
from voicehub_aot.errors import ArtifactCorrupt, VersionUnsupported

SCHEMA_VERSION = 1
SCHEMA = "quality.schema.json"
TEMPLATE = "quality.html.jinja"
LARGEST_REPORT = 64 * 2**20  # bytes

Verdict = Literal["accepted", "no benefit", "rejected"]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class SideFacts(_Data):
    """What was run on one side.

    checkpoint: as given to the build. engine: as asked for, or those of the artifact. evaluations: of the denoiser in
    one request, every guidance branch counted. rtf_p50, rtf_p95: seconds of sampling a second of speech.
    """

    artifact: str
    model: str
    config: str
    checkpoint: str
    checkpoint_digest: str
    engine: str
    program: str
    steps: int
    evaluations: int
    guidance: dict[str, Number]
    seeds: tuple[int, ...]
    rtf_p50: Number
    rtf_p95: Number
    synthetic: bool


class Judged(_Data):
    """One measure, pooled over utterances and seeds.

    band: the reference against itself, by its seed, or by a pair of them ("0/1"). rule: how the bound follows.
    """

    name: str
    about: str
    better: Literal["lower", "higher"]
    value: Number
    band: dict[str, Number]
    bound: Number
    rule: str
    passed: bool

    @model_validator(mode="after")
    def _passes_within_its_bound_only(self) -> Judged:
        good = self.value <= self.bound if self.better == "lower" else self.value >= self.bound
        if self.passed and not (good and math.isfinite(self.value)):
            raise ValueError(f"marked as passed, with {self.verdict}")
        return self

    @property
    def worst(self) -> float:
        return (max if self.better == "lower" else min)(self.band.values())

    @property
    def verdict(self) -> str:
        most = "most" if self.better == "lower" else "least"
        return f"{self.name} is {number(self.value)}, wanted at {most} {number(self.bound)} ({self.rule})"


class Comparison(_Data):
    """One utterance, from one noise on each side. values: by measure, signed. heard: by recogniser.

    latent_by_step: relative L2 distance after each of the candidate's steps.
    """

    utterance: str
    text: str
    seed: int
    candidate_seed: int
    seconds: Number
    rtf: Number
    reference_rtf: Number
    values: dict[str, Number]
    heard: dict[str, str]
    latent_by_step: tuple[Number, ...]


class QualityReport(_Data):
    """utterances: the set's file. matched: both sides had the same noise. times: of the candidate's steps.

    not_scored: why a scorer is missing, by its name. because: the reason for bounds set by hand.
    quality_validated: the weights are trained, and words or naturalness were scored.
    """

    kind: Literal["quality"] = "quality"
    schema_version: int = SCHEMA_VERSION
    utterances: str = ""
    matched: bool
    candidate: SideFacts
    reference: SideFacts
    measures: tuple[Judged, ...]
    comparisons: tuple[Comparison, ...]
    times: tuple[Number, ...]
    not_scored: dict[str, str] = {}
    because: str = ""
    quality_validated: bool
    verdict: Verdict
    reasons: tuple[str, ...]
    versions: dict[str, str]

    @model_validator(mode="after")
    def _verdict_follows(self) -> QualityReport:
        if (self.verdict == "rejected") != any(not item.passed for item in self.measures):
            raise ValueError(f"the verdict {self.verdict!r} does not follow from the measures")
        if self.quality_validated and (self.candidate.synthetic or self.reference.synthetic):
            raise ValueError("quality_validated is true, but weights are synthetic")
        return self

    def __bool__(self) -> bool:
        return self.verdict == "accepted"

    @property
    def names(self) -> list[str]:
        """The utterances, in their order."""
        return list(dict.fromkeys(item.utterance for item in self.comparisons))

    @property
    def mean_latent_by_step(self) -> list[float]:
        columns = zip(*(item.latent_by_step for item in self.comparisons), strict=True)
        return [sum(column) / len(column) for column in columns]

    def measure(self, name: str) -> Judged | None:
        return next((item for item in self.measures if item.name == name), None)


@dataclass(frozen=True)
class Sound:
    """One utterance to listen to: WAV files of both sides. distance: log-mel, which is what it was chosen by."""

    utterance: str
    text: str
    distance: float
    reference: bytes
    candidate: bytes

    @property
    def players(self) -> list[tuple[str, str]]:
        """(side, data URL) of each."""
        files = (("reference", self.reference), ("candidate", self.candidate))
        return [(side, "data:audio/wav;base64," + base64.b64encode(data).decode()) for side, data in files]


def as_json(report: QualityReport) -> str:
    """Equal reports are equal texts."""
    content = json.loads(report.model_dump_json())
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> QualityReport:
    """Raises ArtifactCorrupt or VersionUnsupported."""
    try:
        content = parse_json(read_bytes(path, LARGEST_REPORT))
        if not isinstance(content, dict) or content.get("kind") != "quality":
            raise ValueError("its kind is not quality")
        if content.get("schema_version") != SCHEMA_VERSION:
            raise VersionUnsupported(
                f"{path}: quality report schema {content.get('schema_version')!r}, this package reads "
                f"{SCHEMA_VERSION}; run voicehub-aot evaluate again"
            )
        return QualityReport.model_validate(content)
    except (OSError, ValueError) as error:
        raise ArtifactCorrupt(
            f"{path}: no quality report ({reason(error)}); run voicehub-aot evaluate again"
        ) from error


def write_schema() -> None:
    """Bring the schema file up to date with the model."""
    schema = QualityReport.model_json_schema()
    Path(__file__).with_name(SCHEMA).write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")


def junit(report: QualityReport) -> str:
    """JUnit XML: one suite a set of utterances, one testcase a measure, and one for what the candidate saves."""
    suite = ElementTree.Element("testsuite", name=xml_text(f"quality of {report.utterances}"))
    properties = ElementTree.SubElement(suite, "properties")
    facts = {"candidate": report.candidate, "reference": report.reference}
    for side, about in facts.items():
        for name, value in (("artifact", about.artifact), ("program", about.program), ("engine", about.engine)):
            ElementTree.SubElement(properties, "property", name=f"{side}.{name}", value=xml_text(value))
    for item in report.measures:
        _testcase(suite, report, item.name, "" if item.passed else item.verdict)
    _testcase(suite, report, "benefit", " ".join(report.reasons) if report.verdict == "no benefit" else "")
    count, failures = len(suite.findall("testcase")), len(suite.findall("testcase/failure"))
    suite.attrib.update({"tests": str(count), "failures": str(failures), "errors": "0", "skipped": "0"})
    return junit_document(suite, {"tests": str(count), "failures": str(failures)})


def _testcase(suite: ElementTree.Element, report: QualityReport, name: str, failed: str) -> None:
    about = {"classname": xml_text(f"quality.{report.candidate.model}.{report.utterances}"), "name": name}
    case = ElementTree.SubElement(suite, "testcase", about)
    if failed:
        ElementTree.SubElement(case, "failure", type="quality", message=xml_text(failed))


def html(report: QualityReport, sounds: Sequence[Sound]) -> str:
    """One self-contained page that plays the sounds. Raises MissingDependency without the `report` extra."""
    _, charts = html_tools()
    errors, latent = report.mean_latent_by_step, report.measure("latent")
    values = {
        "report": report,
        "sounds": sounds,
        "latent_chart": charts.latent(report.times, errors, latent) if latent else "",
        "trade_chart": charts.trade(report),
    }
    return render(TEMPLATE, {"number": number}, values)


def summary(report: QualityReport) -> list[tuple[str, str, str, str, str]]:
    """Per measure: (measure, candidate, A/A band, bound, verdict)."""
    return [
        (
            item.name,
            number(item.value),
            " ".join(number(value) for value in item.band.values()),
            f"{'≤' if item.better == 'lower' else '≥'} {number(item.bound)}",
            "ok" if item.passed else "FAILED",
        )
        for item in report.measures
    ]
