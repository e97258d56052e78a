"""The sampling loop: a program interpreted over tensors. It cannot tell an engine from eager code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from voicehub_aot.kernels.combine import combine
from voicehub_aot.spec.guidance import EQUATIONS
from voicehub_aot.spec.program import STATE, Evaluate, Program

Against = tuple[str, ...] | None  # as in `Evaluate`
# (evaluation, state [B, ...], branches to guide against) -> velocity [B, ...]
Velocity = Callable[[int, torch.Tensor, Against], torch.Tensor]


def steps(
    program: Program,
    velocity: Velocity,
    noise: torch.Tensor,
    step_noise: Sequence[torch.Tensor] = (),
    start: int = 0,
    stop: int | None = None,
) -> Iterator[torch.Tensor]:
    """noise: [B, ...], or the state after `start` steps. step_noise: the program's `noises`, each like the noise.

    Yields the state after each step from `start` to before `stop`; the last one is the result. A program is resumed
    only where no step reads what an earlier one left behind, the state apart.
    """
    registers = {STATE: noise, **dict(zip(program.noises, step_noise, strict=True))}
    done = 0
    for instruction in program.instructions:
        if start <= done and (stop is None or done < stop):
            if isinstance(instruction, Evaluate):
                value = velocity(instruction.evaluation, registers[instruction.x], instruction.against)
            else:
                value = combine([(registers[name], factor) for name, factor in instruction.terms])
            registers[instruction.out] = value
            if instruction.out == STATE:
                yield value
        done += instruction.out == STATE


@dataclass(frozen=True)
class Pack:
    """Branches evaluated at once. velocity: (evaluation, [(1 + K) B, ...]) -> alike. scales: of the K others."""

    velocity: Callable[[int, torch.Tensor], torch.Tensor]
    scales: tuple[float, ...]


def guided(packs: Mapping[Against, Pack], equation: str, like: torch.Tensor) -> Velocity:
    """A velocity that evaluates the branches an instruction names at once and combines them.

    packs: by `Evaluate.against`. like: a state [B, ...]; its copies for all branches are allocated once, here.
    """
    most = max(1 + len(pack.scales) for pack in packs.values())
    copies = like.new_empty((most, *like.shape))
    combined = EQUATIONS[equation]

    def velocity(evaluation: int, state: torch.Tensor, against: Against) -> torch.Tensor:
        pack = packs[against]
        if not pack.scales:
            return pack.velocity(evaluation, state)
        packed = copies[: 1 + len(pack.scales)]
        packed.copy_(state)
        return combined(pack.velocity(evaluation, packed.flatten(0, 1)), pack.scales)

    return velocity
