"""VibeVoice against the package vibevoice itself: its prediction head, its scheduler, its loop over one frame."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle.upstream import Modules, load
from torch import Tensor, nn

from voicehub_aot.adapters import vibevoice
from voicehub_aot.adapters.vibevoice.checkpoint import FIXED
from voicehub_aot.adapters.vibevoice.net import PREFIX
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.synthetic import synthetic_weights

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]

TINY = vibevoice.CONFIGS["tiny"]
VARIANTS = {
    "tiny": TINY,
    "one layer": replace(TINY, head_layers=1, head_ffn_ratio=3.0),
    "released proportions": replace(TINY, hidden_size=56, head_layers=4, head_ffn_ratio=3.0, latent_size=64),
    "wide floor of the norm": replace(TINY, rms_norm_eps=0.1),
}
RELATIVE = 5e-6  # to the largest value of a frame; measured 9e-7


# --- what the package takes from transformers to be loaded and saved, which evaluating a head does not need


class PreTrainedModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class PretrainedConfig:
    def __init__(self, **_: Any) -> None:
        pass


AUTO = SimpleNamespace(register=lambda *_: None)
TRANSFORMERS: Modules = {
    "transformers": {},
    "transformers.activations": {"ACT2FN": {"silu": nn.SiLU()}},
    "transformers.configuration_utils": {"PretrainedConfig": PretrainedConfig},
    "transformers.generation": {},
    "transformers.modeling_flash_attention_utils": {},
    "transformers.modeling_outputs": {},
    "transformers.modeling_utils": {"PreTrainedModel": PreTrainedModel},
    "transformers.models.auto": {"AutoModel": AUTO, "AutoModelForCausalLM": AUTO},
    "transformers.models.llama.modeling_llama": {},
    "transformers.models.qwen2.configuration_qwen2": {},
    "transformers.models.qwen2.tokenization_qwen2": {},
    "transformers.models.qwen2.tokenization_qwen2_fast": {},
    "transformers.utils": {"logging": SimpleNamespace(get_logger=logging.getLogger)},
}


@pytest.fixture(scope="module")
def vibe() -> Any:
    load("vibevoice.schedule.dpm_solver")  # diffusers must not see a stand-in for transformers
    return load("vibevoice.modular.modeling_vibevoice_inference", TRANSFORMERS)


@pytest.fixture(scope="module")
def head_config(vibe: Any) -> Any:
    return load("vibevoice.modular.configuration_vibevoice", TRANSFORMERS).VibeVoiceDiffusionHeadConfig


def weights_of(config: Any) -> dict[str, Tensor]:
    return synthetic_weights(vibevoice.checkpoint_shapes(config))


def upstream_head(vibe: Any, head_config: Any, config: Any) -> nn.Module:
    """Upstream's class with exactly the weights of `weights_of`."""
    settings = {name: value for name, value in vars(config).items() if name != "guidance_scale"}
    head: nn.Module = vibe.VibeVoiceDiffusionHead(head_config(**settings))
    head.load_state_dict({k.removeprefix(PREFIX): v for k, v in weights_of(config).items()}, assign=True)
    return head.eval().requires_grad_(False)


def eager(config: Any, *programs: Program) -> Runtime:
    return eager_runtime(vibevoice.region(config, weights_of(config)), programs or (vibevoice.program(5),), "vibevoice")


def call_of(config: Any, rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Random arguments of upstream's forward, each row at a time of its own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "noisy_images": torch.randn(rows, config.latent_size, generator=generator),
        "timesteps": torch.tensor([999.0, 0.0, 400.0, 1.0, 850.0])[:rows],
        "condition": torch.randn(rows, config.hidden_size, generator=generator),
    }


