import json
import math
import re
import sys
from importlib import resources
from xml.etree import ElementTree

import jsonschema
import pytest
import torch
from pydantic import ValidationError

from voicehub_aot.artifacts import report as report_module
from voicehub_aot.artifacts.report import (
    CHECKS,
    Finding,
    ParityReport,
    Size,
    Timing,
    html,
    junit,
    measure,
    number,
    read_json,
    write_json,
)
from voicehub_aot.errors import ArtifactCorrupt, MissingDependency, VersionUnsupported

HOPELESS = (math.inf, math.inf, -math.inf)


def make_finding(**changes):
    values = {
        "check": "trajectory",
        "engine": "aoti",
        "bucket": {"frames": 128},
        "lengths": (128,),
        "program": "euler-32",
        "time": None,
        "guided": True,
        "max_abs": 2e-6,
        "rel_l2": 1e-6,
        "snr_db": 120.0,
        "first_bad_step": None,
        "distance": 1e-6,
        "budget": 4e-6,
        "passed": True,
    }
    return Finding(**{**values, **changes})


def failed(**changes):
    return make_finding(**{"distance": 8e-6, "passed": False, **changes})


def make_report(*findings, **changes):
    values = {
        "model": "supertonic",
        "config": "tiny",
        "checkpoint": "sha256:abc",
        "target": "cpu:x86-64-v3",
        "weights_mode": "packed",
        "versions": {"torch": "2.13.0"},
        "findings": findings,
    }
    return ParityReport(**{**values, **changes})


def full_report():
    """Every check, a failure of each kind, numbers that are not finite, timings and sizes."""
    findings = [
        make_finding(check=check, lengths=(n,)) for check in CHECKS if check != "sensitivity" for n in (128, 97)
    ]
    findings += [
        make_finding(check="sensitivity", distance=0.4, budget=0.01, note="seed"),
        make_finding(errors_by_step=(1e-7, 0.0, 3e-7)),
        make_finding(program="euler-8", snr_db=None, max_abs=0, rel_l2=0, distance=0, errors_by_step=(0.0, 0.0)),
        failed(bucket={"frames": 256}, errors_by_step=(1e-7, 2e-3, math.inf), first_bad_step=2),
        failed(bucket={}, max_abs=math.inf, rel_l2=math.inf, snr_db=-math.inf, distance=math.nan, note="<nan> & more"),
    ]
    timings = [
        Timing(bucket={"frames": 128}, rows=1, engine="aoti", engine_ms=9.5, eager_ms=12.0, flops=10**9, waste=0.25),
        Timing(bucket={"frames": 128}, rows=2, engine="aoti", engine_ms=20.5, eager_ms=19.0, flops=2 * 10**9),
    ]
    return make_report(*findings, timings=timings, sizes=[Size(name="weights.safetensors", bytes=123456)])


# --- findings and the verdict ---


def test_a_report_is_true_only_if_something_was_measured_and_all_of_it_passed():
    assert make_report(make_finding())
    assert not make_report(make_finding(), failed())
    assert not make_report()


def test_failures_are_the_rows_that_did_not_pass():
    assert make_report(make_finding(), failed()).failures == (failed(),)


def test_a_row_names_itself():
    assert make_finding().name == "trajectory frames=128 lengths=128 euler-32 guided on aoti"
    evaluation = make_finding(check="evaluation", program=None, time=0.25, guided=False, bucket={}, lengths=(90, 37))
    assert evaluation.name == "evaluation any size lengths=90,37 t=0.25 on aoti"


def test_two_sensitivity_rows_differ_by_what_was_changed():
    seed, text = (make_finding(check="sensitivity", distance=1.0, budget=0.1, note=note) for note in ("seed", "text"))

    assert seed.name != text.name


@pytest.mark.parametrize("distance", [4.1e-6, math.inf, math.nan])
def test_a_row_outside_its_budget_cannot_be_marked_as_passed(distance):
    with pytest.raises(ValidationError, match="marked as passed"):
        make_finding(distance=distance)


def test_a_row_with_infinite_error_cannot_be_marked_as_passed():
    with pytest.raises(ValidationError, match="marked as passed"):
        make_finding(max_abs=math.inf)


def test_outputs_that_should_differ_and_do_not_cannot_be_marked_as_passed():
    with pytest.raises(ValidationError, match=r"wanted at least 0\.01"):
        make_finding(check="sensitivity", distance=0.0, budget=0.01)


def test_a_bitwise_check_passes_with_a_budget_of_nothing():
    assert make_finding(check="split", distance=0.0, budget=0.0).passed
    with pytest.raises(ValidationError):
        make_finding(check="split", distance=1e-12, budget=0.0)


def test_models_accept_no_unknown_field_and_no_change():
    with pytest.raises(ValidationError):
        make_finding(tolerance=1.0)
    with pytest.raises(ValidationError):
        make_finding().passed = False


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.01234, "0.0123"), (1234.5, "1234"), (4.56e-7, "4.56e-7"), (math.inf, "∞")],
)
def test_numbers_read_well(value, text):
    assert number(value) == text


# --- measure ---


