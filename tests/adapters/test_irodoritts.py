"""Irodori-TTS in its conditioning sets: exact padding, what matters, checkpoints, programs, what leaves the step."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from voicehub_aot.adapters import irodoritts
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.split import split
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.runtime.eager import EagerEvaluator
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.program import Evaluate, Program
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.synthetic import synthetic_weights

TINY, CAPTION = irodoritts.CONFIGS["tiny"], irodoritts.CONFIGS["tiny-caption"]
VARIANTS = {
    "speaker": TINY,
    "speaker and caption": CAPTION,
    "caption": replace(CAPTION, use_speaker_condition=None),
}
FRAMES, COUNTS = 13, {"text": 9, "speaker": 5, "caption": 7}


def weights_of(config: Any) -> dict[str, Tensor]:
    """Synthetic, with per-head gains near one: `synthetic_weights` takes them for matrices, and attention goes flat."""
    weights = synthetic_weights(irodoritts.checkpoint_shapes(config))
    return {k: 1 + 0.3 * v if k.endswith(("q_norm.weight", "k_norm.weight")) else v for k, v in weights.items()}


def region_of(config: Any = TINY) -> Region:
    return irodoritts.region(config, weights_of(config))


def runtime_of(region: Region, *programs: Program) -> Runtime:
    return Runtime(region.spec, EagerEvaluator(region), {p.name: p for p in programs}, Buckets(axes={}))


def request(config: Any, frames: int = FRAMES, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Region inputs of full rows, nothing dropped."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator)

    inputs = {
        "x_t": draw(frames, config.latent_dim),
        "time": torch.tensor([0.3]),
        "hidden": torch.zeros(rows, frames, dtype=torch.bool),
        "lengths": torch.full((rows,), frames),
    }
    for name, width in config.sizes.context.items():
        inputs[f"{name}_state"] = draw(COUNTS[name], width)
        inputs[f"{name}_mask"] = torch.ones(rows, COUNTS[name], dtype=torch.bool)
        inputs[f"drop_{name}"] = torch.zeros(rows, dtype=torch.bool)
    return inputs | ({"speaker_scale": torch.ones(rows, config.num_layers)} if "speaker" in config.conditions else {})


def conditioning(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in inputs.items() if k.endswith(("_state", "_mask"))}


def padded(inputs: dict[str, Tensor], more: int) -> dict[str, Tensor]:
    """The same rows in tensors with `more` positions of garbage; the masks say that they are padding."""
    wider = dict(inputs)
    for name, tensor in inputs.items():
        if tensor.dim() >= 2 and name != "speaker_scale":
            garbage = 7.5 if tensor.is_floating_point() else False
            wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + more, *tensor.shape[2:]), garbage)
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


# --- padding and what matters


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_in_larger_tensors_gives_what_it_gives_alone(name: str) -> None:
    config, module = VARIANTS[name], region_of(VARIANTS[name]).module
    inputs = request(config)
    velocity = module(**inputs)
    assert velocity.std() > 0.3
    for more in (1, 6, 19):
        torch.testing.assert_close(module(**padded(inputs, more))[:, :FRAMES], velocity, atol=5e-6, rtol=0)


def test_a_shorter_row_of_a_batch_gives_what_it_gives_alone() -> None:
    module, long, short = region_of(CAPTION).module, request(CAPTION), request(CAPTION, 6, seed=6)
    wide = short | padded({k: short[k] for k in ("x_t", "hidden")}, FRAMES - 6)
    both = {k: v if k == "time" else torch.cat((v, wide[k])) for k, v in long.items()}
    together = module(**both)
    torch.testing.assert_close(together[:1], module(**long), atol=5e-6, rtol=0)
    torch.testing.assert_close(together[1:, :6], module(**short), atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_input_matters(name: str) -> None:
    config, module = VARIANTS[name], region_of(VARIANTS[name]).module
    inputs = request(config)
    assert set(inputs) == {i.name for i in region_of(config).spec.inputs}
    velocity = module(**inputs)
    moved = {key: (module(**inputs | {key: alter(value)}) - velocity).abs().max() for key, value in inputs.items()}
    assert not {key: change.item() for key, change in moved.items() if change < 1e-3}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_dropped_condition_is_a_fully_masked_one(name: str) -> None:
    config, module = VARIANTS[name], region_of(VARIANTS[name]).module
    inputs = request(config)
    for condition in config.conditions:
        dropped = module(**inputs | {f"drop_{condition}": torch.tensor([True])})
        mask, state = f"{condition}_mask", f"{condition}_state"
        masked = inputs | {mask: torch.zeros_like(inputs[mask])}
        torch.testing.assert_close(dropped, module(**masked), atol=0, rtol=0)
        zeroed = masked | {state: torch.zeros_like(inputs[state])}  # what upstream evaluates
        torch.testing.assert_close(module(**zeroed), module(**masked), atol=0, rtol=0)


def test_hidden_frames_are_computed_but_not_seen() -> None:
    """A mask with holes: what stands in them changes their own velocity alone."""
    module, inputs = region_of().module, request(TINY)
    inputs["hidden"][:, [2, 9]] = True
    other = inputs["x_t"].clone()
    other[:, [2, 9]] += 1.0
    before, after = module(**inputs), module(**inputs | {"x_t": other})
    seen = ~inputs["hidden"][0]
    torch.testing.assert_close(after[:, seen], before[:, seen], atol=0, rtol=0)
    assert ((after - before)[:, ~seen].abs().amax(-1) > 1e-2).all()


# --- checkpoints


def whole(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With entries of the model's other parts, as released."""
    others = ("text_encoder.text_embedding.weight", "caption_norm.weight", "duration_predictor.output.bias")
    return {**weights, **{key: torch.zeros(3) for key in others}}