# --- one evaluation


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_an_evaluation_is_upstreams(vibe: Any, head_config: Any, name: str, rows: int) -> None:
    config = VARIANTS[name]
    theirs, ours = upstream_head(vibe, head_config, config), eager(config).denoiser()
    for seed in range(5):
        arguments = call_of(config, rows, seed)
        wanted = theirs(**arguments)
        assert wanted.std() > 0.3
        torch.testing.assert_close(ours(**arguments), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("time", [0.0, 1.0, 100.0, 599.0, 999.0, 1000.0])
def test_times_are_embedded_as_upstream_does(vibe: Any, head_config: Any, time: float) -> None:
    theirs, ours = upstream_head(vibe, head_config, TINY), eager(TINY).denoiser()
    arguments = {**call_of(TINY, 2), "timesteps": torch.full((2,), time)}
    torch.testing.assert_close(ours(**arguments), theirs(**arguments), atol=1e-5, rtol=0)


def test_what_every_release_has_is_upstreams_default(head_config: Any) -> None:
    defaults = vars(head_config())
    assert {name: defaults[name] for name in FIXED} == dict(FIXED)
    released = vibevoice.config_from({**defaults, "hidden_size": 1536})
    assert released == vibevoice.CONFIGS["VibeVoice-1.5B"]


# --- the sampling loop


class Clock(nn.Module):
    """Stands in for a head, and writes down the times at which the loop evaluates it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def forward(self, noisy_images: Tensor, timesteps: Tensor, condition: Tensor) -> Tensor:
        (time,) = set(timesteps.tolist())
        self.times.append(time)
        return torch.zeros_like(noisy_images)


def scheduler_of(vibe: Any) -> Any:
    return vibe.DPMSolverMultistepScheduler(
        num_train_timesteps=FIXED["ddpm_num_steps"],
        beta_schedule=FIXED["ddpm_beta_schedule"],
        prediction_type=FIXED["prediction_type"],
    )


def frame_with(vibe: Any, head: nn.Module, steps: int, request: Mapping[str, Tensor], scale: float) -> Tensor:
    """One latent of sample_speech_tokens, a method of the whole model; these are the parts that it reads."""
    latent = getattr(request.get("noise"), "shape", (1, 2))[-1]
    model = SimpleNamespace(
        model=SimpleNamespace(noise_scheduler=scheduler_of(vibe), prediction_head=head),
        config=SimpleNamespace(acoustic_vae_dim=latent),
        ddpm_inference_steps=steps,
    )
    torch.manual_seed(11)
    sample = vibe.VibeVoiceForConditionalGenerationInference.sample_speech_tokens
    frame: Tensor = sample(model, request["condition"], request["neg_condition"], cfg_scale=scale)
    return frame


def request_of(config: Any, rows: int) -> dict[str, Tensor]:
    """Conditions of a frame, and the noise that upstream draws for it: for both branches, of which it uses one."""
    generator = torch.Generator().manual_seed(4)
    conditions = {n: torch.randn(rows, config.hidden_size, generator=generator) for n in ("condition", "neg_condition")}
    noise = torch.randn(2 * rows, config.latent_size, generator=torch.Generator().manual_seed(11))
    return {**conditions, "noise": noise[:rows]}


@pytest.mark.parametrize("dtype", vibevoice.TIME_DTYPES)
def test_evaluation_times_are_upstreams(vibe: Any, dtype: str) -> None:
    hidden = torch.zeros(1, 1, dtype=vibevoice.TIME_DTYPES[dtype])
    for steps in range(1, 131):
        clock = Clock()
        frame_with(vibe, clock, steps, {"condition": hidden, "neg_condition": hidden}, 1.3)
        assert list(vibevoice.program(steps, time_dtype=dtype).times) == clock.times


@pytest.mark.parametrize("scale", [1.3, 1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 5, 10, 20])
@pytest.mark.parametrize("rows", [1, 3])
def test_our_head_samples_in_upstreams_loop(vibe: Any, head_config: Any, rows: int, steps: int, scale: float) -> None:
    request = request_of(TINY, rows)
    wanted = frame_with(vibe, upstream_head(vibe, head_config, TINY), steps, request, scale)
    frame = frame_with(vibe, eager(TINY, vibevoice.program(steps)).denoiser(), steps, request, scale)
    torch.testing.assert_close(frame, wanted, atol=RELATIVE * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("scale", [1.3, 1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 5, 10, 20])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_our_loop_gives_upstreams_result(
    vibe: Any, head_config: Any, name: str, rows: int, steps: int, scale: float
) -> None:
    """`Runtime.sample` from upstream's noise on, without upstream's scheduler."""
    config = VARIANTS[name]
    request = request_of(config, rows)
    wanted = frame_with(vibe, upstream_head(vibe, head_config, config), steps, request, scale)
    frame = eager(config, vibevoice.program(steps)).sample(guidance=scale - 1, **request)
    torch.testing.assert_close(frame, wanted, atol=RELATIVE * float(wanted.abs().max()), rtol=0)
