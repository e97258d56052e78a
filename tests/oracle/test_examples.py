"""The drop-in examples, with upstream's own objects at tiny size."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.test_f5tts import TINY, call_of, eager, loop_of, upstream_network, weights_of
from oracle.upstream import load

from voicehub_aot.adapters import f5tts

pytestmark = pytest.mark.oracle
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of the folder by name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_f5tts_samples_what_upstream_does(example: Any) -> None:
    f5, weights = load("f5_tts.model"), weights_of(TINY)
    theirs = upstream_network(f5, TINY, weights)
    loop, given = loop_of(f5, theirs, TINY.mel_dim), call_of(TINY, [11], masked=False)
    arguments = (given["cond"], given["text"], 37)
    options = {"steps": 7, "sway_sampling_coef": -1.0, "seed": 5}
    wanted, _ = loop.sample(*arguments, **options)

    mel = example("f5tts").sample(loop, eager(TINY, weights, f5tts.program(7)), *arguments, **options)

    torch.testing.assert_close(mel, wanted, atol=1e-4, rtol=0)
    assert loop.transformer is theirs
