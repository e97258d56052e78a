"""The parity report: what was measured, as data (JSON), for CI (JUnit) and for people (one HTML file).

Numbers that are not finite are the strings "Infinity", "-Infinity" and "NaN" in JSON, as the schema says: a failure
stays readable, and no reader meets a bare NaN. `report.schema.json` beside this file is `ParityReport`'s schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Protocol, get_args
from xml.etree import ElementTree

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema, model_validator

from voicehub_aot.artifacts.pages import html_tools, junit_document, render, xml_text
from voicehub_aot.errors import ArtifactCorrupt, VersionUnsupported
from voicehub_aot.spec.bucket import label
from voicehub_aot.spec.safety import Decision

SCHEMA_VERSION = 2
SCHEMA = "report.schema.json"
TEMPLATE = "report.html.jinja"

Check = Literal["split", "evaluation", "trajectory", "padding", "sensitivity"]
Number = Annotated[
    float, WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["Infinity", "-Infinity", "NaN"], "type": "string"}]})
]
CHECKS: dict[Check, str] = {
    "split": "The graph split into stages, against the module it was split from.",
    "evaluation": "One call of the denoiser, at several times and valid lengths.",
    "trajectory": "A whole sampling program, from noise to result.",
    "padding": "Every bucket, against the same request without padding.",
    "sensitivity": "Requests that differ must give results that differ.",
}


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Spread(_Data):
    """How far float32 runs of the model that differ in nothing but rounding lie from float64: the worst of `runs`.

    max_abs: largest difference of an element. rel_l2: norm of the difference over the norm of the float64 result.
    """

    runs: int
    max_abs: Number
    rel_l2: Number

    def __str__(self) -> str:
        return f"{self.runs} float32 runs lie up to {number(self.max_abs)} and {number(self.rel_l2)} from float64"


class Finding(_Data):
    """One comparison. It cannot pass with a distance outside its budget, or with one that is not a number.

    bucket: sizes the engine was compiled for; empty = any. lengths: valid length of each batch row.
    max_abs, rel_l2, snr_db, errors_by_step (max_abs after each step): against float32 eager; snr_db None = identical.
    first_bad_step: the first of errors_by_step, counted from 0, that is over the budget.
    distance: max |engine - float64 reference|; distance_l2: their relative L2 distance. budget, budget_l2: the most
    these may be, several times the spread of float32 runs plus a floor. spread: that of the float32 runs; None where
    the budget has another source.
    seconds: what the engine's run took; None where it was not timed by itself.
    sensitivity: distance is the relative difference of two outputs that must differ; budget is the least it must be.
    """

    check: Check
    engine: str
    bucket: dict[str, int]
    lengths: tuple[int, ...]
    program: str | None
    time: Number | None
    guided: bool
    max_abs: Number
    rel_l2: Number
    snr_db: Number | None
    first_bad_step: int | None
    distance: Number
    budget: Number
    passed: bool
    distance_l2: Number = 0.0
    budget_l2: Number = math.inf
    spread: Spread | None = None
    note: str = ""
    seconds: Number | None = None
    errors_by_step: tuple[Number, ...] = ()

    @model_validator(mode="after")
    def _passes_within_budget_only(self) -> Finding:
        finite = all(map(math.isfinite, (self.max_abs, self.distance, self.distance_l2, self.budget)))
        if self.passed and not (finite and self.used <= 1):
            raise ValueError(f"{self.name}: marked as passed, with {self.verdict}")
        return self

    @property
    def name(self) -> str:
        """e.g. "trajectory frames=128 lengths=128 euler-32 guided on aoti"; one finding each."""
        parts = [self.check, label(self.bucket), "lengths=" + ",".join(map(str, self.lengths)), self.program]
        parts += [None if self.time is None else f"t={self.time:g}", "guided" if self.guided else None]
        parts += [f"on {self.engine}", f"({self.note})" if self.check == "sensitivity" and self.note else None]
        return " ".join(part for part in parts if part)

    @property
    def used(self) -> float:
        """The part of the scarcer budget that is used up: 1 is just enough, infinite where nothing can be said."""
        if self.check == "sensitivity":
            return _share(self.budget, self.distance)
        elements = _share(self.distance, self.budget)
        return elements if self.budget_l2 == math.inf else max(elements, _share(self.distance_l2, self.budget_l2))

    @property
    def verdict(self) -> str:
        if self.check == "sensitivity":
            return f"distance {number(self.distance)}, wanted at least {number(self.budget)}"
        text = f"distance {number(self.distance)}, wanted at most {number(self.budget)}"
        if self.budget_l2 != math.inf:
            text += f"; relative L2 {number(self.distance_l2)}, wanted at most {number(self.budget_l2)}"
        return text if self.spread is None else f"{text} ({self.spread})"


def _share(used: float, whole: float) -> float:
    if not (math.isfinite(used) and math.isfinite(whole)):
        return math.inf
    if whole <= 0:
        return 0.0 if used <= whole else math.inf
    return used / whole


class Timing(_Data):
    """One engine in one bucket, in milliseconds a call.

    flops: of one call. waste: padded work / useful work - 1. noise: half the distance between the quartiles, as a share
    of the median. kept: it serves this bucket. elsewhere: processors that other processes used while it was timed.
    """

    bucket: dict[str, int]
    rows: int
    engine: str
    engine_ms: float
    eager_ms: float
    flops: int
    waste: float | None = None
    noise: float = 0.0
    elsewhere: float | None = None
    kept: bool = True

    @property
    def label(self) -> str:
        return f"{label(self.bucket)}, {self.rows} rows" if self.rows > 1 else label(self.bucket)

    @property
    def speedup(self) -> float:
        return self.eager_ms / self.engine_ms if self.engine_ms > 0 else math.inf

    @property
    def gflops(self) -> float:
        """Per second."""
        return self.flops / self.engine_ms / 1e6 if self.engine_ms > 0 else math.inf


class Size(_Data):
    """A file, or a group of files, of the artifact."""

    name: str
    bytes: int


BUSY = 0.2  # processors; more of others' work than this, and times say little


class Measured(Protocol):
    """elsewhere: processors that others used meanwhile, if that could be told."""

    @property
    def elsewhere(self) -> float | None: ...


def busiest(times: Iterable[Measured]) -> float | None:
    """Most processors that others used while engines were timed; None if that is too little to matter."""
    most = max((t.elsewhere or 0.0 for t in times), default=0.0)
    return most if most > BUSY else None


class ParityReport(_Data):
    """True iff something was measured and all of it passed.

    versions: by package name. decisions: what can move a number, each with its class; they are not counted as parity.
    left_out: why an engine that was a candidate is not among the timings.
    """

    schema_version: int = SCHEMA_VERSION
    model: str
    config: str
    checkpoint: str
    target: str
    weights_mode: str
    versions: dict[str, str]
    findings: tuple[Finding, ...] = ()
    decisions: tuple[Decision, ...] = ()
    timings: tuple[Timing, ...] = ()
    left_out: dict[str, str] = {}
    sizes: tuple[Size, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.findings) and all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.passed)

    @property
    def busiest(self) -> float | None:
        return busiest(self.timings)


def number(value: float | None) -> str:
    """Three digits, for people: "0.0123", "4.56e-7", "∞"."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def measure(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float, float | None]:
    """(max |got - want|, |got - want| / |want|, SNR in dB or None if identical), in float64. Shapes must be equal.

    Infinite, so that no budget accepts it: another shape, nothing to compare, anything not finite on either side
    (NaN never equals NaN), and a `got` of one value throughout where `want` varies.
    """
    hopeless = (math.inf, math.inf, -math.inf)
    if got.shape != want.shape or got.numel() == 0:
        return hopeless
    got, want = got.detach().double(), want.detach().double()
    if not (got.isfinite().all() and want.isfinite().all()):
        return hopeless
    if got.min() == got.max() and want.min() != want.max():
        return hopeless
    error = got - want
    max_abs, error_norm, want_norm = (float(x) for x in (error.abs().max(), error.norm(), want.norm()))
    if max_abs == 0:
        return 0.0, 0.0, None
    rel_l2 = error_norm / want_norm if want_norm > 0 else math.inf
    return max_abs, rel_l2, -20 * math.log10(rel_l2) if rel_l2 > 0 else math.inf


