"""The quality report as a document: what it refuses, and how it is written for machines, CI and people."""

from __future__ import annotations

import json
import math
import sys
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from pydantic import ValidationError

from voicehub_aot.artifacts import quality
from voicehub_aot.artifacts.quality import (
    Comparison,
    Judged,
    QualityReport,
    SideFacts,
    Sound,
    as_json,
    html,
    junit,
    read_json,
    summary,
)
from voicehub_aot.errors import ArtifactCorrupt, MissingDependency, VersionUnsupported


def facts(**changes: Any) -> SideFacts:
    values: dict[str, Any] = {
        "artifact": "a.aot", "model": "f5tts", "config": "tiny", "checkpoint": "<model>.safetensors",
        "checkpoint_digest": "1", "engine": "aoti", "program": "euler-8", "steps": 8, "evaluations": 16,
        "guidance": {"text": 2.0}, "seeds": (0, 1), "rtf_p50": 0.5, "rtf_p95": 0.6, "synthetic": False,
    }  # fmt: skip
    return SideFacts(**{**values, **changes})


def judged(**changes: Any) -> Judged:
    values: dict[str, Any] = {
        "name": "sphinx_wer", "about": "word error rate", "better": "lower", "value": 0.02,
        "band": {"0": 0.01, "1": 0.02}, "bound": 0.04, "rule": "worst of the band 0.02 + 0.02", "passed": True,
    }  # fmt: skip
    return Judged(**{**values, **changes})


LATENT = judged(name="latent", about="distance of the states", band={"0/1": 0.5}, bound=0.2, value=0.1)
BAD = judged(name="level_db", about="dB & more", value=6.0, bound=1.2, passed=False)


def comparison(seed: int, **changes: Any) -> Comparison:
    values: dict[str, Any] = {
        "utterance": "1 window", "text": "window <b>", "seed": seed, "candidate_seed": seed, "seconds": 1.5,
        "rtf": 0.5, "reference_rtf": 1.0, "values": {"sphinx_wer": 0.0, "latent": 0.1}, "heard": {"sphinx": "window"},
        "latent_by_step": (0.0, 0.1 * (1 + seed)),
    }  # fmt: skip
    return Comparison(**{**values, **changes})


