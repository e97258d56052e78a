"""The parity gate errs in neither direction: planted faults are refused, and correct engines are not."""

import json
import subprocess
import sys
from pathlib import Path

import planted
import pytest
import torch
import toy

from voicehub_aot.proof import noise, parity
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler, midpoint

PROGRAMS = (euler(linear(3)), midpoint(linear(2)))
BENCH = Path(__file__).parents[2] / "bench" / "bench_gate.py"


def recorded(seed):
    region, exact = toy.region(seed), Region(toy.SPEC, toy.region(seed).module.double())
    return parity.record(
        eager_runtime(region, PROGRAMS, "toy"),
        eager_runtime(exact, PROGRAMS, "toy", torch.float64),
        [{"frames": 16}],
        max_batch=8,
    )


@pytest.fixture(scope="module")
def recording():
    return recorded(0)


@pytest.mark.parametrize("fault", planted.FAULTS)
def test_a_planted_fault_is_refused(fault, recording):
    wrong = eager_runtime(Region(toy.SPEC, planted.FAULTS[fault](0)), PROGRAMS, "wrong")

    findings = parity.check(wrong, recording)

    assert not all(finding.passed for finding in findings if finding.check != "sensitivity")


def test_the_module_that_faults_are_planted_in_is_the_toy(recording):
    same = planted.of_class(planted.Opened)(0)

    findings = parity.check(eager_runtime(Region(toy.SPEC, same), PROGRAMS, "toy"), recording)

    assert all(finding.passed for finding in findings)


@pytest.mark.parametrize("seed", range(10))
def test_runs_that_differ_in_rounding_alone_pass(seed):
    recording = recorded(seed)
    unseen = noise.moved(eager_runtime(toy.region(seed), PROGRAMS, "toy"), seed=1000 + seed)

    findings = parity.check(unseen, recording)

    assert [finding.verdict for finding in findings if not finding.passed] == []


def test_a_moved_run_differs_by_a_unit_in_the_last_place_at_most():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[:2] = torch.tensor([0.0, float("nan")])

    moved = noise.neighbour(values, torch.Generator().manual_seed(1))

    assert moved[0] == 0
    assert moved[1].isnan()
    up, down = (torch.nextafter(values, torch.full_like(values, end)) for end in (torch.inf, -torch.inf))
    is_up, is_down, same = (moved[2:] == other[2:] for other in (up, down, values))
    assert (is_up | is_down | same).all()
    assert min(is_up.sum(), is_down.sum()) > 200


def test_a_request_beside_itself_gives_the_first_of_each_row():
    request = {"x": torch.tensor([[1.0], [2.0]]), "lengths": [3, 4]}

    def call(twice):
        assert twice["lengths"] == [3, 4, 3, 4]
        return torch.cat([twice["x"], 10 * twice["x"]])  # two branches

    assert noise.beside_itself(request, 2, call).flatten().tolist() == [1.0, 2.0, 10.0, 20.0]


def test_the_spread_of_a_case_is_the_worst_of_its_runs(recording):
    for case in recording.cases:
        assert case.spread.runs == parity.RUNS
        assert 0 < case.spread.rel_l2 < 1e-4
        assert case.budget_l2 == parity.MOST_L2 * case.spread.rel_l2 + parity.FLOOR_L2


def test_a_case_that_takes_long_is_run_less_often(monkeypatch):
    monkeypatch.setattr(parity, "MOST_SECONDS", 0.0)

    assert {case.spread.runs for case in recorded(0).cases} == {parity.LEAST_RUNS}


@pytest.mark.slow
def test_the_gate_on_other_code_paths_and_many_seeds():
    done = subprocess.run(
        [sys.executable, BENCH, "--seeds", "200"], capture_output=True, text=True, check=False, timeout=5400
    )

    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 12
    assert [r["refused"] for r in results if "refused" in r] == [[]] * 6
    assert [r["let_through"] for r in results if "let_through" in r] == [[]] * 6
