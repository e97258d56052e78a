"""StyleTTS2 against the package styletts2 itself: its networks, its configurations, its diffusion sampler."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.upstream import load
from torch import Tensor, nn

from voicehub_aot.adapters import styletts2
from voicehub_aot.adapters.styletts2.checkpoint import PREFIX
from voicehub_aot.errors import NoBucketFits
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.synthetic import synthetic_weights

pytestmark = pytest.mark.oracle

TINY, SINGLE = styletts2.CONFIGS["tiny"], styletts2.CONFIGS["tiny-single"]
VARIANTS = {
    "several speakers": TINY,
    "one speaker": SINGLE,
    "one block": replace(TINY, num_layers=1, multiplier=3),
    "three blocks": replace(SINGLE, num_layers=3, num_heads=3),
    "narrow reference": replace(TINY, context_features=10),
}
LEVELS = {"sigma_min": 1e-4, "sigma_max": 3.0, "rho": 9.0}  # of the notebooks and of the package's own inference
RELATIVE = 5e-6  # to the largest value of a style; measured 2.7e-6


@pytest.fixture(scope="module")
def modules() -> Any:
    return load("styletts2.Modules.diffusion.modules")


@pytest.fixture(scope="module")
def diffusion() -> Any:
    return load("styletts2.Modules.diffusion.diffusion")


def weights_of(config: Any) -> dict[str, Tensor]:
    """Synthetic, with time frequencies as large as upstream's own: `synthetic_weights` takes them for biases."""
    weights = synthetic_weights(styletts2.checkpoint_shapes(config))
    return {k: 50 * v if k.endswith("to_time.0.0.weights") else v for k, v in weights.items()}


def upstream_network(modules: Any, config: Any) -> nn.Module:
    """Upstream's class with exactly the weights of `weights_of`."""
    arguments = {name: value for name, value in vars(config).items() if name != "sigma_data"}
    several = config.context_features is not None
    network: nn.Module = (modules.StyleTransformer1d if several else modules.Transformer1d)(**arguments)
    network.load_state_dict({k.removeprefix(PREFIX): v for k, v in weights_of(config).items()}, assign=True)
    return network.eval().requires_grad_(False)


def program_of(config: Any, steps: int, **options: float) -> Program:
    return styletts2.program(steps, sigma_data=config.sigma_data, **options)


def eager(config: Any, *programs: Program) -> Runtime:
    programs = programs or (program_of(config, 5),)
    return eager_runtime(styletts2.region(config, weights_of(config)), programs, "styletts2")