def report(*measures: Judged, **changes: Any) -> QualityReport:
    values: dict[str, Any] = {
        "utterances": "cases.toml", "matched": True, "candidate": facts(),
        "reference": facts(program="euler-32", steps=32, evaluations=64), "measures": measures or (judged(), LATENT),
        "comparisons": (comparison(0), comparison(1)), "times": (0.5, 1.0), "not_scored": {"whisper": "is absent"},
        "because": "", "quality_validated": True, "verdict": "accepted", "reasons": ("within every bound",),
        "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    return QualityReport(**{**values, **changes})


def rejected() -> QualityReport:
    return report(judged(), LATENT, BAD, verdict="rejected", reasons=(BAD.verdict,), because="a <trial>")


@pytest.mark.parametrize(
    "changes",
    [
        {"value": 0.05},
        {"value": math.nan},
        {"value": math.inf},
        {"value": 0.05, "better": "higher", "bound": 0.06},
        {"value": math.inf, "better": "higher"},
    ],
)
def test_a_measure_beyond_its_bound_cannot_be_marked_as_passed(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="marked as passed"):
        judged(**changes)


@pytest.mark.parametrize(("measures", "verdict"), [([BAD], "accepted"), ([BAD], "no benefit"), ([LATENT], "rejected")])
def test_a_verdict_follows_from_the_measures(measures: list[Judged], verdict: str) -> None:
    with pytest.raises(ValidationError, match="does not follow"):
        report(*measures, verdict=verdict)


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_synthetic_weights_cannot_be_validated(side: str) -> None:
    with pytest.raises(ValidationError, match="weights are synthetic"):
        report(**{side: facts(synthetic=True)})
    assert not report(**{side: facts(synthetic=True)}, quality_validated=False).quality_validated


def test_a_report_is_true_only_if_it_was_accepted() -> None:
    assert report()
    assert not rejected()
    assert not report(verdict="no benefit")


def test_the_mean_error_is_over_all_comparisons() -> None:
    assert report().mean_latent_by_step == pytest.approx([0.0, 0.15])


def test_the_worst_of_the_band_is_the_one_that_matters() -> None:
    assert judged().worst == 0.02
    assert judged(better="higher", bound=0.0).worst == 0.01


# --- JSON


def test_json_keeps_everything(tmp_path: Path) -> None:
    bad = judged(name="log_mel", value=math.inf, passed=False)
    written = report(bad, verdict="rejected", comparisons=(comparison(0, values={"log_mel": math.inf}),))
    (tmp_path / "report.json").write_text(as_json(written))
    assert read_json(tmp_path / "report.json") == written
    json.loads(as_json(written), parse_constant=pytest.fail)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "quality"', '{"kind": "parity", "schema_version": 1}'])
def test_a_file_that_is_no_quality_report_is_corrupt(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ArtifactCorrupt, match=r"report\.json: no quality report"):
        read_json(tmp_path / "report.json")


def test_another_schema_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(as_json(report()).replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(VersionUnsupported, match="quality report schema 9, this package reads 1"):
        read_json(tmp_path / "report.json")


def test_an_edited_verdict_is_refused(tmp_path: Path) -> None:
    text = as_json(rejected()).replace('"verdict": "rejected"', '"verdict": "accepted"')
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ArtifactCorrupt, match="does not follow"):
        read_json(tmp_path / "report.json")


def test_the_schema_file_is_the_model_and_reports_conform_to_it() -> None:
    schema = json.loads(resources.files("voicehub_aot.artifacts").joinpath(quality.SCHEMA).read_text())
    assert schema == QualityReport.model_json_schema(), "run voicehub_aot.artifacts.quality.write_schema()"
    for written in (report(), rejected()):
        jsonschema.Draft202012Validator(schema).validate(json.loads(as_json(written)))


# --- JUnit, tables and the page


def test_junit_has_a_case_a_measure_and_one_for_the_benefit() -> None:
    suite = ElementTree.fromstring(junit(rejected())).find("testsuite")
    assert suite is not None
    assert suite.get("name") == "quality of cases.toml"
    assert [case.get("name") for case in suite.iter("testcase")] == ["sphinx_wer", "latent", "level_db", "benefit"]
    (failure,) = suite.iter("failure")
    assert failure.get("message") == BAD.verdict
    assert (suite.get("tests"), suite.get("failures")) == ("4", "1")


def test_no_benefit_is_a_failure_of_its_own() -> None:
    root = ElementTree.fromstring(junit(report(verdict="no benefit", reasons=("saves nothing",))))
    assert [case.get("name") for case in root.iter("testcase") if case.find("failure") is not None] == ["benefit"]


def test_the_summary_has_a_line_a_measure() -> None:
    assert summary(rejected())[-1] == ("level_db", "6", "0.01 0.02", "≤ 1.2", "FAILED")


def test_the_page_plays_the_sounds_and_draws_both_charts() -> None:
    sounds = [Sound("1 window", "window <b>", 0.25, b"RIFFreference", b"RIFFcandidate")]
    page = html(rejected(), sounds)
    assert "REJECTED" in page
    assert page.count("<audio ") == page.count("data:audio/wav;base64,UklGR") == 2
    assert page.count("<svg ") == 2
    assert "latent error against step" in page
    assert "real-time factor against word error rate" in page
    assert "a &lt;trial&gt;" in page
    assert "window &lt;b&gt;" in page
    assert "<b>window" not in page
    assert "--accent:" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_the_page_says_where_quality_is_not_validated() -> None:
    assert "not validated" not in html(report(), [])
    page = html(report(LATENT, quality_validated=False), [])
    assert "neither words nor naturalness were scored" in page
    assert "real-time factor against word error rate" not in page
    synthetic = report(candidate=facts(synthetic=True), quality_validated=False)
    assert "the weights are synthetic" in html(synthetic, [])


def test_the_page_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependency, match=r"voicehub-aot\[report\]"):
        html(report(), [])


def test_a_candidate_that_is_infinitely_far_has_a_page_all_the_same() -> None:
    latent = judged(name="latent", band={"0/1": math.inf}, bound=math.inf, value=math.inf, passed=False)
    rate = judged(value=math.inf, passed=False)
    far = (comparison(0, latent_by_step=(math.inf, math.nan)),)
    page = html(report(rate, latent, verdict="rejected", comparisons=far), [])
    assert page.count("<svg ") == 2
