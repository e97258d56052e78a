"""Echo-TTS: exact padding, what matters, checkpoints, programs, and what leaves the step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from voicehub_aot.adapters import echo
from voicehub_aot.adapters.echo.net import LatentEncoder
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.split import split
from voicehub_aot.errors import CheckpointMismatch, InputMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.runtime.eager import EagerEvaluator
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.program import Combine, Evaluate, Program
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.synthetic import synthetic_weights

TINY = echo.CONFIGS["tiny"]
FRAMES, BYTES, PATCHES, PREFIX = 13, 9, 5, 4


def weights_of(config: Any) -> dict[str, Tensor]:
    """Synthetic, with per-head gains near one: `synthetic_weights` takes them for matrices, and attention goes flat."""
    weights = synthetic_weights(echo.checkpoint_shapes(config))
    return {k: 1 + 0.3 * v if k.endswith(("q_norm.weight", "k_norm.weight")) else v for k, v in weights.items()}


def region_of(config: Any = TINY) -> Region:
    return echo.region(config, weights_of(config))


def runtime_of(region: Region, *programs: Program) -> Runtime:
    return Runtime(region.spec, EagerEvaluator(region), {p.name: p for p in programs}, Buckets(axes={}))


def request(frames: int = FRAMES, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Region inputs of full rows after a prefix of two patches, nothing dropped."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator)

    return {
        "x": draw(frames, TINY.latent_size),
        "time": torch.tensor([0.3]),
        "text_state": draw(BYTES, TINY.text_model_size),
        "text_mask": torch.ones(rows, BYTES, dtype=torch.bool),
        "speaker_state": draw(PATCHES, TINY.speaker_model_size),
        "speaker_mask": torch.ones(rows, PATCHES, dtype=torch.bool),
        "speaker_scale": torch.ones(rows, TINY.num_layers),
        "hidden": torch.zeros(rows, frames, dtype=torch.bool),
        "lengths": torch.full((rows,), frames),
        "drop_text": torch.zeros(rows, dtype=torch.bool),
        "drop_speaker": torch.zeros(rows, dtype=torch.bool),
        "latent_state": draw(PREFIX, TINY.speaker_model_size),
        "latent_mask": torch.ones(rows, PREFIX, dtype=torch.bool),
        "start_pos": torch.full((rows,), 8),
    }


def padded(inputs: dict[str, Tensor], more: int) -> dict[str, Tensor]:
    """The same rows in tensors with `more` positions of garbage; the masks say that they are padding."""
    wider = dict(inputs)
    for name, tensor in inputs.items():
        if tensor.dim() >= 2 and name != "speaker_scale":
            wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + more, *tensor.shape[2:]), 0)
            if tensor.is_floating_point():
                wide = wide + 7.5
            wide[:, : tensor.shape[1]] = tensor
            wider[name] = wide
    return wider


def alter(tensor: Tensor) -> Tensor:
    """Another valid value: the first flag or mask entry flipped, a count one less, numbers moved."""
    if tensor.dtype == torch.bool:
        flipped = tensor.clone()
        flipped.view(-1)[0] = ~flipped.view(-1)[0]
        return flipped
    return tensor - 1 if tensor.dtype == torch.int64 else tensor + 0.3


# --- padding


@pytest.mark.parametrize("more", [1, 6, 19])
def test_a_row_in_larger_tensors_gives_what_it_gives_alone(more: int) -> None:
    module, inputs = region_of().module, request()
    velocity = module(**inputs)
    assert velocity.std() > 0.3
    torch.testing.assert_close(module(**padded(inputs, more))[:, :FRAMES], velocity, atol=5e-6, rtol=0)


def test_ragged_rows_do_not_see_each_other() -> None:
    module, counts = region_of().module, (FRAMES, 6, 1)
    alone = [request(frames, seed=frames) for frames in counts]
    wide = [
        padded({k: v for k, v in a.items() if k in ("x", "hidden")}, FRAMES - n)
        for a, n in zip(alone, counts, strict=True)
    ]
    both = {k: torch.cat([{**a, **w}[k] for a, w in zip(alone, wide, strict=True)]) for k in alone[0]}
    both["time"], both["start_pos"] = alone[0]["time"], torch.tensor([8, 8, 8])
    together = module(**both)
    for row, inputs in enumerate(alone):
        got = together[row : row + 1, : counts[row]]
        torch.testing.assert_close(got, module(**inputs), atol=5e-6, rtol=0)


# --- what matters


def test_each_input_matters() -> None:
    module, inputs = region_of().module, request()
    velocity = module(**inputs)
    moved = {key: (module(**inputs | {key: alter(value)}) - velocity).abs().max() for key, value in inputs.items()}
    assert not {key: change.item() for key, change in moved.items() if change < 1e-3}


def test_what_a_mask_hides_does_not_matter() -> None:
    module, inputs = region_of().module, request()
    for mask, state in (
        ("text_mask", "text_state"),
        ("speaker_mask", "speaker_state"),
        ("latent_mask", "latent_state"),
    ):
        masked = inputs | {mask: torch.arange(inputs[mask].shape[1])[None] < 1}
        other = masked[state].clone()
        other[:, 1:] += 3.0
        torch.testing.assert_close(module(**masked | {state: other}), module(**masked), atol=0, rtol=0)


def test_a_dropped_condition_is_a_fully_masked_one() -> None:
    module, inputs = region_of().module, request()
    for name in ("text", "speaker"):
        dropped = module(**inputs | {f"drop_{name}": torch.tensor([True])})
        masked = module(**inputs | {f"{name}_mask": torch.zeros_like(inputs[f"{name}_mask"])})
        torch.testing.assert_close(dropped, masked, atol=0, rtol=0)


def test_only_patches_before_the_start_are_seen() -> None:
    """Start 8: patches 0 and 1 of 4 frames each."""
    module, inputs = region_of().module, request()
    other = inputs["latent_state"].clone()
    other[:, 2:] += 3.0
    torch.testing.assert_close(module(**inputs | {"latent_state": other}), module(**inputs), atol=0, rtol=0)
    later = inputs | {"start_pos": torch.tensor([9])}
    assert (module(**later | {"latent_state": other}) - module(**later)).abs().max() > 1e-3


def test_without_a_prefix_the_blockwise_region_is_the_plain_one() -> None:
    plain, blockwise, inputs = region_of(replace(TINY, blockwise=False)), region_of(), request()
    assert {i.name for i in blockwise.spec.inputs} - {i.name for i in plain.spec.inputs} == {
        "latent_state",
        "latent_mask",
        "start_pos",
    }
    without = {k: v for k, v in inputs.items() if k in {i.name for i in plain.spec.inputs}}
    none = inputs | {"start_pos": torch.tensor([0])}
    torch.testing.assert_close(blockwise.module(**none), plain.module(**without), atol=2e-6, rtol=0)


def test_optional_inputs_left_out_change_nothing() -> None:
    runtime = runtime_of(region_of(), echo.program(3))
    given = {k: v for k, v in request().items() if "drop" not in k and k not in ("x", "time")}
    plain = {k: v for k, v in given.items() if k.endswith(("_state", "_mask")) and "latent" not in k}
    none = given | {"start_pos": torch.tensor([0])}
    x = request()["x"]
    torch.testing.assert_close(runtime.evaluate(x, 0.3, **plain), runtime.evaluate(x, 0.3, **none), atol=2e-6, rtol=0)


def test_the_latent_encoder_sees_no_later_patch() -> None:
    encoder = LatentEncoder(TINY).eval()
    latents = torch.randn(1, 16, TINY.latent_size)
    longer = torch.cat((latents, torch.randn(1, 8, TINY.latent_size)), dim=1)
    with torch.no_grad():
        state = encoder(latents)
        assert state.shape == (1, 4, TINY.speaker_model_size)
        torch.testing.assert_close(encoder(longer)[:, :4], state, atol=1e-6, rtol=0)


# --- checkpoints


def whole(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With entries of the model's other parts, as released."""
    others = ("text_encoder.text_embedding.weight", "speaker_encoder.in_proj.bias", "latent_norm.weight")
    return {**weights, **{key: torch.zeros(3) for key in others}}


