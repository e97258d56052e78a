"""One side of a comparison: a model, one of its programs, guidance, and the entry that turns text into speech."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from voicehub_aot.errors import UsageError
from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.utterances import Entry
from voicehub_aot.runtime.load import load
from voicehub_aot.runtime.runtime import Runtime, Scale
from voicehub_aot.spec.program import Evaluate, Program


@dataclass(frozen=True)
class Spoken:
    """One utterance from one noise.

    states: [1, ...] each, the noise first, then the state after each step; times: the schedule's time of each of them.
    seconds: what sampling took, the vocoder not counted.
    """

    seed: int
    times: tuple[float, ...]
    states: tuple[torch.Tensor, ...]
    clip: Clip
    seconds: float

    @property
    def rtf(self) -> float:
        """Real-time factor: seconds of sampling a second of speech."""
        return self.seconds / self.clip.seconds


@dataclass(frozen=True)
class Side:
    """seeds: of the noise. The n-th seeds of both sides belong together; equal ones give equal noise.

    name: of the artifact. engine: the one that was asked for; "" = the artifact's own choice.
    """

    runtime: Runtime
    program: Program
    entry: Entry
    seeds: tuple[int, ...]
    guidance: Scale = None
    name: str = ""
    engine: str = ""

    @property
    def scales(self) -> dict[str, float]:
        """The guidance scale of each branch beside the conditional one. Raises UsageError for an unknown branch."""
        guidance = self.runtime.spec.guidance
        return guidance.scales(self.guidance) if guidance else {}

    @property
    def evaluations(self) -> int:
        """Of the denoiser in one request, each guidance branch counted."""
        guidance, scales = self.runtime.spec.guidance, self.scales
        against = [i.against for i in self.program.instructions if isinstance(i, Evaluate)]
        return sum(len(guidance.taking_part(a, scales)) if guidance else 1 for a in against)

    def speak(self, text: str, seed: int) -> Spoken:
        """Raises UsageError for a broken entry, and what `Runtime.sample` raises for a request that does not fit."""
        request = self.entry.request(text)
        conditioning = {name: value for name, value in request.items() if name != "lengths"}
        lengths = request.get("lengths")
        noise, step_noise = self.runtime.noise(seed, lengths, self.program.name, **conditioning)
        began = time.perf_counter()
        states = tuple(self.trajectory(noise, step_noise, {**conditioning, **self.runtime.lengths_argument(lengths)}))
        seconds = time.perf_counter() - began
        samples = self.entry.vocode(states[-1][0], request)
        clip = Clip(text, samples, self.entry.sample_rate)
        return Spoken(seed, self.program.schedule, (noise, *states), clip, seconds)

    def trajectory(
        self, noise: torch.Tensor, step_noise: torch.Tensor | None, request: dict[str, Any]
    ) -> Iterator[torch.Tensor]:
        """The state after each step, [1, ...]."""
        return self.runtime.trajectory(
            noise=noise, step_noise=step_noise, program=self.program.name, guidance=self.guidance, **request
        )


def open_side(
    artifact: Path,
    entry: Entry,
    seeds: tuple[int, ...],
    *,
    program: str | int | None = None,
    most_steps: bool = False,
    guidance: Scale = None,
    engine: str | None = None,
    threads: int | None = None,
) -> Side:
    """A side whose model is an artifact. most_steps: the program is, by default, the one with the most steps.

    Raises LoadError, ProgramNotBuilt, EngineUnavailable, or UsageError for guidance that the model does not have.
    """
    runtime = load(artifact, engine=engine, threads=threads)
    longest = max(runtime.programs.values(), key=lambda built: built.steps)
    chosen = longest if most_steps and program is None else runtime.program(program)
    side = Side(runtime, chosen, entry, seeds, guidance, name=artifact.name, engine=engine or "")
    if guidance is not None and runtime.spec.guidance is None:
        raise UsageError(f"{artifact}: guidance={guidance!r}, but this model has no guidance; leave it out")
    side.scales  # noqa: B018  (raises for an unknown branch)
    return side
