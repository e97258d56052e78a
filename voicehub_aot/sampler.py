"""The sampling loop: a program interpreted over tensors. It cannot tell an engine from eager code."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from voicehub_aot.guidance import EQUATIONS, Guidance
from voicehub_aot.kernels.combine import combine
from voicehub_aot.program import STATE, Evaluate, Program

# (table row, state [B, ...], guided) -> velocity [B, ...]
Velocity = Callable[[int, torch.Tensor, bool], torch.Tensor]


def steps(program: Program, velocity: Velocity, noise: torch.Tensor) -> Iterator[torch.Tensor]:
    """noise: [B, ...]. Yields the state after each step; the last one is the result."""
    registers = {STATE: noise}
    for instruction in program.instructions:
        if isinstance(instruction, Evaluate):
            value = velocity(instruction.row, registers[instruction.x], instruction.guided)
        else:
            value = combine([(registers[name], coefficient) for name, coefficient in instruction.terms])
        registers[instruction.out] = value
        if instruction.out == STATE:
            yield value


def guided(
    packed_velocity: Callable[[int, torch.Tensor], torch.Tensor],
    conditional_velocity: Callable[[int, torch.Tensor], torch.Tensor],
    guidance: Guidance,
    scale: float,
    like: torch.Tensor,
) -> Velocity:
    """A velocity that packs every branch into one evaluation and combines them.

    packed_velocity takes [branches * B, ...], conditional_velocity [B, ...]. like: a state [B, ...]; its copy for all
    branches is allocated once, here.
    """
    branches = len(guidance.branches)
    packed = like.new_empty((branches, *like.shape))
    flat = packed.flatten(0, 1)
    equation = EQUATIONS[guidance.equation]

    def velocity(row: int, state: torch.Tensor, is_guided: bool) -> torch.Tensor:
        if not is_guided:
            return conditional_velocity(row, state)
        packed.copy_(state)
        return equation(packed_velocity(row, flat), scale)

    return velocity