def test_the_released_denoiser_has_the_audited_size() -> None:
    released = echo.CONFIGS["echo-tts-base"]
    for blockwise, tensors, parameters in ((True, 824, 1_918_570_576), (False, 776, 1_792_741_456)):
        shapes = echo.checkpoint_shapes(replace(released, blockwise=blockwise))
        assert len(shapes) == tensors
        assert sum(math.prod(s) for s in shapes.values()) == parameters


@pytest.mark.parametrize("form", ["released folder", "file", "pickle"])
def test_every_checkpoint_form_gives_the_same_region(form: str, tmp_path: Path) -> None:
    weights = weights_of(TINY)
    path = tmp_path / ("model.pt" if form == "pickle" else "pytorch_model.safetensors")
    if form == "pickle":
        torch.save(whole(weights), path)
    else:
        save_file(whole(weights), path)
        save_file({"pca_mean": torch.zeros(2)}, tmp_path / "pca_state.safetensors")
    found, read = echo.read_checkpoint(tmp_path if form == "released folder" else path, None)
    # the shapes do not tell the encoders' depths
    assert (found.sizes, found.blockwise) == (TINY.sizes, True)
    state = echo.region(found, read).module.state_dict()
    assert set(state) == set(weights)
    assert all(torch.equal(state[key], tensor) for key, tensor in weights.items())


