"""Chatterbox against the package chatterbox-tts itself: S3Gen's decoder, its sizes, its sampling loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from oracle.upstream import load
from torch import Tensor, nn

from voicehub_aot.adapters import chatterbox
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.synthetic import synthetic_weights

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:.LoRACompatibleLinear. is deprecated:FutureWarning"),  # upstream uses it
]

TINY = chatterbox.CONFIGS["tiny"]
WIDE = replace(TINY, in_channels=320, out_channels=80)  # upstream's loop knows 80 channels alone
VARIANTS = {
    "guided": TINY,
    "mean flow": replace(TINY, meanflow=True),
    "released channels": WIDE,
    "narrow heads": replace(TINY, channels=(48,), attention_head_dim=8, n_blocks=1, num_mid_blocks=3, num_heads=2),
}
BATCHES = {  # frames of each row
    "alone": [23],
    "one frame": [1],
    "two full rows": [24, 24],
    "ragged": [23, 9, 1],
}


@pytest.fixture(scope="module")
def decoder() -> Any:
    return load("chatterbox.models.s3gen.decoder").ConditionalDecoder


@pytest.fixture(scope="module")
def cfm() -> Any:
    return load("chatterbox.models.s3gen.flow_matching")


def weights_of(config: Any) -> dict[str, Tensor]:
    return synthetic_weights(chatterbox.checkpoint_shapes(config))


def upstream_network(decoder: Any, config: Any, weights: Mapping[str, Tensor]) -> nn.Module:
    """Upstream's class with exactly these weights, shared and not copied."""
    network: nn.Module = decoder(**{k: v for k, v in asdict(config).items() if k != "static_chunk_size"})
    network.load_state_dict({k.removeprefix(chatterbox.PREFIX): v for k, v in weights.items()}, assign=True)
    return network.eval().requires_grad_(False)


def eager(config: Any, weights: Mapping[str, Tensor], *programs: Program) -> Runtime:
    region = chatterbox.region(config, weights)
    return eager_runtime(region, programs or (chatterbox.program(2, meanflow=config.meanflow),), "chatterbox")


def conditions(config: Any, frames: list[int], seed: int = 0) -> dict[str, Tensor]:
    """What upstream's loop is given besides the noise, garbage in the padding of mu and cond included."""
    generator = torch.Generator().manual_seed(seed)
    rows, size, mel = len(frames), max(frames), config.out_channels
    return {
        "mu": torch.randn(rows, mel, size, generator=generator),
        "mask": (torch.arange(size) < torch.tensor(frames)[:, None]).float()[:, None],
        "spks": torch.randn(rows, mel, generator=generator),
        "cond": torch.randn(rows, mel, size, generator=generator),
    }


def call_of(config: Any, frames: list[int], time: float = 0.3, end: float = 0.8) -> dict[str, Tensor]:
    """Random arguments of upstream's forward."""
    given = conditions(config, frames)
    x = torch.randn(given["mu"].shape, generator=torch.Generator().manual_seed(1))
    ends = {"r": torch.tensor([end])} if config.meanflow else {}
    return {"x": x, **given, "t": torch.tensor([time]), **ends}


# --- one evaluation


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_evaluation_is_upstreams(decoder: Any, name: str, batch: str) -> None:
    config, weights = VARIANTS[name], weights_of(VARIANTS[name])
    theirs, ours = upstream_network(decoder, config, weights), eager(config, weights).denoiser()
    for time, end in ((0.0, 0.5), (0.3, 0.8), (0.97, 1.0)):
        arguments = call_of(config, BATCHES[batch], time, end)
        wanted = theirs(**arguments)
        assert wanted.std() > 0.1
        torch.testing.assert_close(ours(**arguments), wanted, atol=1e-5, rtol=0)


def test_rows_at_different_times_are_upstreams(decoder: Any) -> None:
    config, weights = TINY, weights_of(TINY)
    arguments = call_of(config, BATCHES["ragged"]) | {"t": torch.tensor([0.0, 0.97, 0.25])}
    theirs, ours = upstream_network(decoder, config, weights), eager(config, weights).denoiser()
    torch.testing.assert_close(ours(**arguments), theirs(**arguments), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [n for n in chatterbox.CONFIGS if not n.startswith("tiny")])