def as_json(report: ParityReport) -> str:
    """Equal reports are equal texts."""
    content = json.loads(report.model_dump_json())
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(report: ParityReport, path: Path) -> None:
    path.write_text(as_json(report), encoding="utf-8")


def read_json(path: Path) -> ParityReport:
    """Raises ArtifactCorrupt or VersionUnsupported."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        version = content["schema_version"]
        if version != SCHEMA_VERSION:
            raise VersionUnsupported(
                f"{path}: report schema {version!r}, this package reads {SCHEMA_VERSION}; run voicehub-aot verify again"
            )
        return ParityReport.model_validate(content)
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:  # ValidationError is a ValueError
        raise ArtifactCorrupt(f"{path}: no parity report ({_first(error)}); run voicehub-aot verify again") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"bare {constant}")


def _first(error: Exception) -> str:
    """The part of an error that names the reason, on one line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).partition("\n")[0] or type(error).__name__


def write_schema() -> None:
    """Bring the schema file up to date with the model."""
    schema = ParityReport.model_json_schema()
    Path(__file__).with_name(SCHEMA).write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")


def junit(report: ParityReport) -> str:
    """JUnit XML: one testcase per engine, bucket, check and program. Without any measurement, one that fails."""
    suite = ElementTree.Element("testsuite", name=xml_text(f"parity of {report.model} {report.config}"))
    properties = ElementTree.SubElement(suite, "properties")
    facts = {"target": report.target, "weights": report.weights_mode, "checkpoint": report.checkpoint}
    for name, value in {**facts, **report.versions}.items():
        ElementTree.SubElement(properties, "property", name=xml_text(name), value=xml_text(value))

    cases: dict[str, list[Finding]] = {}
    for finding in report.findings:
        what = " ".join(filter(None, (finding.check, label(finding.bucket), finding.program)))
        cases.setdefault(f"{what} on {finding.engine}", []).append(finding)
    for name, findings in cases.items():
        reasons = [_explain(finding) for finding in _worst_first(findings) if not finding.passed]
        _testcase(suite, report, name, reasons, sum(finding.seconds or 0.0 for finding in findings))
    if not cases:
        _testcase(suite, report, "findings", ["nothing was measured, so nothing is proven"])

    count, failures = len(suite.findall("testcase")), len(suite.findall("testcase/failure"))
    seconds = sum(finding.seconds or 0.0 for finding in report.findings)
    counts = {"tests": str(count), "failures": str(failures), "errors": "0", "skipped": "0", "time": f"{seconds:.6f}"}
    suite.attrib.update(counts)
    return junit_document(suite, counts)


