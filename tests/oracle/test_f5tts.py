"""F5-TTS and E2-TTS against the package f5-tts itself: its networks, its configurations, its sampling loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import pytest
import torch
from oracle.upstream import load
from safetensors.torch import save_file
from torch import Tensor, nn

import voicehub_aot
from voicehub_aot.adapters import f5tts
from voicehub_aot.adapters.f5tts.checkpoint import PREFIX
from voicehub_aot.compiler import models
from voicehub_aot.compiler.build import build
from voicehub_aot.compiler.options import Options
from voicehub_aot.errors import ProgramNotBuilt
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.moments import TIME_TOLERANCE
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.synthetic import synthetic_weights
from voicehub_aot.spec.target import default_target, parse_target

pytestmark = pytest.mark.oracle

TINY = f5tts.CONFIGS["tiny"]
UNETT = f5tts.config_from(
    {"dim": 64, "depth": 4, "heads": 4, "dim_head": 16, "mel_dim": 20, "text_num_embeds": 24, "pe_attn_head": 1}
)


def changed(config: Any, **changes: Any) -> Any:
    return f5tts.config_from({**vars(config), **changes})


VARIANTS = {
    "v1": TINY,
    "v0": changed(TINY, text_mask_padding=False, pe_attn_head=1),
    "masked keys": changed(TINY, attn_mask_enabled=True, qk_norm="rms_norm"),
    "long skip": changed(TINY, long_skip_connection=True, conv_layers=0),
    "unett": UNETT,
    "unett with text convolutions": changed(UNETT, conv_layers=2, text_mask_padding=False, skip_connect_type="add"),
    "unett with masked keys": changed(UNETT, conv_layers=2, attn_mask_enabled=True, skip_connect_type="none"),
}
CALLS: Mapping[str, Mapping[str, bool]] = {
    "conditional": {},
    "packed": {"cfg_infer": True},
    "without audio": {"drop_audio_cond": True},
    "without text": {"drop_text": True},
    "unconditional": {"drop_audio_cond": True, "drop_text": True},
}
BATCHES: Mapping[str, tuple[list[int], bool]] = {  # frames of each row, and whether upstream is given a mask
    "alone": ([19], False),
    "alone with a mask": ([19], True),
    "one frame": ([1], False),
    "two full rows": ([23, 23], False),
    "ragged": ([23, 9, 1], True),
}
TOKENS = [12, 7, 3]  # of each row: more than some rows have frames


@pytest.fixture(scope="module")
def f5() -> Any:
    return load("f5_tts.model")


def weights_of(config: Any) -> dict[str, Tensor]:
    """Synthetic, with UNetT's gains near one: `synthetic_weights` takes them for biases."""
    weights = {**synthetic_weights(f5tts.checkpoint_shapes(config)), **f5tts.formula_weights(config)}
    return {k: 1 + v if k.endswith(".g") else v for k, v in weights.items()}


def upstream_network(f5: Any, config: Any, weights: Mapping[str, Tensor]) -> nn.Module:
    """Upstream's class with exactly these weights, shared and not copied."""
    arguments = {name: value for name, value in vars(config).items() if name != "backbone"}
    network: nn.Module = getattr(f5, config.backbone)(**arguments)
    network.load_state_dict({k.removeprefix(PREFIX): v for k, v in weights.items()}, assign=True)
    return network.eval().requires_grad_(False)


def call_of(config: Any, frames: list[int], masked: bool, seed: int = 0) -> dict[str, Any]:
    """Random arguments of upstream's forward, garbage in the padding of x and cond included."""
    generator = torch.Generator().manual_seed(seed)
    rows, size = len(frames), max(frames)
    text = torch.randint(0, config.text_num_embeds, (rows, max(TOKENS[:rows])), generator=generator)
    for row, tokens in enumerate(TOKENS[:rows]):
        text[row, tokens:] = -1
    return {
        "x": torch.randn(rows, size, config.mel_dim, generator=generator),
        "cond": torch.randn(rows, size, config.mel_dim, generator=generator),
        "text": text,
        "time": torch.tensor(0.3),
        "mask": torch.arange(size) < torch.tensor(frames)[:, None] if masked else None,
    }


def eager(config: Any, weights: Mapping[str, Tensor], *programs: Program) -> Runtime:
    return eager_runtime(f5tts.region(config, weights), programs or (f5tts.program(7),), "f5tts")


# --- one evaluation