def test_released_sizes_are_upstreams_defaults(decoder: Any, name: str) -> None:
    with torch.device("meta"):
        network = decoder(meanflow=chatterbox.CONFIGS[name].meanflow)
    shapes = {chatterbox.PREFIX + key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    assert chatterbox.checkpoint_shapes(chatterbox.CONFIGS[name]) == shapes
    attention = network.mid_blocks[0][1][0].attn1
    assert (attention.heads, attention.inner_dim) == (8, 8 * chatterbox.CONFIGS[name].attention_head_dim)


# --- the sampling loop

SETTINGS: Mapping[str, dict[str, Any]] = {
    "released": {"steps": 10},
    "linear": {"steps": 4, "grid": "linear", "rate": 0.4},
    "released mean flow": {"steps": 2, "meanflow": True},
    "one step of mean flow": {"steps": 1, "meanflow": True},
}
REQUESTS = {"alone": [31], "ragged": [31, 12]}


def program_of(setting: str) -> Program:
    return chatterbox.program(**{k: v for k, v in SETTINGS[setting].items() if k != "rate"})


def sample_with(cfm: Any, estimator: nn.Module, setting: str, seed: int = 5, **given: Any) -> Tensor:
    """CausalConditionalCFM.forward's mel, with this estimator."""
    s = {"grid": "cosine", "rate": 0.7, "meanflow": False, **SETTINGS[setting]}
    params = type(cfm.CFM_PARAMS)(cfm.CFM_PARAMS, t_scheduler=s["grid"], inference_cfg_rate=s["rate"])
    loop = cfm.CausalConditionalCFM(spk_emb_dim=80, cfm_params=params, estimator=estimator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        mel, _ = loop(n_timesteps=s["steps"], meanflow=s["meanflow"], **given)
    return mel.clone()


def sampled(decoder: Any, cfm: Any, setting: str, **given: Any) -> tuple[Tensor, Runtime]:
    """Upstream's mel with upstream's network, and our runtime over the same weights."""
    config = replace(WIDE, meanflow=SETTINGS[setting].get("meanflow", False))
    weights = weights_of(config)
    mel = sample_with(cfm, upstream_network(decoder, config, weights), setting, **given)
    return mel, eager(config, weights, program_of(setting))


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_eager_runtime_samples_in_upstreams_loop(decoder: Any, cfm: Any, setting: str, request_name: str) -> None:
    given = conditions(WIDE, REQUESTS[request_name])
    wanted, runtime = sampled(decoder, cfm, setting, **given)
    assert wanted.std() > 0.3
    torch.testing.assert_close(sample_with(cfm, runtime.denoiser(), setting, **given), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("setting", ["released", "released mean flow"])
def test_noise_that_the_host_draws_for_the_new_frames_reaches_the_loop(decoder: Any, cfm: Any, setting: str) -> None:
    given = conditions(WIDE, REQUESTS["alone"])
    given["noised_mels"] = torch.randn(1, 80, 20, generator=torch.Generator().manual_seed(2))
    wanted, runtime = sampled(decoder, cfm, setting, **given)
    torch.testing.assert_close(sample_with(cfm, runtime.denoiser(), setting, **given), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_our_loop_gives_upstreams_result(decoder: Any, cfm: Any, setting: str, request_name: str) -> None:
    """`Runtime.sample` from upstream's noise on, without upstream's loop."""
    given = conditions(WIDE, REQUESTS[request_name])
    wanted, runtime = sampled(decoder, cfm, setting, **given)
    mask, rate = given.pop("mask"), {} if "rate" not in SETTINGS[setting] else {"guidance": SETTINGS[setting]["rate"]}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        noise = torch.randn_like(given["mu"])
    ours = runtime.sample(
        noise=noise, lengths=REQUESTS[request_name], program=program_of(setting).name, **rate, **given
    )
    torch.testing.assert_close(ours * mask, wanted * mask, atol=1e-5, rtol=0)