def _testcase(
    suite: ElementTree.Element, report: ParityReport, name: str, failures: list[str], seconds: float = 0.0
) -> None:
    about = {
        "classname": xml_text(f"parity.{report.model}.{report.config}"),
        "name": xml_text(name),
        "time": f"{seconds:.6f}",
    }
    case = ElementTree.SubElement(suite, "testcase", about)
    if failures:
        failure = ElementTree.SubElement(case, "failure", type="parity", message=xml_text(failures[0]))
        failure.text = xml_text("\n".join(failures))


def _worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: (finding.passed, -finding.used))


def _explain(finding: Finding) -> str:
    at = "" if finding.first_bad_step is None else f", first bad step {finding.first_bad_step}"
    return f"{finding.name}: {finding.verdict}{at}" + (f"; {finding.note}" if finding.note else "")


def html(report: ParityReport) -> str:
    """One self-contained page. Needs the `report` extra: raises MissingDependency without it."""
    _, charts = html_tools()
    groups = [
        (check, _worst_first(finding for finding in report.findings if finding.check == check))
        for check in get_args(Check)
    ]
    values = {
        "report": report,
        "groups": sorted((g for g in groups if g[1]), key=lambda group: group[1][0].passed),
        "about": CHECKS,
        "timings": sorted(report.timings, key=lambda timing: timing.speedup >= 1),
        "error_charts": charts.errors([finding for finding in report.findings if finding.errors_by_step]),
        "latency_chart": charts.latency(report.timings) if report.timings else "",
        "size_chart": charts.sizes(report.sizes) if report.sizes else "",
    }
    return render(TEMPLATE, {"number": number}, values)


def summary(report: ParityReport) -> list[tuple[str, int, int, str]]:
    """Per check: (check, findings, failed, largest share of a budget used)."""
    kinds = dict.fromkeys(finding.check for finding in report.findings)
    result: list[tuple[str, int, int, str]] = []
    for kind in kinds:
        findings = [finding for finding in report.findings if finding.check == kind]
        failed = sum(not finding.passed for finding in findings)
        result.append((kind, len(findings), failed, f"{max(finding.used for finding in findings):.1%}"))
    return result