def flat(config: Any) -> dict[str, str]:
    """A released file's metadata: hyperparameters, those of other parts and of inference among them."""
    others = {"text_layers": 10, "dropout": 0.0, "duration_layers": 3, "max_text_len": 256}
    return {"config_json": json.dumps({**vars(config), **others})}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Irodori-TTS-500M-v3", 350_005_792),
        ("Irodori-TTS-500M-v2", 350_005_792),
        ("Irodori-TTS-600M-v3-VoiceDesign", 365_734_432),
        ("Irodori-TTS-500M-v2-VoiceDesign", 342_141_472),
    ],
)
def test_released_denoisers_have_the_audited_size(name: str, parameters: int) -> None:
    shapes = irodoritts.checkpoint_shapes(irodoritts.CONFIGS[name])
    assert sum(math.prod(s) for s in shapes.values()) == parameters


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("form", ["released", "trainer's", "without metadata"])
def test_every_checkpoint_form_gives_the_same_region(form: str, name: str, tmp_path: Path) -> None:
    config, weights = VARIANTS[name], weights_of(VARIANTS[name])
    path = tmp_path / ("model.pt" if form == "trainer's" else "model.safetensors")
    if form == "trainer's":
        torch.save({"model": whole(weights), "model_config": {**vars(config), "text_layers": 1}, "step": 3}, path)
    else:
        save_file(whole(weights), path, metadata=flat(config) if form == "released" else None)
    for wanted in (None, config):
        found, read = irodoritts.read_checkpoint(tmp_path, wanted)
        assert found.sizes == config.sizes
        state = irodoritts.region(found, read).module.state_dict()
        assert set(state) == set(weights)
        assert all(torch.equal(state[key], tensor) for key, tensor in weights.items())


def test_a_files_own_hyperparameters_are_taken_where_its_shapes_do_not_tell(tmp_path: Path) -> None:
    config = replace(TINY, norm_eps=1e-3, latent_dim=6, latent_patch_size=2)
    save_file(weights_of(config), tmp_path / "model.safetensors", metadata=flat(config))
    found, _ = irodoritts.read_checkpoint(tmp_path, None)
    assert (found.norm_eps, found.latent_dim, found.latent_patch_size) == (1e-3, 6, 2)


