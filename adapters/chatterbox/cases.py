"""Runs the recorded reference cases of Chatterbox."""

from __future__ import annotations

from torch import Tensor

from voicehub_aot.adapters import Sampler
from voicehub_aot.adapters._chatterbox_cosyvoice import cases
from voicehub_aot.adapters._chatterbox_cosyvoice.cases import case_program as case_program
from voicehub_aot.adapters.chatterbox import config_from, region_spec
from voicehub_aot.spec.golden import Case


def replay(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    return cases.replay(case, sampler, region_spec(config_from(case.config)))