def test_half_precision_weights_become_float32() -> None:
    half = {k: v.bfloat16() for k, v in weights_of(TINY).items()}
    module = echo.region(TINY, half).module
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in module.parameters())


def test_the_prefix_needs_all_its_weights_or_none(tmp_path: Path) -> None:
    weights = weights_of(TINY)
    plain = {k: v for k, v in weights.items() if "_latent." not in k}
    save_file(plain, tmp_path / "pytorch_model.safetensors")
    found, read = echo.read_checkpoint(tmp_path, "tiny")
    assert not found.blockwise
    for config, given in ((found, read), (TINY, plain), (found, weights)):
        assert "latent_state" not in {i.name for i in echo.region(config, given).spec.inputs}
    with pytest.raises(CheckpointMismatch, match=r"5 missing: .*wk_latent"):
        echo.region(
            TINY, plain | {"blocks.1.attention.wv_latent.weight": weights["blocks.1.attention.wv_latent.weight"]}
        )


def test_everything_wrong_with_a_checkpoint_is_in_one_error() -> None:
    weights = whole(weights_of(TINY))
    del weights["out_proj.bias"]
    weights["blocks.0.surprise"] = torch.zeros(1)
    weights["blocks.1.mlp.w2.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointMismatch) as caught:
        echo.region(TINY, weights)
    for words in (
        "1 missing: out_proj.bias",
        "1 unexpected: blocks.0.surprise",
        "1 mis-shaped: ",
        "[3], wanted [64, 112]",
    ):
        assert words in str(caught.value)


def test_what_is_no_checkpoint_of_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"no pytorch_model\.safetensors"):
        echo.read_checkpoint(tmp_path, None)
    with pytest.raises(UnknownModel, match="echo-tts-base"):
        echo.read_checkpoint(tmp_path, "no_such")
    save_file({"blocks.0.attention.wq.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointMismatch, match="holds a LoRA"):
        echo.read_checkpoint(tmp_path, None)
    save_file({"x": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"several checkpoints \(a\.safetensors, b\.safetensors\)"):
        echo.read_checkpoint(tmp_path, None)
    torch.save({"optimizer": {"lr": 1.0}}, tmp_path / "c.pt")
    with pytest.raises(CheckpointMismatch, match="'optimizer' is a dict"):
        echo.read_checkpoint(tmp_path / "c.pt", None)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"num_layerz": 3}, "num_layerz"), ({"num_heads": 3}, "even number of channels"), ({"adaln_rank": 0}, "rank=0")],
)
def test_config_errors_say_what_is_known(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        echo.config_from({**vars(TINY), **change})


# --- programs


def branches(program: Program) -> list[tuple[str, ...] | None]:
    return [i.against for i in program.instructions if isinstance(i, Evaluate)]


def test_the_default_program_is_the_released_loop() -> None:
    program = echo.program(40)
    assert (program.evaluations, program.schedule[0], program.schedule[-1]) == (40, pytest.approx(0.999), 0.0)
    assert program.schedule[10] == pytest.approx(0.999 * 0.75, abs=1e-7)
    assert program.times == program.schedule[:-1]
    guided = [t >= 0.5 for t in program.times]
    assert branches(program) == [None if inside else () for inside in guided]
    assert sum(guided) == 20  # t = 0.999 * (1 - i / 40)


def test_the_guidance_window_is_closed() -> None:
    grid = echo.program(5).schedule
    program = echo.program(5, cfg_min_t=grid[3], cfg_max_t=grid[1])
    assert branches(program) == [(), None, None, None, ()]


def test_times_are_rounded_as_the_model_gets_them_but_not_the_steps() -> None:
    plain, rounded = echo.program(40), echo.program(40, time_dtype="bfloat16")
    assert rounded.schedule == plain.schedule
    assert rounded.times == tuple(torch.tensor(plain.times).bfloat16().double().tolist())
    assert max(abs(a - b) for a, b in zip(rounded.times, plain.times, strict=True)) > 1e-3
    combined = [[i.terms for i in p.instructions if isinstance(i, Combine)] for p in (plain, rounded)]
    assert combined[0] == combined[1]


def test_the_temporal_score_rescale_mixes_the_state_into_the_step() -> None:
    """v' = (r ((1 - t) v + x) - x) / (1 - t), r = (s sigma^2 + 1) / (s sigma^2 / k + 1), s = (1 - t)^2 / t^2."""
    program = echo.program(4, rescale_k=1.2, rescale_sigma=3.0)
    runtime = runtime_of(region_of(), program)
    inputs = request()
    given = {k: v for k, v in inputs.items() if k.endswith(("_state", "_mask")) and "latent" not in k}
    x, *states = inputs["x"], *runtime.trajectory(noise=inputs["x"], guidance=0.0, **given)
    for t, after, got in zip(program.schedule, program.schedule[1:], states, strict=False):
        v = runtime.evaluate(x, t, **given)
        snr = (1 - t) ** 2 / t**2
        r = (snr * 9 + 1) / (snr * 9 / 1.2 + 1)
        x = x + (r * ((1 - t) * v + x) - x) / (1 - t) * (after - t)
        torch.testing.assert_close(got, x, atol=2e-4, rtol=2e-4)
        x = got


@pytest.mark.parametrize(
    "options", [{"time_dtype": "float16"}, {"cfg_mint": 0.1}, {"rescale_k": 0.0, "rescale_sigma": 1}]
)
def test_unknown_options_and_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionUnsupported, match=next(iter(options))):
        echo.program(4, **options)


