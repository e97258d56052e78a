"""`Runtime.attach`: the built denoiser in upstream's object, and out again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from voicehub_aot.adapters import f5tts
from voicehub_aot.compiler.models import program, resolve
from voicehub_aot.errors import InputMismatch, ProgramNotBuilt, UsageError
from voicehub_aot.runtime.denoiser import Denoiser
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.load import load
from voicehub_aot.runtime.runtime import Runtime


class Network(nn.Module):
    """Called as F5-TTS's DiT is."""

    def forward(
        self, x: Tensor, cond: Tensor, text: Tensor, time: Tensor, mask: Tensor | None = None, cfg_infer: bool = False
    ) -> Tensor:
        return torch.zeros_like(x)


class Loop(nn.Module):
    """Upstream's sampler: two Euler steps."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Network()
        self.vocoder = nn.Linear(2, 2)

    def sample(self, x: Tensor, cond: Tensor, text: Tensor) -> Tensor:
        for time in (0.0, 0.5):
            x = x + 0.5 * self.transformer(x=x, cond=cond, text=text, time=torch.tensor(time))
        return x


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    model = resolve("f5tts", "tiny", "synthetic")
    return eager_runtime(model.region, [program(model, 2, sway=None, grid="linear")], "f5tts")


def request() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    frames, bins = 9, f5tts.CONFIGS["tiny"].mel_dim
    return {
        "x": torch.randn(1, frames, bins, generator=generator),
        "cond": torch.randn(1, frames, bins, generator=generator),
        "text": torch.randint(0, 20, (1, 5), generator=generator),
    }


def test_upstreams_loop_runs_on_the_built_denoiser_and_then_on_its_own_again(runtime: Runtime) -> None:
    loop, given = Loop(), request()
    untouched = loop.sample(**given)
    own = loop.transformer

    attached = runtime.attach(loop, "transformer")
    ours = loop.sample(**given)
    attached.undo()

    want = runtime.sample(noise=given["x"], cond=given["cond"], text=given["text"], guidance=0.0)
    torch.testing.assert_close(ours, want)
    assert loop.transformer is own
    assert torch.equal(loop.sample(**given), untouched)
    assert [name for name, _ in loop.named_children()] == ["transformer", "vocoder"]


def test_a_with_block_undoes_it_whatever_happens(runtime: Runtime) -> None:
    loop = Loop()
    own = loop.transformer
    with pytest.raises(RuntimeError, match="broken"), runtime.attach(loop, "transformer") as attached:
        assert loop.transformer is attached.denoiser
        raise RuntimeError("broken")
    assert loop.transformer is own


def test_the_place_may_lie_deeper_and_in_plain_objects(runtime: Runtime) -> None:
    pipeline = SimpleNamespace(flow=SimpleNamespace(decoder=Loop()))
    with runtime.attach(pipeline, "flow.decoder.transformer"):
        assert isinstance(pipeline.flow.decoder.transformer, Denoiser)
    assert isinstance(pipeline.flow.decoder.transformer, Network)


def test_undoing_twice_is_undoing_once(runtime: Runtime) -> None:
    loop = Loop()
    attached = runtime.attach(loop, "transformer")
    attached.undo()
    attached.undo()
    assert loop.transformer is attached.original


def test_attachments_at_one_place_are_undone_in_reverse_order(runtime: Runtime) -> None:
    loop = Loop()
    first = runtime.attach(loop, "transformer")
    second = runtime.attach(loop, "transformer")
    with pytest.raises(UsageError, match=r"Loop\.transformer holds a Denoiser that was put there after"):
        first.undo()
    second.undo()
    first.undo()
    assert isinstance(loop.transformer, Network)


REFUSED = [
    pytest.param("decoder", r"Loop has no 'decoder'; .* transformer, vocoder", id="nothing there"),
    pytest.param("vocoder", r"Loop\.vocoder is a Linear that takes \['input'\]", id="another network"),
    pytest.param("training", r"Loop\.training is a bool, which cannot be called", id="a value"),
]


@pytest.mark.parametrize(("place", "words"), REFUSED)
def test_a_place_that_does_not_hold_the_network_is_refused(runtime: Runtime, place: str, words: str) -> None:
    loop = Loop()
    before = getattr(loop, place, None)
    with pytest.raises(InputMismatch, match=words):
        runtime.attach(loop, place)
    assert getattr(loop, place, None) is before


def test_times_that_were_not_built_say_what_to_rebuild(f5_shared: Any) -> None:
    loop, given = Loop(), request()
    with load(f5_shared, threads=1).attach(loop, "transformer"), pytest.raises(ProgramNotBuilt, match="rebuild with"):
        loop.transformer(**given, time=torch.tensor(0.123))
