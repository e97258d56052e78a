"""VibeVoice's prediction head: rows alone; checkpoints; the program; one product a frame; upstream's call."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from voicehub_aot.adapters import vibevoice
from voicehub_aot.adapters.vibevoice import cases
from voicehub_aot.adapters.vibevoice.checkpoint import _sizes_of
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.flops import matrix_flops
from voicehub_aot.compiler.passes import all_evaluations
from voicehub_aot.compiler.split import split
from voicehub_aot.compiler.stages import Stages
from voicehub_aot.errors import CheckpointMismatch, InputMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.runtime.eager import EagerEvaluator
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.synthetic import synthetic_weights

TINY = vibevoice.CONFIGS["tiny"]
WEIGHTS = synthetic_weights(vibevoice.checkpoint_shapes(TINY))
PREFIX = "model.prediction_head."


def region_of(weights: Mapping[str, Tensor] = WEIGHTS) -> Region:
    return vibevoice.region(TINY, weights)


def runtime_of(program: Program | None = None) -> Runtime:
    region, program = region_of(), program or vibevoice.program(10)
    return Runtime(region.spec, EagerEvaluator(region), {program.name: program}, Buckets(axes={}))


def request(rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Region inputs of the conditional branch."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "noisy_images": torch.randn(rows, TINY.latent_size, generator=generator),
        "time": torch.tensor([600.0]),
        "condition": torch.randn(rows, TINY.hidden_size, generator=generator),
        "neg_condition": torch.randn(rows, TINY.hidden_size, generator=generator),
        "negative": torch.zeros(rows, dtype=torch.bool),
    }


def alter(tensor: Tensor) -> Tensor:
    return ~tensor if tensor.dtype == torch.bool else tensor + 0.3


def split_head() -> Stages:
    region = region_of()
    graph, symbols = export_region(region)
    return split(graph, region.spec, symbols)


# --- the network


def test_rows_do_not_see_each_other() -> None:
    module, alone = region_of().module, [request(seed=n) | {"negative": torch.tensor([n == 1])} for n in range(3)]
    batch = {key: alone[0][key] if key == "time" else torch.cat([row[key] for row in alone]) for key in alone[0]}
    together = module(**batch)
    assert together.std() > 0.3
    for row, inputs in enumerate(alone):
        torch.testing.assert_close(together[row : row + 1], module(**inputs), atol=2e-6, rtol=0)


def test_each_input_matters_to_the_branch_that_reads_it() -> None:
    module, inputs = region_of().module, request()

    def moved_by(inputs: dict[str, Tensor]) -> set[str]:
        out = module(**inputs)
        changes = {key: (module(**inputs | {key: alter(value)}) - out).abs().max() for key, value in inputs.items()}
        assert all(change > 1e-2 or change == 0 for change in changes.values())
        return {key for key, change in changes.items() if change > 0}

    assert moved_by(inputs) == set(inputs) - {"neg_condition"}
    assert moved_by(inputs | {"negative": torch.tensor([True])}) == set(inputs) - {"condition"}


def test_the_negative_branch_is_the_conditional_one_of_the_other_condition() -> None:
    module, inputs = region_of().module, request()
    swapped = inputs | {"condition": inputs["neg_condition"], "neg_condition": inputs["condition"]}
    negative = module(**inputs | {"negative": torch.tensor([True])})
    assert torch.equal(module(**swapped), negative)


# --- stages


def test_every_modulation_of_every_step_is_one_product_a_frame() -> None:
    """Beside it, `prepare` multiplies conditions by cond_proj, whatever the number of steps."""

    class Products(TorchDispatchMode):
        seen: list[tuple[int, int]]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
                self.seen.append((math.prod(out.shape[:-1]), out.shape[-1]))
            return out

    steps, rows, stages = 7, 3, split_head()
    prepare = all_evaluations.rewrite(stages, {}).prepare
    given = request(rows)
    tables = {o.name: torch.randn(steps, *o.shape) for o in stages.table.outputs}
    with torch.no_grad(), Products() as products:
        products.seen = []
        prepare({**given, **tables})
    width = TINY.hidden_size
    assert sorted(products.seen) == [(rows, width), (steps * rows, (3 * TINY.head_layers + 2) * width)]


def test_what_depends_on_time_and_condition_leaves_the_step() -> None:
    stages = split_head()
    assert stages.mixed is not None
    assert set(stages.mixed.constants) == {"modulations.weight"}
    assert {n for n in stages.table.constants if "t_embedder" in n} == {"t_embedder.0.weight", "t_embedder.2.weight"}
    assert set(stages.prepare.constants) == {"cond_proj.weight"}
    ends = {"noisy_images_proj.weight", "linear.weight"}
    assert {n.split(".")[-2] for n in set(stages.step.constants) - ends} == {"gate_up", "down", *"01"}
    modulations = ("B", (3 * TINY.head_layers + 2) * TINY.hidden_size)
    assert [v.shape for v in stages.step.inputs] == [("B", TINY.latent_size), modulations]
    width, inner, latent = TINY.hidden_size, TINY.inner, TINY.latent_size
    products = 2 * 2 * width * latent + 2 * 3 * TINY.head_layers * width * inner
    assert matrix_flops(stages.step, {"B": 1}, export_region(region_of())[1]) == products


# --- checkpoints


@pytest.mark.parametrize(
    ("name", "size"),
    [("VibeVoice-Realtime-0.5B", 42_094_080), ("VibeVoice-1.5B", 123_279_360), ("VibeVoice-Large", 669_333_504)],
)
def test_released_heads_have_the_audited_size(name: str, size: int) -> None:
    shapes = vibevoice.checkpoint_shapes(vibevoice.CONFIGS[name])
    assert sum(torch.Size(s).numel() for s in shapes.values()) == size


def renamed(prefix: str) -> dict[str, Tensor]:
    return {prefix + key.removeprefix(PREFIX): tensor for key, tensor in WEIGHTS.items()}


OTHERS = {"model.language_model.norm.weight": torch.ones(4), "model.speech_scaling_factor": torch.ones(())}


@pytest.mark.parametrize("form", ["whole model", "inner module", "head alone", "shards", "pickle"])
def test_every_checkpoint_form_gives_the_same_region(form: str, tmp_path: Path) -> None:
    path = tmp_path
    if form == "whole model":
        save_file(WEIGHTS | OTHERS, path / "model.safetensors")
    elif form == "inner module":
        path = path / "inner.safetensors"
        save_file(renamed("prediction_head.") | {"language_model.norm.weight": torch.ones(4)}, path)
    elif form == "head alone":
        path = path / "head.safetensors"
        save_file(renamed(""), path)
    elif form == "pickle":
        path = path / "pytorch_model.bin"
        torch.save(WEIGHTS | OTHERS, path)
    else:  # the language model's shard is not there, and not missed
        keys = sorted(WEIGHTS)
        shards = {"model-00002-of-00003.safetensors": keys[::2], "model-00003-of-00003.safetensors": keys[1::2]}
        for name, part in shards.items():
            save_file({key: WEIGHTS[key] for key in part} | OTHERS, path / name)
        index = {key: name for name, part in shards.items() for key in part}
        index["model.language_model.embed_tokens.weight"] = "model-00001-of-00003.safetensors"
        (path / vibevoice.INDEX).write_text(json.dumps({"weight_map": index}))
    found, read = vibevoice.read_checkpoint(path, None)
    assert found == TINY
    state = vibevoice.region(found, read).module.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in region_of().module.state_dict().items())


def test_bfloat16_weights_become_float32() -> None:
    module = region_of({key: tensor.bfloat16() for key, tensor in WEIGHTS.items()}).module
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in module.parameters())


def test_the_release_is_told_by_its_width() -> None:
    for config in vibevoice.CONFIGS.values():
        shapes = vibevoice.checkpoint_shapes(config)
        bare = {key.removeprefix(PREFIX): torch.empty(shape, device="meta") for key, shape in shapes.items()}
        assert [c for c in vibevoice.CONFIGS.values() if _sizes_of(bare, c) == c] == [config]


def test_sizes_of_no_release_are_found_too(tmp_path: Path) -> None:
    config = vibevoice.config_from({"hidden_size": 20, "head_layers": 3, "head_ffn_ratio": 1.5, "latent_size": 5})
    save_file(synthetic_weights(vibevoice.checkpoint_shapes(config)), tmp_path / "model.safetensors")
    assert vibevoice.read_checkpoint(tmp_path, None)[0] == config


def test_everything_wrong_with_a_checkpoint_is_in_one_error() -> None:
    weights = dict(WEIGHTS)
    del weights[f"{PREFIX}final_layer.linear.weight"]
    weights[f"{PREFIX}layers.0.ffn.gate_proj.lora_A.weight"] = torch.zeros(1)
    weights[f"{PREFIX}layers.1.norm.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointMismatch) as caught:
        region_of(weights)
    for words in ("1 missing: ", "final_layer.linear.weight", "1 unexpected: ", "lora_A", "[3], wanted [24]"):
        assert words in str(caught.value)


def test_a_damaged_index_and_a_folder_of_loose_shards_are_refused(tmp_path: Path) -> None:
    for text, words in (("{}", "weight_map"), ('{"weight_map": {"lm_head.weight": "a"}}', "no key starts with")):
        (tmp_path / vibevoice.INDEX).write_text(text)
        with pytest.raises(CheckpointMismatch, match=words):
            vibevoice.read_checkpoint(tmp_path, None)
    (tmp_path / vibevoice.INDEX).unlink()
    for name in ("a", "b"):
        save_file(WEIGHTS, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"found a\.safetensors, b\.safetensors"):
        vibevoice.read_checkpoint(tmp_path, None)
    with pytest.raises(UnknownModel, match="known are VibeVoice-Realtime"):
        vibevoice.read_checkpoint(tmp_path, "VibeVoice-7B")


# --- configurations


def test_the_released_configuration_is_taken_as_it_is() -> None:
    head = {
        "model_type": "vibevoice_diffusion_head",
        "hidden_size": 1536,
        "head_layers": 4,
        "head_ffn_ratio": 3.0,
        "rms_norm_eps": 1e-05,
        "latent_size": 64,
        "speech_vae_dim": 64,
        "prediction_type": "v_prediction",
        "diffusion_type": "ddpm",
        "ddpm_num_steps": 1000,
        "ddpm_num_inference_steps": 20,
        "ddpm_beta_schedule": "cosine",
        "ddpm_batch_mul": 4,
    }
    released = vibevoice.CONFIGS["VibeVoice-1.5B"]
    assert vibevoice.config_from(head) == released
    assert vibevoice.config_from({"diffusion_head_config": head, "model_type": "vibevoice"}) == released
    assert vibevoice.config_from(vars(TINY)) == TINY


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden_size": "32"}, UsageError, "hidden_size='32'"),
        ({"head_ffn_ratio": 0}, UsageError, "head_ffn_ratio=0"),
        ({"guidance_scale": math.inf}, UsageError, "guidance_scale=inf"),
        ({"depth": 3}, UsageError, "depth"),
        ({"prediction_type": "epsilon"}, OptionUnsupported, "v_prediction"),
        ({"ddpm_num_steps": 500}, OptionUnsupported, "1000"),
        ({"diffusion_head_config": 3}, UsageError, "a int"),
    ],
)
def test_config_errors_say_what_is_known(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        vibevoice.config_from({**vars(TINY), **change})
    with pytest.raises(UsageError, match="hidden_size is missing"):
        vibevoice.config_from({"head_layers": 4})


# --- program and guidance


@pytest.mark.parametrize(
    ("steps", "times"),
    [(5, (999, 799, 599, 400, 200)), (10, (999, 899, 799, 699, 599, 500, 400, 300, 200, 100)), (1, (999,))],
)
def test_programs_evaluate_upstreams_timesteps(steps: int, times: tuple[int, ...]) -> None:
    program = vibevoice.program(steps)
    assert (program.name, program.steps, program.evaluations) == (f"dpm-solver-2m-{steps}", steps, steps)
    assert program.times == times


def test_bfloat16_times_are_rounded_and_the_solver_is_not() -> None:
    exact, rounded = vibevoice.program(20), vibevoice.program(20, time_dtype="bfloat16")
    assert exact.times[:4] == (999, 949, 899, 849)
    assert rounded.times[:4] == (1000, 948, 900, 848)
    assert (rounded.instructions, rounded.schedule) == (exact.instructions, exact.schedule)


def test_program_options_are_checked() -> None:
    with pytest.raises(OptionUnsupported, match="choose one of float32, bfloat16"):
        vibevoice.program(10, time_dtype="int8")
    with pytest.raises(OptionUnsupported, match="'solver'"):
        vibevoice.program(10, solver="euler")
    for steps in (0, 2000):
        with pytest.raises(UsageError):
            vibevoice.program(steps)


@pytest.mark.parametrize(("name", "scale"), [("VibeVoice-Realtime-0.5B", 0.5), ("VibeVoice-1.5B", 0.3)])
def test_default_guidance_is_the_demos(name: str, scale: float) -> None:
    config = vibevoice.CONFIGS[name]
    with torch.device("meta"):
        weights = {key: torch.empty(shape) for key, shape in vibevoice.checkpoint_shapes(config).items()}
    guidance = vibevoice.region(config, weights).spec.guidance
    assert guidance is not None
    assert guidance.scales(None) == {"negative": pytest.approx(scale)}


def test_a_frame_is_guided_away_from_the_negative_condition() -> None:
    runtime, given = runtime_of(), request(2)
    conditions = {name: given[name] for name in ("condition", "neg_condition")}
    base = runtime.sample(noise=given["noisy_images"], **conditions)
    results = {key: runtime.sample(noise=given["noisy_images"], **conditions | {key: alter(conditions[key])})
               for key in conditions}  # fmt: skip
    assert all((result - base).abs().max() > 1e-3 for result in results.values())
    same = conditions | {"neg_condition": conditions["condition"]}
    alone = runtime.sample(noise=given["noisy_images"], guidance=0.0, **conditions)
    guided = runtime.sample(noise=given["noisy_images"], guidance=3.0, **same)
    torch.testing.assert_close(guided, alone, atol=2e-5, rtol=0)


def test_rows_are_drawn_from_seeds_without_any_length() -> None:
    runtime, given = runtime_of(), request(3)
    conditions = {name: given[name] for name in ("condition", "neg_condition")}
    together = runtime.sample(seed=5, **conditions)
    alone = runtime.sample(seed=6, **{name: value[1:2] for name, value in conditions.items()})
    torch.testing.assert_close(together[1:2], alone, atol=5e-6, rtol=0)
    with pytest.raises(InputMismatch, match="no length"):
        runtime.sample(seed=5, lengths=[1, 1, 1], **conditions)


# --- upstream's call and recorded cases


def test_the_denoiser_takes_upstreams_call() -> None:
    given, denoiser = request(4), runtime_of().denoiser()
    times = given["time"].expand(4)
    want = region_of().module(**given)
    x, condition = given["noisy_images"], given["condition"]
    torch.testing.assert_close(denoiser(x, times, condition), want, atol=2e-6, rtol=0)
    named = denoiser(noisy_images=x, timesteps=times, condition=condition)
    torch.testing.assert_close(named, want, atol=2e-6, rtol=0)


def made(kind: str = "region", **changes: Any) -> Case:
    given = request()
    inputs = {"noisy_images": given["noisy_images"], "timesteps": given["time"], "condition": given["condition"]}
    fields: dict[str, Any] = {"inputs": inputs, "scalars": {}, **changes}
    tail = (fields["inputs"], fields["scalars"], {}, {})
    return Case(Path("made"), "vibevoice", kind, vars(TINY), "none", {}, {}, *tail)


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": {"noisy_images": torch.zeros(1), "no_such": torch.zeros(1)}},
        {"scalars": {"no_such": 1}},
    ],
)
def test_what_a_case_holds_beyond_the_known_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no_such"):
        cases.replay(made(**change), runtime_of())


@pytest.mark.parametrize(
    "other", [{"timestep_spacing": "trailing"}, {"solver": "sde-dpmsolver++"}, {"euler_at_final": True}]
)
def test_a_recorded_loop_with_other_settings_is_refused(other: dict[str, Any]) -> None:
    inputs = dict.fromkeys(("noise", "condition", "neg_condition"), torch.zeros(1))
    scalars = {"num_inference_steps": 5, "cfg_scale": 1.3}
    assert cases.case_program(made("sampler", inputs=inputs, scalars=scalars)) == vibevoice.program(5)
    with pytest.raises(UsageError, match=next(iter(other))):
        cases.case_program(made("sampler", inputs=inputs, scalars=scalars | other))