def test_guidance_is_against_the_text_and_the_speaker_and_can_be_changed_by_name() -> None:
    runtime, inputs = runtime_of(region_of(), echo.program(4)), request(rows=2)
    given = {k: v for k, v in inputs.items() if k.endswith(("_state", "_mask")) and "latent" not in k}
    c, no_text, no_speaker = runtime.evaluate(inputs["x"], 0.3, packed=True, **given).chunk(3)
    want = c + 2.0 * (c - no_text) + 0.5 * (c - no_speaker)
    got = runtime.evaluate(inputs["x"], 0.3, guidance={"text": 2.0, "speaker": 0.5}, **given)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    first = next(iter(runtime.trajectory(noise=inputs["x"], **given)))
    t, after = echo.program(4).schedule[:2]
    c, no_text, no_speaker = runtime.evaluate(inputs["x"], t, packed=True, **given).chunk(3)
    want = inputs["x"] + (after - t) * (c + 3.0 * (c - no_text) + 8.0 * (c - no_speaker))
    torch.testing.assert_close(first, want, atol=1e-4, rtol=1e-5)


# --- upstream's call, and the split


def test_the_denoiser_takes_upstreams_call() -> None:
    runtime, inputs = runtime_of(region_of(), echo.program(4)), request(rows=2)
    x, text, speaker = inputs["x"], inputs["text_state"], inputs["speaker_state"]
    masks = (inputs["text_mask"], inputs["speaker_mask"])
    got = runtime.denoiser()(x, torch.tensor([0.3, 0.3]), *masks, kv_cache_text=text, kv_cache_speaker=speaker)
    given = {"text_state": text, "speaker_state": speaker, "text_mask": masks[0], "speaker_mask": masks[1]}
    torch.testing.assert_close(got, runtime.evaluate(x, 0.3, **given), atol=0, rtol=0)
    with pytest.raises(InputMismatch, match="start_pos"):
        runtime.denoiser()(x, torch.tensor([0.3]), *masks, text, speaker, start_pos=4)


def test_modulations_and_conditioning_leave_the_step() -> None:
    region = region_of()
    stages = split(*_exported(region))
    of_table, of_prepare, of_step = (set(s.constants) for s in (stages.table, stages.prepare, stages.step))
    assert stages.mixed is None
    assert [o.shape for o in stages.table.outputs] == [(2 * TINY.num_layers, 3, 1, TINY.model_size)]
    assert not any("adaln" in k or "cond_module" in k for k in of_prepare | of_step)
    assert not any("_text" in k or "_speaker" in k or "_latent" in k for k in of_table | of_step)
    weights = sum(t.numel() for k, t in stages.step.constants.items())
    projections = 5 * TINY.model_size**2 + 3 * TINY.model_size * TINY.intermediate_size
    norms = 2 * TINY.model_size
    border = (2 * TINY.model_size + 1) * TINY.latent_size + 2 * TINY.model_size  # in_proj, out_proj, out_norm
    assert weights == TINY.num_layers * (projections + norms) + border


def _exported(region: Region) -> tuple[Any, Any, Any]:
    graph, symbols = export_region(region)
    return graph, region.spec, symbols