def test_everything_wrong_with_a_checkpoint_is_in_one_error() -> None:
    weights = whole(weights_of(TINY))
    del weights["out_norm.weight"]
    weights["blocks.0.attention.wk_caption.weight"] = torch.zeros(1)
    weights["cond_module.4.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointMismatch) as caught:
        irodoritts.region(TINY, weights)
    for words in (
        "1 missing: out_norm.weight",
        "1 unexpected: ",
        "wk_caption",
        "1 mis-shaped: ",
        "[3], wanted [144, 48]",
    ):
        assert words in str(caught.value)


def test_what_is_no_checkpoint_of_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="Irodori-TTS-500M-v3"):
        irodoritts.read_checkpoint(tmp_path, "no_such")
    torch.save({"model": {"base_model.model.in_proj.weight": torch.zeros(1)}}, tmp_path / "adapter.pt")
    with pytest.raises(CheckpointMismatch, match="holds a LoRA"):
        irodoritts.read_checkpoint(tmp_path, None)
    save_file(weights_of(TINY), tmp_path / "model.safetensors", metadata={"config_json": "{"})
    with pytest.raises(CheckpointMismatch, match="config_json is unreadable"):
        irodoritts.read_checkpoint(tmp_path, None)
    save_file(weights_of(TINY), tmp_path / "model.safetensors", metadata={"config_json": '{"num_heads": 0}'})
    with pytest.raises(CheckpointMismatch, match="heads=0"):
        irodoritts.read_checkpoint(tmp_path, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"text_dims": 3}, "text_dims"), ({"num_heads": 5}, "even number"), ({"text_dim": 0}, "text=0")],
)
def test_config_errors_say_what_is_known(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        irodoritts.config_from({**vars(TINY), **change})


def test_a_model_without_captions_has_a_speaker_unless_it_is_told() -> None:
    assert irodoritts.config_from({}).conditions == ("text", "speaker")
    assert irodoritts.config_from({"use_caption_condition": True}).conditions == ("text", "caption")
    assert irodoritts.config_from({"use_speaker_condition": False}).conditions == ("text",)


# --- programs


def branches(program: Program) -> list[tuple[str, ...] | None]:
    return [i.against for i in program.instructions if isinstance(i, Evaluate)]


def test_the_default_program_is_the_released_loop() -> None:
    program = irodoritts.program(40)
    assert (program.evaluations, program.schedule[0], program.schedule[-1]) == (40, pytest.approx(0.999), 0.0)
    assert program.times == program.schedule[:-1]
    assert branches(program) == [("text", "speaker", "caption")] * 20 + [()] * 20


def test_the_sway_grid_is_dense_at_the_noise() -> None:
    """t = 0.999 (1 - u), u' = u + c (cos(pi u / 2) + u - 1), c = -1."""
    schedule = irodoritts.program(6, t_schedule_mode="sway").schedule
    want = [0.999 * math.cos(math.pi / 2 * i / 6) for i in range(7)]
    assert schedule == pytest.approx(want, abs=1e-6)
    assert irodoritts.program(6).schedule == pytest.approx([0.999 * (1 - i / 6) for i in range(7)], abs=1e-6)


def test_modes_choose_the_branches_of_each_step() -> None:
    joint = irodoritts.program(4, cfg_guidance_mode="joint", cfg_min_t=0.3)
    assert branches(joint) == [("unconditional",), ("unconditional",), ("unconditional",), ()]
    options = {"cfg_guidance_mode": "alternating", "conditions": "text,speaker,caption", "cfg_min_t": 0.0}
    assert branches(irodoritts.program(4, **options)) == [("text",), ("speaker",), ("caption",), ("text",)]
    assert branches(irodoritts.program(2, conditions="")) == [(), ()]
    with pytest.raises(OptionUnsupported, match="name the model's conditions"):
        irodoritts.program(2, cfg_guidance_mode="alternating")


@pytest.mark.parametrize(
    "options",
    [
        {"cfg_guidance_mode": "fixed"},
        {"t_schedule_mode": "cosine"},
        {"conditions": "text,voice"},
        {"time_dtype": "float64"},
        {"sway_coef": 1.0},
        {"sway_coeff": 9.0, "t_schedule_mode": "sway"},
    ],
)
def test_unknown_options_and_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionUnsupported, match=next(iter(options))):
        irodoritts.program(4, **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_default_program_guides_against_what_the_model_has(name: str) -> None:
    config, program = VARIANTS[name], irodoritts.program(2)
    runtime, inputs = runtime_of(region_of(config), program), request(config)
    x, given, (t, after, *_) = inputs["x_t"], conditioning(inputs), program.schedule
    c, *others, _ = runtime.evaluate(x, t, packed=True, **given).chunk(2 + len(config.conditions))
    scales = [irodoritts.SCALES[condition] for condition in config.conditions]
    guided = c + sum(s * (c - other) for s, other in zip(scales, others, strict=True))
    first = next(iter(runtime.trajectory(noise=x, **given)))
    torch.testing.assert_close(first, x + (after - t) * guided, atol=1e-4, rtol=1e-5)


def test_each_mode_guides_with_the_scales_of_its_branches() -> None:
    region, inputs = region_of(CAPTION), request(CAPTION)
    programs = {
        mode: irodoritts.program(2, cfg_guidance_mode=mode, conditions="text,speaker,caption")
        for mode in irodoritts.MODES
    }
    x, given = inputs["x_t"], conditioning(inputs)
    for mode, program in programs.items():
        runtime = runtime_of(region, program)
        t, after = program.schedule[:2]
        c, *others = runtime.evaluate(x, t, packed=True, **given).chunk(5)
        without = dict(zip(("text", "speaker", "caption", "unconditional"), others, strict=True))
        scales = {"independent": {"text": 3, "speaker": 5, "caption": 3}, "alternating": {"text": 3}}
        guided = c + sum(s * (c - without[n]) for n, s in scales.get(mode, {"unconditional": 3}).items())
        first = next(iter(runtime.trajectory(noise=x, **given)))
        torch.testing.assert_close(first, x + (after - t) * guided, atol=1e-4, rtol=1e-5)


# --- upstream's call, and the split


def test_the_denoiser_takes_none_for_what_the_model_does_not_have() -> None:
    config = VARIANTS["caption"]
    runtime, inputs = runtime_of(region_of(config), irodoritts.program(4)), request(config)
    given = conditioning(inputs)
    text, caption = (tuple(given[f"{name}_{part}"] for part in ("state", "mask")) for name in ("text", "caption"))
    got = runtime.denoiser()(inputs["x_t"], torch.tensor([0.3]), *text, None, None, *caption)
    torch.testing.assert_close(got, runtime.evaluate(inputs["x_t"], 0.3, **given), atol=0, rtol=0)


def test_the_denoiser_takes_upstreams_call() -> None:
    runtime, inputs = runtime_of(region_of(CAPTION), irodoritts.program(4)), request(CAPTION, rows=2)
    given = conditioning(inputs)
    mask = torch.arange(FRAMES) < torch.tensor([[FRAMES], [8]])
    got = runtime.denoiser()(inputs["x_t"], torch.tensor([0.3, 0.3]), *given.values(), latent_mask=mask)
    want = runtime.evaluate(inputs["x_t"], 0.3, lengths=[FRAMES, 8], **given)
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    whole_row = runtime.denoiser()(x_t=inputs["x_t"], t=torch.tensor(0.3), latent_mask=None, **given)
    torch.testing.assert_close(whole_row, runtime.evaluate(inputs["x_t"], 0.3, **given), atol=0, rtol=0)
    assert (whole_row - got)[1].abs().max() > 1e-2


def test_modulations_and_conditioning_leave_the_step() -> None:
    region = region_of(CAPTION)
    graph, symbols = export_region(region)
    stages = split(graph, region.spec, symbols)
    assert stages.mixed is None
    assert [o.shape for o in stages.table.outputs] == [(2 * CAPTION.num_layers, 3, 1, CAPTION.model_dim)]
    assert not any("adaln" in k or "cond_module" in k for k in {**stages.prepare.constants, **stages.step.constants})
    assert not any("_text" in k or "_speaker" in k or "_caption" in k for k in stages.step.constants)
    c, inner = CAPTION, CAPTION.sizes.inner
    layer = 5 * c.model_dim**2 + 3 * c.model_dim * inner + 2 * c.model_dim
    border = (2 * c.model_dim + 1) * c.latent_dim + 2 * c.model_dim  # in_proj, out_proj, out_norm
    assert sum(t.numel() for t in stages.step.constants.values()) == c.num_layers * layer + border
