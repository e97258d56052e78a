"""The gate on trained speech: the demo voice of examples/demo_voice, heard by PocketSphinx."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran
from speech_faults import FAULTS, remembered
from torch import Tensor, nn

from voicehub_aot.artifacts.quality import QualityReport
from voicehub_aot.compiler import models
from voicehub_aot.compiler.build import build
from voicehub_aot.compiler.options import Options
from voicehub_aot.proof.quality.evaluate import evaluate
from voicehub_aot.proof.quality.scorers import OpenScorer, open_scorers
from voicehub_aot.proof.quality.side import Side, open_side
from voicehub_aot.proof.quality.utterances import Entry, UtteranceSet, load_entry, read_utterances
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.target import default_target, parse_target

FOLDER = Path(__file__).parents[3] / "examples" / "demo_voice"
GUIDANCE = 1.0  # that the voice is spoken with
SEEDS = (0, 1, 2)
FEW, MANY = 3, 20  # sentences of the default and of the slow run
SHORT_RUN = ("level halved", "hiss", "two words swapped", "a guidance branch lost", "a frozen step", "two steps")


def resolved(checkpoint: Path) -> models.Model:
    return models.resolve("f5tts", str(FOLDER / "config.json"), str(checkpoint))


def built(output: Path, steps: tuple[int, ...], engines: tuple[str, ...]) -> Path:
    """An artifact of the voice. Its parity is proven elsewhere."""
    model = resolved(FOLDER / "model.safetensors")
    options = Options(
        buckets=Buckets(axes={"frames": (128, 256), "text": (256,)}),
        programs=tuple(models.program(model, n) for n in steps),
        target=parse_target(default_target()),
        engines=engines,
        parity=False,
    )
    build(model, options, output)
    return output


@pytest.fixture(scope="module")
def utterances() -> UtteranceSet:
    return read_utterances(FOLDER / "cases.toml")


@pytest.fixture(scope="module")
def entry(utterances: UtteranceSet) -> Entry:
    return load_entry(utterances.entry, FOLDER)


@pytest.fixture(scope="module")
def ears(utterances: UtteranceSet) -> tuple[OpenScorer, ...]:
    return open_scorers(["sphinx"], utterances)[0]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, engine_cache: Path) -> Path:
    return built(tmp_path_factory.mktemp("voice") / "voice.aot", (16, 8, 2), ("aoti",))


@pytest.fixture(scope="module")
def voice(artifact: Path, entry: Entry) -> Side:
    """16 steps, spoken once."""
    return remembered(open_side(artifact, entry, SEEDS, most_steps=True, guidance=GUIDANCE, threads=1))


def shown(report: QualityReport) -> str:
    values = {m.name: (round(m.value, 4), round(m.bound, 4)) for m in report.measures}
    return f"{report.candidate.program} {report.verdict}: {values} {report.reasons}"


def test_half_of_the_steps_are_accepted_on_trained_speech(
    artifact: Path, command: Callable[..., Ran], tmp_path: Path
) -> None:
    page = tmp_path / "quality.html"
    ran = command(
        "evaluate", artifact, "--cases", FOLDER / "cases.toml", "--program", 8, "--guidance", GUIDANCE,
        "--reference-guidance", GUIDANCE, "--limit", FEW, "--scorer", "sphinx", "--threads", 1,
        "--html", page, "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.document["verdict"] == "accepted"
    assert ran.document["quality_validated"] is True
    assert ran.document["candidate"]["evaluations"] * 2 == ran.document["reference"]["evaluations"]
    assert page.read_text().count("<audio ") == 2 * FEW


@pytest.mark.parametrize("fault", SHORT_RUN)
def test_a_planted_fault_is_rejected_on_trained_speech(
    voice: Side, utterances: UtteranceSet, ears: tuple[OpenScorer, ...], fault: str
) -> None:
    plant, _ = FAULTS[fault]
    report = evaluate(plant(voice), voice, utterances.utterances[:FEW], ears).report
    assert report.verdict == "rejected", shown(report)


# --- the whole reach


class Quantised(nn.Module):
    """A linear layer whose weights (one scale an output channel) and inputs (one a token) are rounded to few bits."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.most = 2 ** (bits - 1) - 1
        self.weight, self.bias = self.rounded(linear.weight), linear.bias

    def rounded(self, values: Tensor) -> Tensor:
        scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-9) / self.most
        return (values / scale).round().clamp(-self.most, self.most) * scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.rounded(x), self.weight, self.bias)