def test_measure_knows_the_three_errors():
    want = torch.tensor([3.0, 4.0])

    max_abs, rel_l2, snr_db = measure(want + torch.tensor([0.5, 0.0]), want)

    assert (max_abs, rel_l2) == (0.5, 0.1)
    assert snr_db == pytest.approx(20.0)


def test_identical_has_no_noise():
    x = torch.randn(2, 3)

    assert measure(x, x.clone()) == (0.0, 0.0, None)


def test_measure_computes_in_float64():
    want = torch.tensor([1.0, 2.0, 3.0])

    assert measure(want.double() + 1e-12, want)[0] == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_equals_anything(value):
    x = torch.tensor([1.0, value, 2.0])
    finite = torch.tensor([1.0, 1.5, 2.0])

    assert measure(x, finite) == measure(finite, x) == measure(x, x.clone()) == HOPELESS


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_constant_output_is_hopeless_where_the_reference_varies(value):
    assert measure(torch.full((4,), value), torch.tensor([1.0, 1.0, 1.0, 1.0 + 1e-6])) == HOPELESS


def test_a_constant_output_is_compared_where_the_reference_is_constant_too():
    assert measure(torch.ones(4), torch.ones(4)) == (0.0, 0.0, None)
    assert measure(torch.tensor([2.0]), torch.tensor([4.0])) == (2.0, 0.5, pytest.approx(6.02, abs=0.01))


def test_an_error_against_zeros_is_infinitely_large_relative_to_them():
    assert measure(torch.tensor([0.0, 0.5]), torch.zeros(2)) == (0.5, math.inf, -math.inf)


@pytest.mark.parametrize(("got", "want"), [((2, 1), (2, 3)), ((3,), (1, 3)), ((0, 3), (0, 3))])
def test_other_shapes_and_nothing_at_all_are_hopeless(got, want):
    assert measure(torch.ones(got), torch.ones(want)) == HOPELESS


# --- JSON ---


def test_json_keeps_everything(tmp_path):
    report = full_report()

    write_json(report, tmp_path / "report.json")
    again = read_json(tmp_path / "report.json")

    assert again.model_dump_json() == report.model_dump_json()  # NaN is not equal to itself, its text is


def test_json_is_strict_and_canonical(tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write_json(full_report(), one)
    write_json(full_report().model_copy(update={"versions": {"torch": "2.13.0"}}), two)

    assert one.read_bytes() == two.read_bytes()
    json.loads(one.read_text(), parse_constant=pytest.fail)
    assert '"distance": "NaN"' in one.read_text()
    assert one.read_text().startswith('{\n  "checkpoint"')


def test_the_order_of_mappings_does_not_change_the_bytes(tmp_path):
    for name, bucket in (("one", {"frames": 8, "text": 4}), ("two", {"text": 4, "frames": 8})):
        write_json(make_report(make_finding(bucket=bucket)), tmp_path / name)

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": 2}', '{"schema_version": NaN}'])
def test_a_file_that_is_no_report_is_corrupt(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)

    with pytest.raises(ArtifactCorrupt, match=r"report\.json"):
        read_json(path)


def test_an_edited_verdict_is_refused(tmp_path):
    path = tmp_path / "report.json"
    write_json(make_report(failed()), path)
    path.write_text(path.read_text().replace('"passed": false', '"passed": true'))

    with pytest.raises(ArtifactCorrupt, match="marked as passed"):
        read_json(path)


def test_a_missing_file_is_corrupt(tmp_path):
    with pytest.raises(ArtifactCorrupt):
        read_json(tmp_path / "absent.json")


def test_another_schema_version_is_named(tmp_path):
    path = tmp_path / "report.json"
    write_json(make_report(make_finding()), path)
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 1'))

    with pytest.raises(VersionUnsupported, match="report schema 1, this package reads 2"):
        read_json(path)


# --- schema ---


def schema():
    return json.loads(resources.files("voicehub_aot.artifacts").joinpath(report_module.SCHEMA).read_text())


def test_the_schema_file_is_the_model():
    assert schema() == ParityReport.model_json_schema(), "run voicehub_aot.artifacts.report.write_schema()"


def test_reports_conform_to_the_schema(tmp_path):
    write_json(full_report(), tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())

    validator.validate(content)
    content["findings"][0]["distance"] = "a lot"
    assert not validator.is_valid(content)


# --- JUnit ---


def test_junit_has_a_case_per_engine_bucket_check_and_program():
    findings = [make_finding(lengths=(n,)) for n in (128, 97)]
    findings += [
        make_finding(program="euler-8"),
        make_finding(bucket={"frames": 256}),
        make_finding(check="padding", program=None),
    ]

    suite = ElementTree.fromstring(junit(make_report(*findings))).find("testsuite")

    assert [case.get("name") for case in suite.iter("testcase")] == [
        "trajectory frames=128 euler-32 on aoti",
        "trajectory frames=128 euler-8 on aoti",
        "trajectory frames=256 euler-32 on aoti",
        "padding frames=128 on aoti",
    ]


@pytest.mark.parametrize("report", [full_report(), make_report(make_finding()), make_report(failed()), make_report()])
def test_junit_counts_what_it_lists(report):
    root = ElementTree.fromstring(junit(report))

    for element in (root, root.find("testsuite")):
        assert int(element.get("tests")) == len(list(root.iter("testcase"))) > 0
        assert int(element.get("failures")) == len(list(root.iter("failure")))
        assert element.get("errors") == element.get("skipped") == "0"
    assert (int(root.get("failures")) == 0) == bool(report)


def test_junit_has_the_seconds_of_each_case_and_their_sum():
    findings = [
        make_finding(seconds=1.25),
        make_finding(lengths=(97,), seconds=0.5),
        make_finding(engine="openvino", seconds=2.0),
    ]

    root = ElementTree.fromstring(junit(make_report(*findings, make_finding(check="padding"))))

    assert [case.get("time") for case in root.iter("testcase")] == ["1.750000", "2.000000", "0.000000"]
    assert root.get("time") == root.find("testsuite").get("time") == "3.750000"


def test_a_junit_failure_names_the_worst_row_first():
    findings = [
        make_finding(),
        failed(lengths=(97,)),
        failed(lengths=(33,), distance=1.0, first_bad_step=3, note="drift"),
    ]

    (failure,) = ElementTree.fromstring(junit(make_report(*findings))).iter("failure")

    worst = "trajectory frames=128 lengths=33 euler-32 guided on aoti: distance 1, wanted at most 4.00e-6"
    assert failure.get("message") == f"{worst}, first bad step 3; drift"
    assert [line.partition(":")[0] for line in failure.text.splitlines()] == [findings[2].name, findings[1].name]


def test_junit_survives_characters_that_xml_cannot_hold():
    report = make_report(failed(note="\x1b[31mred\x00 <tag> & \ud800 𝄞"))

    (failure,) = ElementTree.fromstring(junit(report)).iter("failure")

    assert failure.get("message").endswith("?[31mred? <tag> & ? 𝄞")


# --- HTML ---


@pytest.fixture(scope="module")
def page():
    return html(full_report())


def test_html_is_one_file_without_anything_from_outside(page):
    references = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"|url\(([^)]*)\)', page)

    assert references
    assert all((a or b).startswith("#") for a, b in references)
    assert not re.search(r"@import|<link|<script|<!DOCTYPE svg", page)


def test_html_links_point_at_ids_that_exist_once(page):
    ids = re.findall(r'\bid="([^"]*)"', page)
    targets = set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page))

    assert len(ids) == len(set(ids))
    assert {a or b for a, b in targets} <= set(ids)


