"""Runs a built model; load.py opens one.

A request is: check and lay out (request.py), prepare once, then the program's loop (loop.py) over the step engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from voicehub_aot.artifacts.manifest import Manifest
from voicehub_aot.errors import InputMismatch, OptionUnsupported, ProgramNotBuilt, UsageError
from voicehub_aot.runtime import streams
from voicehub_aot.runtime.attach import Attached
from voicehub_aot.runtime.denoiser import Denoiser
from voicehub_aot.runtime.evaluator import Evaluator
from voicehub_aot.runtime.forks import Turns
from voicehub_aot.runtime.heap import HeapTrim
from voicehub_aot.runtime.loop import Pack, Velocity, guided, steps
from voicehub_aot.runtime.moments import Moments
from voicehub_aot.runtime.request import Request, RequestReader
from voicehub_aot.spec.bucket import Buckets, Fit, Ladder, Overflow
from voicehub_aot.spec.guidance import EQUATIONS
from voicehub_aot.spec.program import Evaluate, Program
from voicehub_aot.spec.region import BATCH, RegionSpec
from voicehub_aot.spec.speaker import SpeakerScaling

log = logging.getLogger(__name__)

Scale = float | Mapping[str, float] | None  # of guidance: for all branches, by branch, or the model's own


class Runtime:
    """Samples with a built model. Safe to use from several threads: a call shares no state with another.

    At most `concurrency` requests run at once; further ones wait their turn. Every request computes on all of the
    runtime's threads, so more concurrency gives fairness, not throughput.
    """

    def __init__(
        self,
        spec: RegionSpec,
        evaluator: Evaluator,
        programs: Mapping[str, Program],
        buckets: Buckets,
        *,
        shapes: Literal["dynamic", "static"] = "dynamic",
        ladder: Ladder | None = None,
        heap: HeapTrim | None = None,
        overflow: Overflow = "error",
        concurrency: int = 1,
        name: str = "model",
        manifest: Manifest | None = None,
        threads: int | None = None,
        reopen: Callable[[], Runtime] | None = None,
    ) -> None:
        if overflow not in get_args(Overflow):
            raise OptionUnsupported(f"{name}: overflow={overflow!r} is not known; choose one of {get_args(Overflow)}")
        if overflow == "run" and shapes == "static":
            raise OptionUnsupported(f"{name}: overflow='run' needs a dynamic engine; this artifact has static buckets")
        self.spec, self.evaluator, self.programs = spec, evaluator, dict(programs)
        self.buckets, self.shapes, self.overflow, self.name = buckets, shapes, overflow, name
        self.manifest, self.ladder = manifest, ladder or Ladder()
        self.overflowed = 0  # requests over the largest promised bucket that ran all the same
        self._fit = Fit(spec.dims, buckets, name, self.ladder, shapes == "static", overflow)
        self._reader = RequestReader(spec, self._fit)
        self._moments = Moments(spec, evaluator, self.programs, name)
        self._heap = heap
        self._reopen = reopen
        self._turns = Turns(concurrency, threads, name)
        self._count = threading.Lock()

    def __copy__(self) -> Runtime:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """Itself: no request leaves a trace in it, and its engines cannot be had twice."""
        return self

    def __reduce__(self) -> tuple[Callable[[], Runtime], tuple[()]]:
        """A pickle holds the artifact's path and the options; unpickling loads it again."""
        if self._reopen is None:
            raise UsageError(
                f"{self.name}: cannot be pickled, for it was not loaded from an artifact; pickle its parts"
            )
        return self._reopen, ()

    def sample(
        self,
        *,
        noise: torch.Tensor | None = None,
        seed: int | Sequence[int] | None = None,
        lengths: Sequence[int] | torch.Tensor | None = None,
        step_noise: torch.Tensor | None = None,
        program: str | int | None = None,
        guidance: Scale = None,
        **conditioning: Any,
    ) -> torch.Tensor:
        """One whole request -> the final state, shaped like the noise, zero beyond each row's extent.

        noise: the region's state, or seed with lengths: row b is drawn from its own generator, seeded seed + b (or
        seed[b]), so the same seed gives the same noise whatever else is in the batch; the rounding of a result may
        depend on the rows beside it (docs/parity.md). lengths: valid size of each row; default all of the noise.
        step_noise: [K, ...] for a solver that draws K times on its way; with a seed it comes from the same generators,
        after the noise. program: a built one by name or by step count; default the first. guidance: the scale, or
        scales by branch; default the model's, 0 = none (that branch is not run).
        conditioning: by name, see `voicehub-aot inspect`. Raises InputMismatch, NoBucketFits or ProgramNotBuilt.
        """
        self._turns.check()
        if noise is None:
            noise, step_noise = self.noise(seed, lengths, program, **conditioning)
        elif seed is not None:
            raise InputMismatch(f"{self.name}: give either noise or a seed with lengths")
        arguments = {**conditioning, **self.lengths_argument(lengths)}
        with self._turns:
            *_, last = self.trajectory(
                noise=noise, step_noise=step_noise, program=program, guidance=guidance, **arguments
            )
            self._tidy()
        return last

    def lengths_argument(self, lengths: Sequence[int] | torch.Tensor | None) -> dict[str, Any]:
        """`sample`'s lengths as `trajectory` takes them: under the region's own name. Raises InputMismatch."""
        return self._reader.lengths_argument(lengths)

    def noise(
        self,
        seed: int | Sequence[int] | None,
        lengths: Sequence[int] | torch.Tensor | None = None,
        program: str | int | None = None,
        **conditioning: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `sample` draws from this seed: noise like the state [B, ...], and the program's step noise, if any.

        Programs that draw more on their way start from the same noise. Raises InputMismatch or ProgramNotBuilt.
        """
        draws = 1 + len(self.program(program).noises)
        noise, *later = self._reader.draw(seed, lengths, conditioning, draws)
        return noise, torch.stack(later) if later else None

    def trajectory(
        self,
        *,
        noise: torch.Tensor,
        step_noise: torch.Tensor | None = None,
        program: str | int | None = None,
        guidance: Scale = None,
        start: int = 0,
        stop: int | None = None,
        **request: Any,
    ) -> Iterator[torch.Tensor]:
        """The state after each step, cropped like `sample`'s result. request: conditioning, lengths, extents.

        start, stop: run these steps of the program only, `noise` being the state before them: for a loop that changes
        the request on its way. 0 <= start < stop <= the program's steps. Takes no turn: whoever iterates it decides
        when it runs. Everything is checked at the call, before the first step.
        """
        self._turns.check()
        chosen = self.program(program)
        start, stop = self._span(chosen, start, stop)
        scales = self._scales(guidance)
        laid_out = self._read(noise, request, self._running(chosen, scales))
        noise = laid_out.state.to(self.evaluator.dtype)
        fresh = self._step_noise(chosen, step_noise, laid_out, noise)
        velocity = self._velocity(laid_out, chosen, scales, noise)
        return self._cropped(laid_out, steps(chosen, velocity, noise, fresh, start, stop))

    def blocks(
        self,
        *,
        noise: torch.Tensor,
        sizes: Sequence[int] | None = None,
        request: Callable[[torch.Tensor, int], Mapping[str, Any]] | None = None,
        finished: torch.Tensor | None = None,
        speaker: SpeakerScaling | None = None,
        program: str | int | None = None,
        **conditioning: Any,
    ) -> Iterator[torch.Tensor]:
        """A long latent block by block, each after what is finished: the final state of every block, [B, size, ...].

        noise: of the whole, along the main dimension; sizes: of the blocks, default one block. request: what of a
        block's request depends on the latent so far; it is given that latent, with zeros where it is not finished, and
        the block's position (Echo-TTS re-encodes it: `latent_state`, `latent_mask`, `start_pos`). finished: what comes
        before the first block. speaker: scales the speaker's keys; a step that crosses its time ends it, within each
        block anew. conditioning: as for `trajectory`, the same for all blocks. A block is computed when it is asked
        for; stopping early leaves nothing behind. Raises InputMismatch at the call, and what `trajectory` raises.
        """
        return streams.blocks(self, noise, sizes, request, finished, speaker, program, conditioning)

    def frames(
        self,
        request: Callable[[torch.Tensor | None], Mapping[str, Any] | None],
        *,
        seed: int,
        temperature: float = 1.0,
        program: str | int | None = None,
        guidance: Scale = None,
    ) -> Iterator[torch.Tensor]:
        """A request after another, as a language model asks for them (VoxCPM's patches, VibeVoice's frames).

        request: is given the frame before, [B, ...], None at first, and returns the conditioning of the next one, or
        None at the end. seed: row b of frame n has noise of its own. temperature: factor of the noise. A frame is
        computed when it is asked for; two iterators share nothing. Raises what `sample` raises.
        """
        frame: torch.Tensor | None = None
        for of_frame in streams.frame_seeds(seed):
            given = request(frame)
            if given is None:
                return
            noise, step_noise = self.noise(of_frame, None, program, **given)
            frame = self.sample(
                noise=noise * temperature, step_noise=step_noise, program=program, guidance=guidance, **given
            )
            yield frame

    def _cropped(self, request: Request, states: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        for state in states:
            yield request.crop(state)
        self._tidy()

    def _tidy(self) -> None:
        if self._heap is not None:
            self._heap.after_request()

    def _span(self, program: Program, start: Any, stop: Any) -> tuple[int, int]:
        """The steps to run, checked."""
        last = program.steps if stop is None else stop
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (start, last))
        if not whole or not 0 <= start < last <= program.steps:
            raise InputMismatch(
                f"{self.name}: start={start!r}, stop={stop!r}, wanted whole numbers with "
                f"0 <= start < stop <= {program.steps}, the steps of {program.name!r}"
            )
        return start, last

    def _running(self, program: Program, scales: Mapping[str, float]) -> set[int]:
        """Positions of the guidance branches that some step of the program evaluates."""
        if self.spec.guidance is None:
            return {0}
        wanted = {i.against for i in program.instructions if isinstance(i, Evaluate)}
        return {branch for against in wanted for branch in self.spec.guidance.taking_part(against, scales)}

    def _step_noise(
        self, program: Program, noise: torch.Tensor | None, request: Request, like: torch.Tensor
    ) -> list[torch.Tensor]:
        """The program's further noises, checked and laid out as the state is."""
        wanted, got = len(program.noises), 0 if noise is None else len(noise)
        if wanted != got:
            raise InputMismatch(f"{self.name}: step_noise holds {got} draws, {program.name!r} needs {wanted}")
        drawn = () if noise is None else noise.unbind(0)
        return [self._reader.read_state(one, request).to(like.dtype) for one in drawn]

    def evaluate(
        self,
        state: torch.Tensor,
        time: float | torch.Tensor,
        *,
        extra_times: Mapping[str, float | torch.Tensor] | None = None,
        packed: bool = False,
        flags: Mapping[str, bool] | None = None,
        guidance: Scale = None,
        **request: Any,
    ) -> torch.Tensor:
        """One denoiser evaluation -> velocity [B, ...] of the conditional branch.

        time: one of a built program's; per row if [B]. extra_times: of further time inputs, by name, alike. packed:
        every guidance branch, packed [branches * B, ...]. guidance: combine the branches with these scales instead.
        flags: set branch flags by hand.
        """
        self._turns.check()
        given = {self.spec.time.name: time, **(extra_times or {})}
        with self._turns:
            branches = self._branches if packed or guidance is not None else 1
            by_hand = [] if packed else [n for n, value in (flags or {}).items() if value]
            laid_out = self._read(state, request, self._read_by(branches, by_hand))
            clocks = self._moments.clocks(given, laid_out.batch)
            inputs = laid_out.packed(range(branches))
            for name, value in (flags or {}).items() if not packed else ():
                inputs[name] = torch.full_like(inputs[name], value)
            whole = laid_out.state.repeat(branches, *(1,) * (laid_out.state.dim() - 1))
            rows = clocks * (branches if len(clocks) > 1 else 1)
            velocity = self._moments.velocity(inputs, whole, rows, laid_out.sizes)
            if guidance is not None and self.spec.guidance is not None:
                velocity = EQUATIONS[self.spec.guidance.equation](velocity, tuple(self._scales(guidance).values()))
            blocks = torch.split(velocity, laid_out.batch)
            result = torch.cat([laid_out.crop(block) for block in blocks])
            self._tidy()
            return result

    def stepper(self, state: torch.Tensor, program: str, evaluation: int, **request: Any) -> Callable[[], torch.Tensor]:
        """One evaluation with default guidance, prepared once and callable many times: what a benchmark times."""
        self._turns.check()
        laid_out = self._read(state, request, range(self._branches))
        noise = laid_out.state.to(self.evaluator.dtype)
        velocity = self._velocity(laid_out, self.program(program), self._scales(None), noise)
        instructions = self.program(program).instructions
        against = next(i.against for i in instructions if isinstance(i, Evaluate) and i.evaluation == evaluation)
        return lambda: velocity(evaluation, noise, against)

    def engine_at(self, **sizes: int) -> str:
        """Name of the engine that evaluates a request of these sizes, by dimension."""
        return self.evaluator.engine_at({**sizes, **self._fit.sizes({BATCH: 1, **sizes})})

    def denoiser(self) -> Denoiser:
        """An nn.Module with upstream's call signature, to stand in upstream's own loop."""
        return Denoiser(self)

    def attach(self, owner: Any, place: str) -> Attached:
        """Puts the denoiser into upstream's object, at the attribute that holds its network, e.g. "transformer".

        `undo` of what is returned, or the end of a `with` block, puts upstream's network back. Times and shapes are
        checked at every call: ProgramNotBuilt and NoBucketFits say what to rebuild. Raises InputMismatch if the place
        does not hold this model's network.
        """
        return Attached(owner, place, self.denoiser())

    def _read(self, state: torch.Tensor, request: Mapping[str, Any], branches: Collection[int]) -> Request:
        """The request laid out. Sizes over the largest promised bucket, where they may run, are counted."""
        laid_out = self._reader.read(state, request, branches)
        for axis, size in self._fit.beyond(laid_out.given).items():
            with self._count:
                self.overflowed += 1
            largest = self.buckets.largest(axis)
            log.info("%s: %s=%d runs beyond the largest promised bucket %d", self.name, axis, size, largest)
        return laid_out

    @property
    def _branches(self) -> int:
        return len(self.spec.guidance.branches) if self.spec.guidance else 1

    def _velocity(
        self, request: Request, program: Program, scales: Mapping[str, float], like: torch.Tensor
    ) -> Velocity:
        """Prepares the branches that some step of the program evaluates, once."""
        guidance = self.spec.guidance
        if guidance is None:
            single = self.evaluator.prepare(request.packed([0]), program, request.sizes)
            return lambda evaluation, state, _: single.velocity(evaluation, state)
        wanted = {i.against for i in program.instructions if isinstance(i, Evaluate)}
        parts = {against: guidance.taking_part(against, scales) for against in wanted}
        every = sorted({branch for part in parts.values() for branch in part})
        prepared = self.evaluator.prepare(request.packed(every), program, request.sizes)
        by_part = {
            part: prepared
            if list(part) == every
            else prepared.blocks([every.index(branch) for branch in part], request.batch)
            for part in parts.values()
        }
        values = [scales.get(branch.name, 0.0) for branch in guidance.branches]
        packs = {a: Pack(by_part[part].velocity, tuple(values[b] for b in part[1:])) for a, part in parts.items()}
        return guided(packs, guidance.equation, like)

    def _read_by(self, branches: int, by_hand: Sequence[str]) -> set[int]:
        """Positions of the guidance branches whose inputs an evaluation reads: the first ones, or those set by hand."""
        if self.spec.guidance is None:
            return {0}
        others = enumerate(self.spec.guidance.branches)
        return {*range(branches), *(n for n, b in others if any(b.flags.get(flag) for flag in by_hand))}

    def program(self, wanted: str | int | None = None) -> Program:
        """A built program by name or by step count; default the first. Raises ProgramNotBuilt."""
        if wanted is None:
            return next(iter(self.programs.values()))
        matching = [p for p in self.programs.values() if wanted in (p.name, p.steps)]
        if len(matching) != 1:
            raise ProgramNotBuilt(
                f"{self.name}: program {wanted!r} is {'ambiguous' if matching else 'not built'}; "
                f"built are {list(self.programs)}; choose one, or rebuild with --steps"
            )
        return matching[0]

    def _scales(self, guidance: Scale) -> dict[str, float]:
        """The scale of each guidance branch."""
        if self.spec.guidance is None:
            if guidance is not None:
                raise InputMismatch(f"{self.name}: guidance={guidance!r}, but this model has no guidance; leave it out")
            return {}
        try:
            return self.spec.guidance.scales(guidance)
        except UsageError as error:
            raise InputMismatch(f"{self.name}: {error}") from error
