"""CosyVoice2 against its own code, as the package token2wav-cosyvoice has it: its decoder and its sampling loop.

The package called cosyvoice (0.0.8) holds no networks; Fun-CosyVoice3's DiT, which is younger, has its recorded cases.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle.upstream import load
from torch import Tensor, nn

from voicehub_aot.adapters import cosyvoice
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.synthetic import synthetic_weights

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
    return load("cosyvoice.flow.decoder").CausalConditionalDecoder


@pytest.fixture(scope="module")
def cfm(decoder: Any) -> Any:
    load("matcha.utils.pylogger", {"lightning.pytorch.utilities": {"rank_zero_only": lambda function: function}})
    return load("cosyvoice.flow.flow_matching").CausalConditionalCFM


def weights_of(config: Any) -> dict[str, Tensor]:
    return synthetic_weights(cosyvoice.checkpoint_shapes(config))


def upstream_network(decoder: Any, config: Any) -> nn.Module:
    """Upstream's class with exactly the weights of `weights_of`."""
    sizes = {name: value for name, value in asdict(config).items() if name != "meanflow"}
    network: nn.Module = decoder(**sizes, act_fn="gelu", dropout=0.0, num_decoding_left_chunks=-1)
    network.load_state_dict({k.removeprefix(cosyvoice.PREFIX): v for k, v in weights_of(config).items()}, assign=True)
    return network.eval().requires_grad_(False)


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
        arguments = {"x": x, "t": torch.tensor([time]), **given, "streaming": streaming}
        wanted = theirs(**arguments)
        assert wanted.std() > 0.1
        torch.testing.assert_close(ours(**arguments), wanted, atol=1e-5, rtol=0)


def test_chunks_change_what_upstream_computes(decoder: Any) -> None:
    theirs, given = upstream_network(decoder, TINY), conditions(TINY, BATCHES["alone"])
    arguments = {"x": given["cond"], "t": torch.tensor([0.3]), **given}
    assert (theirs(**arguments, streaming=True) - theirs(**arguments)).abs().max() > 0.01


# --- the sampling loop


def loop_of(cfm: Any, estimator: nn.Module, grid: str, rate: float) -> Any:
    """CausalConditionalCFM, which seeds every global generator when it is made, for its table of noise."""
    params = SimpleNamespace(
        solver="euler", sigma_min=1e-6, t_scheduler=grid, training_cfg_rate=0.2, inference_cfg_rate=rate
    )
    with torch.random.fork_rng():
        return cfm(in_channels=240, n_spks=1, spk_emb_dim=80, cfm_params=params, estimator=estimator)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize(("steps", "grid", "rate"), [(10, "cosine", 0.7), (4, "linear", 0.3)])
@pytest.mark.parametrize("frames", [31, 200])
def test_both_loops_give_upstreams_mel(
    decoder: Any, cfm: Any, frames: int, steps: int, grid: str, rate: float, streaming: bool
) -> None:
    """Upstream's loop over our denoiser, and `Runtime.sample` from upstream's noise on."""
    given = conditions(WIDE, [frames])
    loop = loop_of(cfm, upstream_network(decoder, WIDE), grid, rate)
    wanted, _ = loop(n_timesteps=steps, streaming=streaming, **given)
    assert wanted.std() > 0.3
    runtime = eager(WIDE, cosyvoice.program(steps, grid=grid))
    loop.estimator = runtime.denoiser()
    mel, _ = loop(n_timesteps=steps, streaming=streaming, **given)
    torch.testing.assert_close(mel, wanted, atol=1e-5, rtol=0)
    del given["mask"]
    noise = loop.rand_noise[:, :, :frames].clone()
    ours = runtime.sample(noise=noise, guidance=rate, streaming=torch.tensor([streaming]), **given)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)


def test_the_table_of_noise_is_what_the_adapter_says(cfm: Any) -> None:
    noise = torch.randn(1, 80, 15000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loop_of(cfm, nn.Identity(), "cosine", 0.7).rand_noise, noise)
