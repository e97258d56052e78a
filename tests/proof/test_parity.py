"""Parity must fail when an engine is wrong, in any of the ways an engine can be wrong."""

import pytest
import torch
import toy

from voicehub_aot.artifacts.report import ParityReport
from voicehub_aot.errors import ArtifactCorrupt, StageFailed
from voicehub_aot.proof import parity
from voicehub_aot.proof.cases import RECORDING_TENSORS, Recording, draw, load_recording, plan, save_recording
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler

PROGRAMS = (euler(linear(4)),)
BUCKETS = [{"frames": 12}, {"frames": 20}]


def double(region: Region) -> Region:
    other = toy.region()
    return Region(region.spec, other.module.double())


@pytest.fixture(scope="module")
def recording():
    region = toy.region()
    exact = eager_runtime(double(region), PROGRAMS, "toy", torch.float64)
    return parity.record(eager_runtime(region, PROGRAMS, "toy"), exact, BUCKETS, max_batch=8)


class Faulty(toy.Toy):
    """The toy with one fault. `calls` counts evaluations."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.calls = fault, 0

    def forward(self, x, time, cond, ids, lengths, drop):
        self.calls += 1
        velocity, summary = super().forward(*self.fault(self.calls, x, time, cond, ids, lengths, drop)[:6])
        return self.fault(self.calls, x, time, cond, ids, lengths, drop)[6](velocity), summary


def same(velocity):
    return velocity


FAULTS = {
    "scaled by 1.0001": lambda n, *a: (*a, lambda v: v * 1.0001),
    "ignores its lengths": lambda n, x, t, c, i, ln, d: (x, t, c, i, torch.full_like(ln, x.shape[1]), d, same),
    "ignores the text": lambda n, x, t, c, i, ln, d: (x, t, c, torch.zeros_like(i), ln, d, same),
    "ignores the time": lambda n, x, t, c, i, ln, d: (x, torch.zeros_like(t), c, i, ln, d, same),
    "swaps the branches": lambda n, x, t, c, i, ln, d: (x, t, c, i, ln, ~d, same),
    "one row of the batch": lambda n, *a: (*a, lambda v: torch.cat([v[:1], v[:1].expand_as(v[1:])])),
    "not a number": lambda n, *a: (*a, lambda v: v * float("nan")),
    "constant": lambda n, *a: (*a, torch.ones_like),
    "zero": lambda n, *a: (*a, torch.zeros_like),
    "one wrong element": lambda n, *a: (*a, lambda v: v.index_fill(1, torch.tensor([3]), 0.0)),
}


def run_with(fault, recording):
    module = Faulty(fault).eval()
    module.load_state_dict(toy.region().module.state_dict())
    runtime = eager_runtime(Region(toy.SPEC, module), PROGRAMS, "toy")
    return parity.check(runtime, recording)


def test_the_model_itself_passes_every_row(recording):
    findings = run_with(lambda n, *a: (*a, same), recording)

    assert all(finding.passed for finding in findings)
    assert {finding.check for finding in findings} == {"evaluation", "trajectory", "padding", "sensitivity"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails(fault, recording):
    findings = run_with(FAULTS[fault], recording)

    assert not all(finding.passed for finding in findings)


def test_the_first_bad_step_of_a_trajectory_is_named(recording):
    case = next(c for c in recording.cases if c.check == "trajectory" and c.guided)
    only = Recording((case,), recording.tensors)

    findings = run_with(lambda n, *a: (*a, (lambda v: v + 1) if n == 3 else same), only)

    assert findings[0].first_bad_step == 2
    assert len(findings[0].errors_by_step) == 4


def test_an_output_that_ignores_its_noise_fails_as_insensitive(recording):
    findings = run_with(lambda n, x, t, c, i, ln, d: (torch.zeros_like(x), t, c, i, ln, d, same), recording)

    failed = {finding.note for finding in findings if finding.check == "sensitivity" and not finding.passed}
    assert any("another x" in note for note in failed)


def test_requests_carry_garbage_where_nothing_may_be_read(recording):
    case = next(c for c in recording.cases if c.check == "padding")

    request = draw(toy.SPEC, case, case.seed)

    assert len(set(case.lengths)) > 1
    assert request["x"].isnan().any()
    assert request["cond"].isnan().any()


def test_a_recording_survives_the_disk(recording, tmp_path):
    save_recording(recording, tmp_path)

    loaded = load_recording(tmp_path)

    assert loaded.cases == recording.cases
    assert all(torch.equal(loaded.tensors[k], v) for k, v in recording.tensors.items())


def test_a_missing_or_broken_recording_is_corrupt(recording, tmp_path):
    with pytest.raises(ArtifactCorrupt, match="no parity recording"):
        load_recording(tmp_path)
    save_recording(recording, tmp_path)
    (tmp_path / RECORDING_TENSORS).write_bytes(b"not safetensors")
    with pytest.raises(ArtifactCorrupt, match="unreadable"):
        load_recording(tmp_path)


def test_a_reference_that_disagrees_with_itself_is_refused():
    region = toy.region()
    other = Region(toy.SPEC, toy.region(seed=3).module.double())

    with pytest.raises(StageFailed, match="float32 and float64 differ"):
        parity.record(
            eager_runtime(region, PROGRAMS, "toy"), eager_runtime(other, PROGRAMS, "toy", torch.float64), BUCKETS, 8
        )


def test_one_row_batches_are_planned_where_no_more_is_promised():
    lengths = [c.lengths for c in plan(toy.SPEC, {p.name: p for p in PROGRAMS}, BUCKETS, max_batch=1)]

    assert {len(n) for n in lengths} == {1}


def test_a_report_without_rows_is_no_proof():
    report = ParityReport(
        model="toy", config="", checkpoint="", target="cpu", weights_mode="packed", versions={}, findings=()
    )

    assert not report
