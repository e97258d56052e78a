"""Echo-TTS against EchoDiT and its sampling loop, as the package echo-tts carries them.

The package is a third party's. Its model.py is jordandare/echo-tts 230202af's to the byte, its sampling loop differs
in type annotations; the loop over blocks is not in it, so that a finished prefix is held to single evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle.upstream import load
from torch import Tensor, nn

from voicehub_aot.adapters import echo
from voicehub_aot.adapters.echo.net import Config, LatentEncoder
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.speaker import SpeakerScaling
from voicehub_aot.spec.synthetic import synthetic_weights

pytestmark = pytest.mark.oracle

TINY = echo.CONFIGS["tiny"]
WIDE = replace(TINY, latent_size=80)  # upstream's loop knows 80 channels alone
VARIANTS = {
    "tiny": TINY,
    "two heads": replace(TINY, num_heads=2, num_layers=2, norm_eps=1e-3),
    "patches of two": replace(TINY, speaker_patch_size=2, adaln_rank=5, timestep_embed_size=48),
}
BATCHES: Mapping[str, tuple[list[int], list[int]]] = {  # bytes of text and frames of the reference of each row
    "alone": ([9], [16]),
    "ragged": ([9, 4, 1], [17, 8, 1]),
    "one without a reference": ([5, 7], [12, 0]),
}
FRAMES = 13


@pytest.fixture(scope="module")
def model() -> Any:
    return load("echo_tts.model")


@pytest.fixture(scope="module")
def inference() -> Any:
    return load("echo_tts.inference")


def arguments_of(config: Config) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name != "blockwise"}


def upstream_network(model: Any, config: Config) -> tuple[Any, dict[str, Tensor]]:
    """Upstream's class, encoders included, with synthetic weights, and these.

    The gains of queries and keys are near one: `synthetic_weights` takes them for matrices.
    """
    with torch.device("meta"):
        network = model.EchoDiT(**arguments_of(config))
    weights = synthetic_weights({key: tuple(tensor.shape) for key, tensor in network.state_dict().items()})
    weights = {k: 1 + v if k.endswith(("q_norm.weight", "k_norm.weight")) else v for k, v in weights.items()}
    network.load_state_dict(weights, assign=True)
    return network.eval().requires_grad_(False), weights


def eager(config: Config, weights: Mapping[str, Tensor], *programs: Program) -> Runtime:
    return eager_runtime(echo.region(config, weights), programs or (echo.program(8),), "echo")


def prefix_mask(lengths: list[int], size: int) -> Tensor:
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def conditions(config: Config, batch: str, seed: int = 0) -> dict[str, Tensor]:
    """What upstream's loop is given besides the seed, garbage in the padding included."""
    generator = torch.Generator().manual_seed(seed)
    text, speaker = BATCHES[batch]
    rows, frames = len(text), -(-max(speaker) // 4) * 4
    return {
        "text_input_ids": torch.randint(0, config.text_vocab_size, (rows, max(text)), generator=generator),
        "text_mask": prefix_mask(text, max(text)),
        "speaker_latent": torch.randn(rows, frames, config.latent_size, generator=generator),
        "speaker_mask": prefix_mask(speaker, frames),
    }


def latents(config: Config, rows: int, frames: int = FRAMES) -> Tensor:
    return torch.randn(rows, frames, config.latent_size, generator=torch.Generator().manual_seed(1))


def request_of(network: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The region's conditioning: what the encoders outside make of it."""
    return {
        "text_state": network.text_norm(network.text_encoder(given["text_input_ids"], given["text_mask"])),
        "text_mask": given["text_mask"],
        "speaker_state": network.speaker_norm(network.speaker_encoder(given["speaker_latent"])),
        "speaker_mask": given["speaker_mask"][:, :: network.speaker_patch_size],
    }


def call_of(network: Any, given: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same in upstream's call."""
    return {
        "text_mask": given["text_mask"],
        "speaker_mask": given["speaker_mask"],
        "kv_cache_text": network.get_kv_cache_text(given["text_input_ids"], given["text_mask"]),
        "kv_cache_speaker": network.get_kv_cache_speaker(given["speaker_latent"]),
    }


# --- one evaluation


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_evaluation_is_upstreams(model: Any, name: str, batch: str) -> None:
    config = VARIANTS[name]
    theirs, weights = upstream_network(model, config)
    ours, given = eager(config, weights), conditions(config, batch)
    x, request = latents(config, len(given["text_mask"])), request_of(theirs, given)
    for time in (0.999, 0.4, 0.02):
        wanted = theirs(x, torch.full((len(x),), time), **call_of(theirs, given))
        assert wanted.std() > 0.3
        torch.testing.assert_close(ours.evaluate(x, time, **request), wanted, atol=1e-5, rtol=0)


def test_rows_at_different_times_are_upstreams(model: Any) -> None:
    theirs, weights = upstream_network(model, TINY)
    given, times = conditions(TINY, "ragged"), torch.tensor([0.999, 0.5, 0.1])
    x = latents(TINY, 3)
    ours = eager(TINY, weights).evaluate(x, times, **request_of(theirs, given))
    torch.testing.assert_close(ours, theirs(x, times, **call_of(theirs, given)), atol=1e-5, rtol=0)


def test_guidance_branches_are_upstreams_masks(model: Any) -> None:
    theirs, weights = upstream_network(model, TINY)
    given, x = conditions(TINY, "ragged"), latents(TINY, 3)
    time, call = torch.full((3,), 0.6), call_of(theirs, given)
    unseen = [{}, *({name: torch.zeros_like(given[name])} for name in ("text_mask", "speaker_mask"))]
    wanted = torch.cat([theirs(x, time, **call | masks) for masks in unseen])
    assert all((wanted[:3] - other).abs().max() > 0.1 for other in wanted[3:].chunk(2))
    ours = eager(TINY, weights).evaluate(x, 0.6, packed=True, **request_of(theirs, given))
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("start", [0, 5, 8, 16])
@pytest.mark.parametrize("name", VARIANTS)
def test_an_evaluation_behind_a_finished_prefix_is_upstreams(model: Any, name: str, start: int) -> None:
    config = VARIANTS[name]
    theirs, weights = upstream_network(model, config)
    given, x, finished = conditions(config, "ragged"), latents(config, 3), latents(config, 3, frames=16)
    encoder = LatentEncoder(config)
    encoder.load_state_dict({k: v for k, v in weights.items() if k.startswith(LatentEncoder.PREFIXES)})
    state = encoder.eval().requires_grad_(False)(finished)
    torch.testing.assert_close(state, theirs.latent_norm(theirs.latent_encoder(finished)), atol=1e-5, rtol=0)
    prefix = {"start_pos": start, "kv_cache_latent": theirs.get_kv_cache_latent(finished)}
    wanted = theirs(x, torch.full((3,), 0.7), **call_of(theirs, given), **prefix)
    ours = eager(config, weights).evaluate(
        x,
        0.7,
        **request_of(theirs, given),
        latent_state=state,
        latent_mask=torch.ones(state.shape[:2], dtype=torch.bool),
        start_pos=torch.full((3,), start),
    )
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)


def test_the_released_configuration_is_the_one_upstream_loads(
    inference: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loading(Exception):
        pass

    def stop(**arguments: Any) -> None:
        raise Loading(arguments)

    monkeypatch.setattr(inference, "EchoDiT", stop)
    with pytest.raises(Loading) as stopped:
        inference.load_model_from_hf()
    (arguments,) = stopped.value.args
    config = echo.CONFIGS["echo-tts-base"]
    assert arguments_of(config) == arguments
    with torch.device("meta"):
        state = model.EchoDiT(**arguments).state_dict()
    assert len(state) == 1336
    shapes = echo.checkpoint_shapes(config)
    assert shapes == {key: tuple(state[key].shape) for key in shapes}
    outside = ("text_", "speaker_", "latent_")  # encoders and their norms
    assert not [key for key in set(state) - set(shapes) if not key.startswith(outside)]


# --- the sampling loop

RELEASED: Mapping[str, Any] = {
    **{"num_steps": 8, "cfg_scale_text": 3.0, "cfg_scale_speaker": 8.0, "cfg_min_t": 0.5, "cfg_max_t": 1.0},
    **{"truncation_factor": 0.8, "rescale_k": None, "rescale_sigma": None},
    **{"speaker_kv_scale": None, "speaker_kv_max_layers": None, "speaker_kv_min_t": None},
}
ROUNDING = 5e-5  # guidance adds up to 11 differences of velocities; the first rescaled score divides one by 0.001
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "released": RELEASED,
    "unguided": {**RELEASED, "cfg_min_t": 2.0, "truncation_factor": None},
    "a window and a rescaled score": {
        **RELEASED,
        **{"cfg_min_t": 0.2, "cfg_max_t": 0.8, "rescale_k": 1.2, "rescale_sigma": 3.0},
    },
    "a louder speaker": {
        **RELEASED,
        **{"speaker_kv_scale": 1.5, "speaker_kv_max_layers": 2, "speaker_kv_min_t": 0.6},
    },
}


class InItsPlace(nn.Module):
    """Our denoiser behind upstream's calls: its caches hold what the loop does to them, factors, not keys and values.

    The loop multiplies keys and values of the speaker by layers, which upstream's forward has no argument for.
    """

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, network: Any, runtime: Runtime, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.runtime, self.denoiser, self.layers = runtime, runtime.denoiser(), len(network.blocks)
        self.patch, self.request = network.speaker_patch_size, request_of(network, given)

    def get_kv_cache_text(self, text_input_ids: Tensor, text_mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(torch.ones(len(text_mask)), torch.ones(len(text_mask))) for _ in range(self.layers)]

    def get_kv_cache_speaker(self, speaker_latent: Tensor) -> list[tuple[Tensor, Tensor]]:
        return self.get_kv_cache_text(speaker_latent, speaker_latent)

    def forward(
        self, x: Tensor, t: Tensor, text_mask: Tensor, speaker_mask: Tensor, kv_cache_text: Any, kv_cache_speaker: Any
    ) -> Tensor:
        copies = len(x) // len(self.request["text_state"])
        text, speaker = (self.request[f"{name}_state"].repeat(copies, 1, 1) for name in ("text", "speaker"))
        patches, scale = speaker_mask[:, :: self.patch], torch.stack([v for _, v in kv_cache_speaker], dim=1)
        if (scale == 1).all():
            velocity: Tensor = self.denoiser(x, t, text_mask, patches, text, speaker)
            return velocity
        masks = {"text_mask": text_mask, "speaker_mask": patches}
        return self.runtime.evaluate(x, t, text_state=text, speaker_state=speaker, speaker_scale=scale, **masks)


def program_of(setting: str) -> Program:
    s = SETTINGS[setting]
    return echo.program(s["num_steps"], **{n: s[n] for n in ("cfg_min_t", "cfg_max_t", "rescale_k", "rescale_sigma")})


def sample_with(inference: Any, network: Any, setting: str, given: Mapping[str, Tensor]) -> Tensor:
    loop = inference.sample_euler_cfg_independent_guidances
    final: Tensor = loop(network, **given, rng_seed=5, sequence_length=FRAMES, **SETTINGS[setting])
    return final.clone()


def case_of(model: Any, inference: Any, setting: str, batch: str) -> tuple[Any, Tensor, Runtime, dict[str, Tensor]]:
    """Upstream's network, its latents, our runtime over the same weights, and what the loop was given."""
    network, weights = upstream_network(model, WIDE)
    given = conditions(WIDE, batch)
    wanted = sample_with(inference, network, setting, given)
    assert wanted.std() > 0.3
    return network, wanted, eager(WIDE, weights, program_of(setting)), given


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_eager_runtime_samples_in_upstreams_loop(model: Any, inference: Any, setting: str, batch: str) -> None:
    network, wanted, runtime, given = case_of(model, inference, setting, batch)
    ours = sample_with(inference, InItsPlace(network, runtime, given), setting, given)
    torch.testing.assert_close(ours, wanted, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_our_loop_gives_upstreams_result(model: Any, inference: Any, setting: str, batch: str) -> None:
    """From upstream's noise on, without upstream's loop."""
    network, wanted, runtime, given = case_of(model, inference, setting, batch)
    s, program = SETTINGS[setting], program_of(setting)
    noise = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5)) * (s["truncation_factor"] or 1.0)
    speaker = s["speaker_kv_scale"] and SpeakerScaling(
        s["speaker_kv_scale"], s["speaker_kv_max_layers"], s["speaker_kv_min_t"]
    )
    (final,) = runtime.blocks(
        noise=noise,
        speaker=speaker or None,
        program=program.name,
        guidance={"text": s["cfg_scale_text"], "speaker": s["cfg_scale_speaker"]},
        **request_of(network, given),
    )
    torch.testing.assert_close(final, wanted, atol=ROUNDING, rtol=0)
