"""What the comparison with peers prints and writes, on a tiny model; and how it words its targets."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from voicehub_aot import adapters

BENCH = Path(__file__).parents[2] / "bench"
OURS = ["ours:aoti", "ours:onnxruntime", "auto"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


@pytest.fixture
def run(bench, monkeypatch):
    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--config", "tiny", *map(str, arguments)])
        return bench("bench_peers").main()

    return main


def test_every_candidate_has_a_row_with_its_share_and_every_length_a_verdict(bench, run, monkeypatch, tmp_path, capsys):
    configs, smaller = adapters.load("supertonic").CONFIGS, {"n_blocks": 1, "dilations_0": (1,), "n_last_convnext": 1}
    monkeypatch.setitem(configs, "tiny", dataclasses.replace(configs["tiny"], **smaller))  # compiles in half the time
    subject = bench("subject")
    both, place = ("aoti", "onnxruntime"), tmp_path / "both.aot"
    artifact, _ = subject.build_artifact(subject.resolve("supertonic", "tiny"), (9, 17), engines=both, output=place)
    rows = tmp_path / "rows.jsonl"
    timed = ["--rounds", 2, "--pause-ms", 0, "--threads", 1, "--lengths", "9,17", "--json", rows]

    code = run("--candidates", ",".join(["eager", *OURS]), *timed, "--artifact", artifact, "--auto-artifact", artifact)

    shown = capsys.readouterr().out
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert code == 0
    assert [(row["frames"], row["candidate"]) for row in written] == [(n, c) for n in (9, 17) for c in ["eager", *OURS]]
    assert [row["engine"] for row in written] == [None, "aoti", "onnxruntime", "aoti"] * 2
    for row in written:
        share = row["step_flops"] / (row["median_ms"] / 1e3) / (1e9 * row["matrix_gflops"])
        assert row["roofline_share"] == pytest.approx(share)
        assert row["versions"].keys() >= {"torch", "onnxruntime"}
    verdicts = [line for line in shown.splitlines() if line.startswith(("PASS", "SHORT"))]
    assert [line.split(" frames")[0].split()[-1] for line in verdicts] == ["9", "17"]
    assert all("of eager, the fastest peer (target 1.00x" in line for line in verdicts)
    assert all("not judged: 1.10x of onnxruntime" in line for line in verdicts)
    assert "auto: this artifact holds no choice by measurement" in shown
    assert "onnxruntime " in shown and "bench_peers.py --config tiny" in shown  # versions and the command


@pytest.fixture
def measured(bench):
    """One length with the given seconds by candidate, at a packed-matrix rate of 100 FLOP/s and 100 FLOP a step."""
    measuring, times = bench("measuring"), bench("timing").Times

    def make(model, frames, failed=(), **seconds):
        line = SimpleNamespace(subject=SimpleNamespace(model=SimpleNamespace(name=model)), kind="upstream's own module")
        return measuring.Measured(
            line=line,
            frames=frames,
            pause_s=0.0,
            times={name: times((s,)) for name, s in seconds.items()},
            errors={},
            made_s={},
            failed=dict.fromkeys(failed, "a reason"),
            engines={name: "aoti" for name in seconds},
            flops=100,
            rate=100.0,
        )

    return make


def test_a_shortfall_is_printed_per_target(bench, measured):
    m = measured("f5tts", 128, eager=1.9, openvino=1.2, auto=1.25)

    met, text = bench("bench_peers").verdict(m)

    assert not met
    assert text == (
        "SHORT 128 frames, auto (aoti): 0.96x of openvino, the fastest peer (target 1.00x, short by 4.0 %); "
        "1.52x of eager, upstream's own module (target 1.50x); "
        "80.0 % of the roofline (target 87.0 %, short by 8.0 %)"
    )


@pytest.mark.parametrize(("frames", "targets"), [(64, 2), (128, 3), (256, 3)])
def test_the_roofline_counts_from_128_frames(bench, measured, frames, targets):
    m = measured("supertonic", frames, eager=2.0, onnxruntime=1.2, auto=1.0)

    met, text = bench("bench_peers").verdict(m)

    assert met and text.startswith("PASS")
    assert text.count("target") == targets


def test_a_target_that_nothing_was_measured_for_is_not_met(bench, measured):
    verdict = bench("bench_peers").verdict

    without_auto = verdict(measured("supertonic", 32, onnxruntime=1.2, **{"ours:aoti": 1.0}))
    without_peer = verdict(measured("supertonic", 32, eager=2.0, auto=1.0))
    with_failure = verdict(measured("supertonic", 32, failed=["openvino"], onnxruntime=1.2, auto=1.0))

    assert not without_auto[0] and "ours:aoti in place of auto" in without_auto[1]
    assert not without_peer[0] and "not judged: 1.10x of onnxruntime" in without_peer[1]
    assert not with_failure[0] and "openvino failed" in with_failure[1]


def test_a_peer_that_is_not_installed_is_left_out_aloud(bench, monkeypatch):
    monkeypatch.setattr(bench("importlib.util"), "find_spec", lambda name: None if name == "openvino" else object())

    reasons = bench("bench_peers").left_out(["eager", "openvino"])

    assert reasons == {"openvino": "openvino not installed: pip install 'voicehub-aot[openvino]'"}
