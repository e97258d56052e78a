"""CosyVoice2's decoder against the package chatterbox-tts, whose S3Gen is a copy of it, chunk masks included.

The package cosyvoice (0.0.8) holds no networks: Fun-CosyVoice3's DiT has only its recorded cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from oracle.upstream import load
from torch import Tensor, nn

from voicehub_aot.adapters import cosyvoice
from voicehub_aot.build import eager_runtime
from voicehub_aot.program import Program
from voicehub_aot.runtime import Runtime
from voicehub_aot.synthetic import synthetic_weights

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:.LoRACompatibleLinear. is deprecated:FutureWarning"),  # upstream uses it
]

TINY = cosyvoice.CONFIGS["tiny-cv2"]
WIDE = replace(TINY, in_channels=320, out_channels=80)  # upstream's loop knows 80 channels alone
VARIANTS = {
    "tiny": TINY,
    "released channels": WIDE,
    "chunks of a frame": replace(TINY, static_chunk_size=1),
    "narrow heads": replace(TINY, channels=(48,), attention_head_dim=8, n_blocks=1, num_heads=2, static_chunk_size=5),
}
BATCHES = {  # frames of each row
    "alone": [23],
    "one frame": [1],
    "whole chunks": [24, 24],
    "ragged": [23, 9, 1],
}


@pytest.fixture(scope="module")
def decoder() -> Any:
    return load("chatterbox.models.s3gen.decoder").ConditionalDecoder


@pytest.fixture(scope="module")
def cfm() -> Any:
    return load("chatterbox.models.s3gen.flow_matching")


def weights_of(config: Any) -> dict[str, Tensor]:
    return synthetic_weights(cosyvoice.checkpoint_shapes(config))


def upstream_network(decoder: Any, config: Any) -> Any:
    """Upstream's class with exactly the weights of `weights_of`."""
    network = decoder(**{k: v for k, v in asdict(config).items() if k != "static_chunk_size"})
    network.load_state_dict({k.removeprefix(cosyvoice.PREFIX): v for k, v in weights_of(config).items()}, assign=True)
    return network.eval().requires_grad_(False)


@contextmanager
def chunks(network: Any, config: Any, streaming: bool) -> Iterator[None]:
    """CosyVoice2 chooses a chunk size in each call; this copy has it as an attribute, 0 for none."""
    network.static_chunk_size = config.static_chunk_size if streaming else 0
    yield
    network.static_chunk_size = 0


def eager(config: Any, *programs: Program) -> Runtime:
    return eager_runtime(cosyvoice.region(config, weights_of(config)), programs or (cosyvoice.program(2),), "cosyvoice")


def conditions(config: Any, frames: list[int]) -> dict[str, Tensor]:
    """What upstream's loop is given besides the noise, garbage in the padding of mu and cond included."""
    generator = torch.Generator().manual_seed(0)
    rows, size, mel = len(frames), max(frames), config.out_channels
    return {
        "mu": torch.randn(rows, mel, size, generator=generator),
        "mask": (torch.arange(size) < torch.tensor(frames)[:, None]).float()[:, None],
        "spks": torch.randn(rows, mel, generator=generator),
        "cond": torch.randn(rows, mel, size, generator=generator),
    }


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_evaluation_is_upstreams(decoder: Any, name: str, batch: str, streaming: bool) -> None:
    config, given = VARIANTS[name], conditions(VARIANTS[name], BATCHES[batch])
    theirs, ours = upstream_network(decoder, config), eager(config).denoiser()
    x = torch.randn(given["mu"].shape, generator=torch.Generator().manual_seed(1))
    for time in (0.0, 0.3, 0.97):
        arguments = {"x": x, "t": torch.tensor([time]), **given}
        with chunks(theirs, config, streaming):
            wanted = theirs(**arguments)
        assert wanted.std() > 0.1
        torch.testing.assert_close(ours(**arguments, streaming=streaming), wanted, atol=1e-5, rtol=0)


def test_chunks_change_what_upstream_computes(decoder: Any) -> None:
    theirs, given = upstream_network(decoder, TINY), conditions(TINY, BATCHES["alone"])
    arguments = {"x": given["cond"], "t": torch.tensor([0.3]), **given}
    whole = theirs(**arguments)
    with chunks(theirs, TINY, streaming=True):
        assert (theirs(**arguments) - whole).abs().max() > 0.01


def test_released_sizes_are_upstreams_defaults(decoder: Any) -> None:
    with torch.device("meta"):
        network = decoder()
    shapes = {cosyvoice.PREFIX + key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    assert cosyvoice.checkpoint_shapes(cosyvoice.CONFIGS["CosyVoice2-0.5B"]) == shapes


# --- the sampling loop


class Streaming(nn.Module):
    """Our denoiser where the loop's call has no argument for streaming."""

    def __init__(self, denoiser: Any, streaming: bool) -> None:
        super().__init__()
        self.denoiser, self.streaming, self.dtype = denoiser, streaming, denoiser.dtype

    def forward(self, *, r: Any = None, **arguments: Any) -> Tensor:
        out: Tensor = self.denoiser(**arguments, streaming=self.streaming)
        return out


def sample_with(cfm: Any, estimator: nn.Module, steps: int, grid: str, rate: float, **given: Tensor) -> Tensor:
    """CausalConditionalCFM.forward's mel, with this estimator."""
    params = type(cfm.CFM_PARAMS)(cfm.CFM_PARAMS, t_scheduler=grid, inference_cfg_rate=rate)
    loop = cfm.CausalConditionalCFM(spk_emb_dim=80, cfm_params=params, estimator=estimator)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        mel, _ = loop(n_timesteps=steps, **given)
    return mel.clone()  # out of inference mode


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize(("steps", "grid", "rate"), [(10, "cosine", 0.7), (4, "linear", 0.3)])
@pytest.mark.parametrize("frames", [[31], [31, 12]], ids=str)
def test_both_loops_give_upstreams_mel(
    decoder: Any, cfm: Any, frames: list[int], steps: int, grid: str, rate: float, streaming: bool
) -> None:
    """Upstream's loop over our denoiser, and `Runtime.sample` from upstream's noise on."""
    theirs, given = upstream_network(decoder, WIDE), conditions(WIDE, frames)
    with chunks(theirs, WIDE, streaming):
        wanted = sample_with(cfm, theirs, steps, grid, rate, **given)
    assert wanted.std() > 0.3
    runtime = eager(WIDE, cosyvoice.program(steps, grid=grid))
    mel = sample_with(cfm, Streaming(runtime.denoiser(), streaming), steps, grid, rate, **given)
    torch.testing.assert_close(mel, wanted, atol=1e-5, rtol=0)
    mask = given.pop("mask")
    noise = torch.randn(given["mu"].shape, generator=torch.Generator().manual_seed(5))
    switch = torch.full((len(frames),), streaming)
    ours = runtime.sample(noise=noise, lengths=frames, guidance=rate, streaming=switch, **given)
    torch.testing.assert_close(ours * mask, wanted * mask, atol=1e-5, rtol=0)