@pytest.mark.filterwarnings("ignore:attn_mask_enabled=True:UserWarning")  # upstream's advice about GPU memory
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_evaluation_is_upstreams(f5: Any, name: str, batch: str) -> None:
    config, weights = VARIANTS[name], weights_of(VARIANTS[name])
    theirs, ours = upstream_network(f5, config, weights), eager(config, weights).denoiser()
    for flags in CALLS.values():
        arguments = {**call_of(config, *BATCHES[batch]), **flags}
        wanted = theirs(**arguments)
        assert wanted.std() > 0.3
        torch.testing.assert_close(ours(**arguments), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["v1", "v0", "unett"])
def test_rows_at_different_times_are_upstreams(f5: Any, name: str) -> None:
    config, weights = VARIANTS[name], weights_of(VARIANTS[name])
    arguments = {**call_of(config, *BATCHES["ragged"]), "time": torch.tensor([0.0, 0.97, 0.25]), "cfg_infer": True}
    theirs, ours = upstream_network(f5, config, weights), eager(config, weights).denoiser()
    torch.testing.assert_close(ours(**arguments), theirs(**arguments), atol=1e-5, rtol=0)


def test_the_rotary_table_of_a_checkpoint_is_the_one_upstream_computes(f5: Any) -> None:
    for dim_head in (16, 64):
        config = changed(TINY, dim_head=dim_head)
        computed = f5.DiT(**{k: v for k, v in vars(config).items() if k != "backbone"}).rotary_embed.inv_freq
        (ours,) = f5tts.formula_weights(config).values()
        torch.testing.assert_close(ours, computed, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["F5TTS_v1_Base", "F5TTS_Base", "E2TTS_Base"])
def test_released_configurations_are_upstreams(f5: Any, name: str) -> None:
    model = load("yaml").safe_load(files("f5_tts").joinpath(f"configs/{name}.yaml").read_text())["model"]
    vocabulary = files("f5_tts").joinpath("infer/examples/vocab.txt").read_text(encoding="utf-8")
    mel_dim = model["mel_spec"]["n_mel_channels"]
    sizes = {"mel_dim": mel_dim, "text_num_embeds": len(vocabulary.removesuffix("\n").split("\n"))}
    assert f5tts.config_from({**model["arch"], **sizes, "backbone": model["backbone"]}) == f5tts.CONFIGS[name]


@pytest.mark.slow
def test_an_evaluation_at_released_size_is_upstreams(f5: Any) -> None:
    config = f5tts.CONFIGS["F5TTS_v1_Base"]
    weights = weights_of(config)
    arguments = {**call_of(config, [128], masked=False), "cfg_infer": True}
    wanted = upstream_network(f5, config, weights)(**arguments)
    assert wanted.std() > 0.3
    ours = eager(config, weights).denoiser()(**arguments)
    torch.testing.assert_close(ours, wanted, atol=5e-5, rtol=0)  # upstream itself is 5e-5 away from float64 here


# --- the sampling loop


class Clock(nn.Module):
    """Stands in for a transformer, and writes down the times at which the loop evaluates it."""

    dim = 1

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.empty(0))
        self.times: list[float] = []

    def clear_cache(self) -> None:
        pass

    def forward(self, *, x: Tensor, time: Tensor, **_: Any) -> Tensor:
        self.times.append(float(time))
        return torch.zeros_like(x)


def loop_of(f5: Any, transformer: nn.Module, mel_dim: int, solver: str = "euler") -> Any:
    return f5.CFM(transformer, num_channels=mel_dim, odeint_kwargs={"method": solver})


def upstream_times(f5: Any, steps: int, solver: str, grid: str, sway: float | None) -> list[float]:
    clock = Clock()
    cond, text = torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.int64)
    loop_of(f5, clock, 2, solver).sample(
        cond, text, 2, steps=steps, cfg_strength=0.0, sway_sampling_coef=sway, use_epss=grid == "epss"
    )
    return clock.times


@pytest.mark.parametrize("sway", [None, -1.0, 0.4])
@pytest.mark.parametrize("grid", ["epss", "linear"])
def test_evaluation_times_are_upstreams(f5: Any, grid: str, sway: float | None) -> None:
    for steps in range(1, 65):
        program = f5tts.program(steps, grid=grid, sway=sway or 0.0)
        assert list(program.times) == upstream_times(f5, steps, "euler", grid, sway)


def test_midpoint_evaluation_times_are_upstreams(f5: Any) -> None:
    for steps in (1, 4, 7, 16, 32):
        program = f5tts.program(steps, solver="midpoint")
        wanted = upstream_times(f5, steps, "midpoint", "epss", -1.0)
        assert list(program.times) == pytest.approx(wanted, abs=TIME_TOLERANCE / 5, rel=0)