def quantised(side: Side, bits: int) -> Side:
    """The side with the model's own module in its engine's place, every linear layer of it quantised."""
    region = resolved(FOLDER / "model.safetensors").region
    linears = [name for name, module in region.module.named_modules() if isinstance(module, nn.Linear)]
    assert linears
    for name in linears:
        region.module.set_submodule(name, Quantised(region.module.get_submodule(name), bits))
    return replace(side, runtime=eager_runtime(region, side.runtime.programs.values(), f"int{bits}"))


@pytest.fixture(scope="module")
def both_engines(tmp_path_factory: pytest.TempPathFactory, engine_cache: Path) -> Path:
    return built(tmp_path_factory.mktemp("voice") / "full.aot", (32, 16, 8, 2, 1), ("aoti", "onnxruntime"))


@pytest.fixture(scope="module")
def full(both_engines: Path, entry: Entry) -> Side:
    """32 steps, spoken once."""
    side = open_side(both_engines, entry, SEEDS, most_steps=True, guidance=GUIDANCE, engine="aoti", threads=1)
    return remembered(side)


def judged(candidate: Side, full: Side, utterances: UtteranceSet, ears: tuple[OpenScorer, ...]) -> QualityReport:
    """The report; its figures are printed, for docs/quality.md."""
    report = evaluate(candidate, full, utterances.utterances[:MANY], ears).report
    print(shown(report))
    return report


@pytest.mark.slow
@pytest.mark.parametrize("steps", [16, 8])
def test_the_gate_accepts_fewer_steps(full: Side, utterances: UtteranceSet, ears: Any, steps: int) -> None:
    report = judged(replace(full, program=full.runtime.program(steps)), full, utterances, ears)
    assert report.verdict == "accepted", report.reasons
    assert report.quality_validated


@pytest.mark.slow
def test_the_gate_accepts_other_seeds(full: Side, utterances: UtteranceSet, ears: Any) -> None:
    report = judged(replace(full, seeds=(10, 11, 12)), full, utterances, ears)
    assert report.verdict == "accepted", report.reasons


@pytest.mark.slow
def test_the_gate_accepts_another_engine(
    both_engines: Path, full: Side, entry: Entry, utterances: UtteranceSet, ears: Any
) -> None:
    other = open_side(both_engines, entry, SEEDS, most_steps=True, guidance=GUIDANCE, engine="onnxruntime", threads=1)
    report = judged(other, full, utterances, ears)
    assert report.verdict == "accepted", report.reasons


@pytest.mark.slow
def test_the_gate_rejects_int4_linears(full: Side, utterances: UtteranceSet, ears: Any) -> None:
    assert judged(quantised(full, 4), full, utterances, ears).verdict == "rejected"


@pytest.mark.slow
def test_int8_linears_stay_within_every_bound(full: Side, utterances: UtteranceSet, ears: Any) -> None:
    """The module in eager mode is slow, so that it saves nothing; speech survives."""
    report = judged(quantised(full, 8), full, utterances, ears)
    assert all(measure.passed for measure in report.measures), report.reasons


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_gate_rejects_every_planted_fault(full: Side, utterances: UtteranceSet, ears: Any, fault: str) -> None:
    report = judged(FAULTS[fault][0](full), full, utterances, ears)
    assert report.verdict == "rejected", shown(report)