def test_html_says_first_what_it_is_about(page):
    title = re.search("<title>(.*)</title>", page).group(1)
    header = re.search("<header>(.*)</header>", page, re.DOTALL).group(1)

    assert title == "FAILED: parity of supertonic tiny"
    assert all(text in header for text in ("FAILED", "supertonic", "tiny", "cpu:x86-64-v3", "torch 2.13.0", "packed"))
    assert ">PASSED<" in html(make_report(make_finding()))
    assert "nothing was measured" in html(make_report())


def test_html_shows_failures_first_and_escapes_what_they_say(page):
    bodies = re.findall("<tbody>(.*?)</tbody>", page, re.DOTALL)
    names = re.findall(r'<tr( class="failed")? title="(\w+)', bodies[0])

    assert [bool(mark) for mark, _ in names[:3]] == [True, True, False]
    assert "&lt;nan&gt; &amp; more" in page
    assert "<nan>" not in page


def test_html_draws_errors_latency_and_sizes_in_the_page_s_colours(page):
    charts = re.findall(r'<svg role="img" aria-label="([^"]*)"', page)

    assert charts == [
        *["error against step"] * 2,
        "latency of engine and eager by bucket",
        "size of the artifact's parts",
    ]
    assert "identical at every step" in page
    assert "#fed" not in page
    assert "prefers-color-scheme: dark" in page


def test_html_shows_every_row():
    findings = [make_finding(lengths=(n,)) for n in range(1, 31)]

    page = html(make_report(*findings))

    assert all(f'title="{finding.name}"' in page for finding in findings)
    assert "22 more, all passed" in page


def test_html_gathers_the_smallest_of_many_files():
    sizes = [Size(name=f"file{n}", bytes=n * 1024) for n in range(1, 21)]

    page = html(make_report(make_finding(), sizes=sizes))

    assert "6 smaller ones" in page
    assert "21 KiB" in page  # 1 + 2 + … + 6
    assert "file7" in page
    assert "file6" not in page


def test_html_does_not_call_outputs_identical_that_must_differ():
    finding = make_finding(check="sensitivity", distance=0.5, budget=0.1, max_abs=0.0, rel_l2=0.0, snr_db=None)

    assert "identical" not in html(make_report(finding))


def test_html_is_the_same_every_time(page):
    assert html(full_report()) == page


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_names_the_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "voicehub_aot.artifacts.charts", raising=False)
    monkeypatch.delattr("voicehub_aot.artifacts.charts", raising=False)

    with pytest.raises(MissingDependency, match=rf"{package}.*pip install 'voicehub-aot\[report\]'"):
        html(make_report(make_finding()))