PROGRAMS = (*(f5tts.program(n) for n in (7, 32)), f5tts.program(4, solver="midpoint"))
REQUESTS: Mapping[str, dict[str, list[int]]] = {
    "alone": {"prompt": [11], "duration": [37]},
    "ragged": {"prompt": [11, 6], "duration": [41, 23]},
}
SETTINGS: Mapping[str, dict[str, Any]] = {
    "released": {"steps": 32, "cfg_strength": 2.0},
    "pruned": {"steps": 7, "cfg_strength": 2.0},
    "unguided": {"steps": 7, "cfg_strength": 0.0},
    "midpoint": {"steps": 4, "cfg_strength": 1.3, "solver": "midpoint"},
}


def sample_with(f5: Any, transformers: list[nn.Module], config: Any, request: str, setting: str) -> list[Any]:
    """CFM.sample's result and trajectory, once with each transformer in its place."""
    chosen, settings = REQUESTS[request], dict(SETTINGS[setting])
    given = call_of(config, chosen["prompt"], masked=False)
    lens, duration = torch.tensor(chosen["prompt"]), torch.tensor(chosen["duration"])
    loop = loop_of(f5, transformers[0], config.mel_dim, settings.pop("solver", "euler"))
    results = []
    for transformer in transformers:
        loop.transformer = transformer
        results.append(
            loop.sample(given["cond"], given["text"], duration, lens=lens, seed=5, sway_sampling_coef=-1.0, **settings)
        )
    return results


@pytest.fixture(scope="module", params=[("v1", "F5TTS_v1_Base"), ("unett", "E2TTS_Base")], ids=["v1", "unett"])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, dict[str, Tensor], Runtime]:
    """A tiny configuration, its weights, and the artifact built from them, laid out as released."""
    variant, released = request.param
    config, weights, folder = VARIANTS[variant], weights_of(VARIANTS[variant]), tmp_path_factory.mktemp("f5tts")
    (folder / "config.json").write_text(json.dumps(vars(config)))
    (folder / released).mkdir()
    save_file(weights, folder / released / "model_1.safetensors")
    model = models.resolve("f5tts", str(folder / "config.json"), str(folder / released))
    options = Options(
        buckets=Buckets(axes={"frames": (64,)}),
        programs=PROGRAMS,
        target=parse_target(default_target()),
        weights_mode="shared",
        parity=False,
    )
    build(model, options, folder / "artifact")
    return config, weights, voicehub_aot.load(folder / "artifact")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_an_artifact_samples_in_upstreams_loop(f5: Any, built: Any, request_name: str, setting: str) -> None:
    config, weights, runtime = built
    theirs = upstream_network(f5, config, weights)
    (wanted, path), (mel, our_path) = sample_with(f5, [theirs, runtime.denoiser()], config, request_name, setting)
    torch.testing.assert_close(our_path, path, atol=1e-4, rtol=0)
    torch.testing.assert_close(mel, wanted, atol=1e-4, rtol=0)


def test_upstreams_loop_with_times_that_were_not_built_is_refused(f5: Any, built: Any) -> None:
    config, _, runtime = built
    loop = loop_of(f5, Clock(), config.mel_dim)
    loop.transformer = runtime.denoiser()
    given = call_of(config, [11], masked=False)
    with pytest.raises(ProgramNotBuilt, match="rebuild with the step count"):
        loop.sample(given["cond"], given["text"], 37, steps=9, sway_sampling_coef=-1.0)


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("setting", ["pruned", "midpoint"])
@pytest.mark.parametrize("name", ["v1", "v0", "unett"])
def test_the_eager_runtime_samples_in_upstreams_loop(f5: Any, name: str, setting: str, request_name: str) -> None:
    config, weights = VARIANTS[name], weights_of(VARIANTS[name])
    theirs, ours = upstream_network(f5, config, weights), eager(config, weights).denoiser()
    (wanted, _), (mel, _) = sample_with(f5, [theirs, ours], config, request_name, setting)
    torch.testing.assert_close(mel, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_our_loop_gives_upstreams_result(f5: Any, built: Any, setting: str, request_name: str) -> None:
    """`Runtime.sample` from upstream's noise on, without upstream's loop."""
    config, weights, runtime = built
    ((_, path),) = sample_with(f5, [upstream_network(f5, config, weights)], config, request_name, setting)
    chosen, settings = REQUESTS[request_name], SETTINGS[setting]
    given = call_of(config, chosen["prompt"], masked=False)
    known = torch.arange(max(chosen["prompt"])) < torch.tensor(chosen["prompt"])[:, None]
    final = runtime.sample(
        noise=path[0],
        lengths=chosen["duration"],
        extent=[max(chosen["duration"])] * len(chosen["duration"]),
        program=f"{settings.get('solver', 'euler')}-{settings['steps']}",
        guidance=settings["cfg_strength"],
        cond=given["cond"] * known[..., None],
        text=given["text"],
    )
    torch.testing.assert_close(final, path[-1], atol=1e-4, rtol=0)