def request_of(config: Any, rows: int, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Random conditioning; features only where there is a reference style."""
    generator = torch.Generator().manual_seed(seed)
    request = {"embedding": torch.randn(rows, tokens, config.context_embedding_features, generator=generator)}
    if config.context_features is not None:
        request["features"] = torch.randn(rows, config.context_features, generator=generator)
    return request


# --- one evaluation


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 17), (2, 9), (3, 64)])
@pytest.mark.parametrize("name", VARIANTS)
def test_an_evaluation_is_upstreams(modules: Any, name: str, rows: int, tokens: int) -> None:
    config = VARIANTS[name]
    theirs, ours = upstream_network(modules, config), eager(config).denoiser()
    x = torch.randn(rows, 1, config.channels, generator=torch.Generator().manual_seed(1))
    times = torch.tensor([0.27, -2.3, -0.146])[:rows]
    for scale in (1.0, 0.0, 2.0):  # the text, the learned table, and beyond both
        arguments = {"embedding_scale": scale, **request_of(config, rows, tokens)}
        wanted = theirs(x, times, **arguments)
        assert wanted.std() > 0.1
        torch.testing.assert_close(ours(x, times, **arguments), wanted, atol=1e-5, rtol=0)


def test_more_tokens_than_the_table_has_rows_are_refused_by_both(modules: Any) -> None:
    theirs, ours = upstream_network(modules, TINY), eager(TINY).denoiser()
    request = request_of(TINY, 1, TINY.embedding_max_length + 1)
    for network, error in ((theirs, AssertionError), (ours, NoBucketFits)):
        with pytest.raises(error):
            network(torch.zeros(1, 1, TINY.channels), torch.zeros(1), **request)


@pytest.mark.parametrize(("file", "released"), [("config.yml", "LJSpeech"), ("config_libritts.yml", "LibriTTS")])
def test_released_configurations_are_upstreams(file: str, released: str) -> None:
    values = load("yaml").safe_load(files("styletts2").joinpath(f"Configs/{file}").read_text())
    assert styletts2.config_from(values) == styletts2.CONFIGS[released]


# --- the model around the network


def upstream_model(diffusion: Any, network: nn.Module, config: Any) -> nn.Module:
    """The style diffusion put together as upstream's build_model does."""
    model: nn.Module = diffusion.AudioDiffusionConditional(
        in_channels=1,
        embedding_max_length=config.embedding_max_length,
        embedding_features=config.context_embedding_features,
        embedding_mask_proba=0.1,
        channels=config.channels,
        context_features=config.channels,
    )
    model.diffusion = diffusion.KDiffusion(
        net=network,
        sigma_distribution=diffusion.LogNormalDistribution(mean=-3.0, std=1.0),
        sigma_data=config.sigma_data,
        dynamic_threshold=0.0,
    )
    model.unet = network
    return model


@pytest.mark.parametrize("name", ["several speakers", "one speaker"])
def test_a_checkpoint_of_upstreams_model_is_read(modules: Any, diffusion: Any, name: str, tmp_path: Path) -> None:
    config, file = VARIANTS[name], tmp_path / "epoch_2nd_00100.pth"
    model = upstream_model(diffusion, upstream_network(modules, config), config)
    torch.save({"net": {"diffusion": model.state_dict()}, "epoch": 100}, file)
    found, weights = styletts2.read_checkpoint(file, config)
    assert found == config
    assert weights.keys() == weights_of(config).keys()
    assert all(torch.equal(weights[key], value) for key, value in weights_of(config).items())


# --- the sampling loop


class Clock(nn.Module):
    """Stands in for a network, and writes down the times at which the loop evaluates it."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        self.times.append(float(time))
        return torch.zeros_like(x)


def style_with(
    diffusion: Any, network: nn.Module, config: Any, noise: Tensor, steps: int, rho: float = 1.0, **request: Any
) -> Tensor:
    """DiffusionSampler over the network, put together as in the package's inference."""
    loop = diffusion.DiffusionSampler(
        upstream_model(diffusion, network, config).diffusion,
        sampler=diffusion.ADPM2Sampler(rho=rho),
        sigma_schedule=diffusion.KarrasSchedule(**LEVELS),
        clamp=False,
    )
    torch.manual_seed(7)  # each transition draws from torch's global generator
    style: Tensor = loop(noise, num_steps=steps, **request)
    return style


@pytest.mark.parametrize("rho", [1.0, 2.0])
def test_evaluation_times_are_upstreams(diffusion: Any, rho: float) -> None:
    for steps in range(2, 51):
        clock = Clock()
        style_with(diffusion, clock, TINY, torch.zeros(1, 1, TINY.channels), steps, rho)
        assert list(program_of(TINY, steps, adpm2_rho=rho).times) == clock.times


def noises_of(config: Any, rows: int, steps: int) -> dict[str, Tensor]:
    """The noise at the start, and what each transition draws."""
    start = torch.randn(rows, 1, config.channels, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(7)
    draws = [torch.randn(start.shape, generator=generator) for _ in range(steps - 1)]
    return {"noise": start, "step_noise": torch.stack(draws)}


STEPS = [2, 3, 5, 10, 20]
SCALES = [1.0, 2.0]


def assert_near(style: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(style, wanted, atol=RELATIVE * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_our_network_samples_in_upstreams_loop(
    modules: Any, diffusion: Any, name: str, rows: int, steps: int, scale: float
) -> None:
    config = VARIANTS[name]
    noise, request = noises_of(config, rows, steps)["noise"], request_of(config, rows, 17)
    networks = upstream_network(modules, config), eager(config, program_of(config, steps)).denoiser()
    wanted, style = (style_with(diffusion, n, config, noise, steps, embedding_scale=scale, **request) for n in networks)
    assert wanted.std() > 0.01
    assert_near(style, wanted)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_our_loop_gives_upstreams_result(
    modules: Any, diffusion: Any, name: str, rows: int, steps: int, scale: float
) -> None:
    """`Runtime.sample` from upstream's noises on, without upstream's sampler."""
    config = VARIANTS[name]
    noises, request = noises_of(config, rows, steps), request_of(config, rows, 17)
    theirs = upstream_network(modules, config)
    wanted = style_with(diffusion, theirs, config, noises["noise"], steps, embedding_scale=scale, **request)
    style = eager(config, program_of(config, steps)).sample(guidance=scale - 1, **noises, **request)
    assert_near(style, wanted)
