"""Supertonic's vector estimator against recorded cases, and its reader against the graphs recorded with them."""

from __future__ import annotations

import builtins
import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import save_file

from voicehub_aot import adapters
from voicehub_aot.adapters import supertonic
from voicehub_aot.adapters.supertonic import cases
from voicehub_aot.errors import CheckpointMismatch, MissingDependency, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.golden import Case, read_case
from voicehub_aot.spec.guidance import EQUATIONS
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.synthetic import synthetic_weights

GOLDEN = Path(os.environ.get("VOICEHUB_AOT_GOLDEN", Path(__file__).parents[1] / "golden"))
TINY = ["tiny", "tiny-v2"]


def golden(name: str) -> Case:
    return read_case(GOLDEN / "supertonic" / name)


def case_region(case: Case) -> Region:
    config = supertonic.config_from(case.config)
    weights = supertonic.read_checkpoint(case.onnx)[1] if case.weights == "onnx" else case.checkpoint()
    return supertonic.region(config, weights)


def case_sampler(case: Case) -> Runtime:
    return eager_runtime(case_region(case), [cases.case_program(case)], case.name)


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest) -> Region:
    config = supertonic.CONFIGS[request.param]
    return supertonic.region(config, synthetic_weights(supertonic.checkpoint_shapes(config)))


def inputs(region: Region, lengths: list[int], text_lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random region inputs at the longest lengths, exact edges; every other row unconditional if the model has that."""
    sizes = {"B": len(lengths), "frames": max(lengths), "text": max(text_lengths)}
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for item in region.spec.inputs:
        shape = [sizes[s] if isinstance(s, str) else s for s in item.shape]
        values[item.name] = torch.rand(shape, generator=generator) if item.dtype == "float32" else torch.zeros(shape)
    values |= {"lengths": torch.tensor(lengths), "extent": torch.tensor(lengths)}
    values["text_lengths"] = torch.tensor(text_lengths)
    if "drop" in values:
        values["drop"] = torch.arange(len(lengths)) % 2 == 1
    return values


# Recorded cases


@pytest.mark.parametrize("name", ["region_tiny", "region_tiny_cfg"])
def test_rows_at_different_steps_equal_the_graph(name: str) -> None:
    import onnxruntime

    case = golden(name)
    given = {**case.inputs, "current_step": torch.tensor([0.0, 6.0]), "total_step": torch.tensor([5.0, 8.0])}
    session = onnxruntime.InferenceSession(str(case.onnx), providers=["CPUExecutionProvider"])
    wanted = session.run(None, {k: v.numpy() for k, v in given.items()})[0]
    moved = dataclasses.replace(case, inputs=given, outputs={"denoised_latent": torch.from_numpy(wanted)})

    outputs = cases.replay(moved, case_sampler(case))

    torch.testing.assert_close(outputs["denoised_latent"], torch.from_numpy(wanted), atol=5e-5, rtol=2e-4)


def test_replay_refuses_masks_that_are_no_prefix() -> None:
    case = golden("region_tiny")
    mask = case.inputs["latent_mask"].clone()
    mask[0, 0, 3] = 0
    holed = dataclasses.replace(case, inputs={**case.inputs, "latent_mask": mask})

    with pytest.raises(UsageError, match="latent_mask is not a prefix mask"):
        cases.replay(holed, case_sampler(case))


# The region


def test_released_sizes() -> None:
    shapes = supertonic.checkpoint_shapes(supertonic.CONFIGS["supertonic-3"])

    assert len(shapes) == 350
    assert sum(torch.Size(s).numel() for s in shapes.values()) == 64_013_376
    assert shapes == {k: tuple(v) for k, v in golden("region_real").weight_shapes.items()}
    v2 = supertonic.checkpoint_shapes(supertonic.CONFIGS["supertonic-2"])
    assert v2 == {k: tuple(v) for k, v in golden("region_real_v2").weight_shapes.items()}
    assert supertonic.CONFIGS["supertonic"] == supertonic.CONFIGS["supertonic-2"]


def test_a_row_in_a_larger_tensor_with_garbage_equals_the_row_alone(tiny: Region) -> None:
    short = inputs(tiny, [9], [5])
    alone = tiny.module(**short)
    large = inputs(tiny, [9, 31], [5, 12], seed=1)
    large["noisy_latent"][0] *= 1e3  # whatever is beyond a row's length
    large["text_emb"][0] *= 1e3
    large["noisy_latent"][0, :, :9] = short["noisy_latent"][0]
    large["text_emb"][0, :, :5] = short["text_emb"][0]
    large["style_ttl"][0] = short["style_ttl"][0]
    large["time"] = short["time"]

    padded = tiny.module(**large)

    torch.testing.assert_close(padded[:1, :, :9], alone, atol=5e-6, rtol=1e-5)
    assert torch.equal(padded[0, :, 9:], torch.zeros_like(padded[0, :, 9:]))


def test_the_extent_moves_the_edge(tiny: Region) -> None:
    given = inputs(tiny, [9, 31], [5, 12])
    exact = tiny.module(**given)

    upstream = tiny.module(**{**given, "extent": torch.tensor([31, 31])})

    assert (exact - upstream)[0, :, :9].abs().max() > 1e-3
    torch.testing.assert_close(upstream[1], exact[1])


def test_every_input_matters(tiny: Region) -> None:
    given = inputs(tiny, [9, 14], [5, 7])
    base = tiny.module(**given)
    moved = {
        "noisy_latent": given["noisy_latent"] + 0.1,
        "time": given["time"] + 0.1,
        "text_emb": given["text_emb"] * 1.3,
        "style_ttl": given["style_ttl"] * 1.3,
        "lengths": given["lengths"] - 1,
        "extent": given["extent"].max().expand(2),
        "text_lengths": given["text_lengths"] - 2,
        "drop": ~given["drop"] if "drop" in given else None,
    }
    for name in given:
        changed = tiny.module(**{**given, name: moved[name]})
        assert (changed - base)[:, :, :8].abs().max() > 1e-4, name


def test_the_unconditional_branch_sees_neither_text_nor_voice() -> None:
    region = case_region(golden("region_tiny_cfg"))
    given = {**inputs(region, [9, 9], [5, 5]), "drop": torch.tensor([True, True])}
    base = region.module(**given)

    other = region.module(**{**given, "text_emb": given["text_emb"] * 2, "style_ttl": given["style_ttl"] + 1})

    assert torch.equal(base, other)
    assert not torch.equal(base, region.module(**{**given, "text_lengths": torch.tensor([4, 4])}))  # positions remain


def test_guidance_of_scale_zero_is_the_conditional_branch() -> None:
    case = golden("sampler_tiny")
    sampler = case_sampler(case)
    request = cases._request(case)
    noise = case.inputs["noise"] * case.inputs["latent_mask"]

    *_, off = sampler.trajectory(noise=noise, guidance=0.0, **request)
    *_, default = sampler.trajectory(noise=noise, **request)

    x = noise
    for i in range(8):
        x = x + sampler.evaluate(x, i / 8, **request) / 8
    torch.testing.assert_close(off, x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(default, case.outputs["latent"], atol=1e-4, rtol=5e-4)
    assert (default - off).abs().max() > 0.1


def test_default_guidance_is_four_conditional_minus_three_unconditional() -> None:
    guidance = supertonic.region(
        supertonic.CONFIGS["tiny"], synthetic_weights(supertonic.checkpoint_shapes(supertonic.CONFIGS["tiny"]))
    ).spec.guidance
    assert guidance is not None
    c, u = torch.randn(2, 3, 4), torch.randn(2, 3, 4)

    guided = EQUATIONS[guidance.equation](torch.cat([c, u]), [guidance.branches[1].scale])

    torch.testing.assert_close(guided, 4 * c - 3 * u)


def test_v2_has_no_guidance() -> None:
    config = supertonic.CONFIGS["tiny-v2"]
    spec = supertonic.region(config, synthetic_weights(supertonic.checkpoint_shapes(config))).spec

    assert spec.guidance is None
    assert "drop" not in [i.name for i in spec.inputs]


def test_the_region_names_what_is_wrong_with_weights() -> None:
    config = supertonic.CONFIGS["tiny"]
    weights = synthetic_weights(supertonic.checkpoint_shapes(config))
    weights["style_key"] = weights["style_key"][:, :3]
    del weights["vector_estimator.tts.ttl.vector_field.proj_out.net.weight"]

    with pytest.raises(CheckpointMismatch, match=r"(?s)proj_out\.net\.weight.*style_key is \[1, 3, 24\]"):
        supertonic.region(config, weights)


@pytest.mark.parametrize(("B", "frames", "text"), [(1, 1, 1), (1, 37, 1), (3, 37, 8), (2, 100, 100)])
def test_export_with_dynamic_sizes_equals_eager(
    exported: tuple[Region, torch.nn.Module], B: int, frames: int, text: int
) -> None:
    region, module = exported
    given = inputs(region, [*[frames] * (B - 1), max(frames // 2, 1)], [*[text] * (B - 1), text])
    given["noisy_latent"] = torch.randn(B, given["noisy_latent"].shape[1], frames)

    torch.testing.assert_close(module(**given), region.module(**given), atol=2e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def exported(tiny: Region) -> tuple[Region, torch.nn.Module]:
    spec, given = tiny.spec, inputs(tiny, [24, 20], [10, 9])
    dims = {d.name: torch.export.Dim(d.name, min=d.min, max=d.max) for d in spec.dims}
    dims["B"] = torch.export.Dim("B", min=1, max=8)
    dynamic = {i.name: {at: dims[s] for at, s in enumerate(i.shape) if isinstance(s, str)} for i in spec.inputs}
    with torch.no_grad():
        program = torch.export.export(tiny.module, (), given, dynamic_shapes=dynamic)
    return tiny, program.module()


# Configurations and programs


def test_config_from_refuses_what_it_does_not_know_or_cannot_be() -> None:
    values: dict[str, Any] = dict(golden("region_tiny_cfg").config)
    assert supertonic.config_from(values) == supertonic.CONFIGS["tiny"]
    assert supertonic.config_from(golden("region_tiny").config) == supertonic.CONFIGS["tiny-v2"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"hiden": 3}, "hiden"),
        ({"latent_channels": 13}, "13"),
        ({"guidance_uncond": 2.0}, "must be 1"),
        ({"text_n_heads": 0}, "text_n_heads"),
        ({"ksz": 4}, "odd"),
    ]
    for wrong, said in cases:
        with pytest.raises(UsageError, match=said):
            supertonic.config_from({**values, **wrong})


def test_other_guidance_factors_are_another_scale() -> None:
    config = supertonic.config_from({**supertonic_values("tiny"), "guidance_cond": 2.5, "guidance_uncond": 1.5})

    guidance = supertonic.region(config, synthetic_weights(supertonic.checkpoint_shapes(config))).spec.guidance

    assert guidance is not None and guidance.branches[1].scale == 1.5


def supertonic_values(name: str) -> dict[str, Any]:
    return dataclasses.asdict(supertonic.CONFIGS[name])


def test_program_is_uniform_euler() -> None:
    program = supertonic.program(7)

    assert program.schedule == tuple(i / 7 for i in range(8))
    assert program.times == program.schedule[:-1]


@pytest.mark.parametrize("option", [{"solver": "midpoint"}, {"grid": "epss"}, {"sway": -1.0}])
def test_program_refuses_what_the_released_graph_cannot_do(option: dict[str, Any]) -> None:
    with pytest.raises(OptionUnsupported, match="it has none"):
        supertonic.program(5, **option)


def test_program_needs_a_step() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        supertonic.program(0)


def test_the_adapter_is_found_by_name() -> None:
    found = adapters.load("Supertonic")

    assert found.DEFAULT_CONFIG in found.CONFIGS
    assert set(found.HUB_FILES) == set(found.CONFIGS)


# The checkpoint


@pytest.mark.parametrize(("name", "config"), [("region_tiny_cfg", "tiny"), ("region_tiny", "tiny-v2")])
def test_a_graph_tells_its_configuration(name: str, config: str) -> None:
    inferred, weights = supertonic.read_checkpoint(golden(name).onnx)

    assert inferred == supertonic.CONFIGS[config]
    assert {k: tuple(v.shape) for k, v in weights.items()} == supertonic.checkpoint_shapes(inferred)
    assert supertonic.read_checkpoint(golden(name).onnx, config)[0] == inferred


@pytest.mark.parametrize("folder", ["onnx", ""])
def test_the_released_folder_is_read(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    shutil.copy(golden("region_tiny_cfg").onnx, tmp_path / folder / "vector_estimator.onnx")

    assert supertonic.read_checkpoint(tmp_path)[0] == supertonic.CONFIGS["tiny"]


def test_safetensors_with_released_keys_are_read(tmp_path: Path) -> None:
    config, weights = supertonic.read_checkpoint(golden("region_tiny_cfg").onnx)
    save_file(weights, tmp_path / "model.safetensors")

    read, again = supertonic.read_checkpoint(tmp_path / "model.safetensors", "tiny")

    assert read == config
    assert all(torch.equal(weights[k], again[k]) for k in weights)


def edited(tmp_path: Path, name: str, edit: Callable[[Any], None]) -> Path:
    """A copy of a recorded graph, changed."""
    model = onnx.load(str(golden(name).onnx))
    edit(model.graph)
    onnx.save(model, str(tmp_path / "vector_estimator.onnx"))
    return tmp_path


def assert_same_weights(path: Path, name: str) -> None:
    wanted, found = supertonic.read_checkpoint(golden(name).onnx), supertonic.read_checkpoint(path)
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][k], wanted[1][k]) for k in wanted[1])


def renumber(graph: Any) -> None:
    """Anonymous names as another export would give them."""
    names = {i.name: f"onnx::MatMul_{9000 - n}" for n, i in enumerate(graph.initializer) if "::MatMul" in i.name}
    for item in graph.initializer:
        item.name = names.get(item.name, item.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def drop_node_names(graph: Any) -> None:
    """Then only the bias behind a product tells whose weight it is."""
    for node in graph.node:
        node.name = ""


def store_equal_tensors_once(graph: Any) -> None:
    """As an exporter does with equal biases: one initializer, and Identity nodes under the other names."""
    bias = next(i for i in graph.initializer if i.name.endswith("main_blocks.7.linear.linear.bias"))
    copied = onnx.helper.make_node("Identity", ["shared"], [bias.name])
    bias.name = "shared"
    graph.node.insert(0, copied)


def rename_style_key(graph: Any) -> None:
    """What feeds the key projection is followed, whatever it is called."""
    key = next(i for i in graph.initializer if i.name.endswith("Expand_output_0"))
    for node in graph.node:
        node.input[:] = ["anything" if name == key.name else name for name in node.input]
    key.name = "anything"


@pytest.mark.parametrize("name", ["region_tiny_cfg", "region_tiny"])
@pytest.mark.parametrize("edit", [renumber, drop_node_names, store_equal_tensors_once, rename_style_key])
def test_other_exports_of_the_graph_are_read(tmp_path: Path, name: str, edit: Callable[[Any], None]) -> None:
    assert_same_weights(edited(tmp_path, name, edit), name)


def test_a_slimmed_graph_lists_what_was_not_found(tmp_path: Path) -> None:
    def slim(graph: Any) -> None:
        for item in graph.initializer:
            if item.name.endswith(("8.convnext.0.gamma", "9.attn.W_value.linear.bias")):
                renamed = f"slim_{item.name}"
                for node in graph.node:
                    node.input[:] = [renamed if n == item.name else n for n in node.input]
                item.name = renamed

    with pytest.raises(CheckpointMismatch, match=r"(?s)missing.*8\.convnext\.0\.gamma.*9\.attn\.W_value\.linear\.bias"):
        supertonic.read_checkpoint(edited(tmp_path, "region_tiny_cfg", slim))


def set_constant(graph: Any, old: float, new: float) -> None:
    for node in graph.node:
        if node.op_type == "Constant":
            value = onnx.numpy_helper.to_array(node.attribute[0].t)
            if value.shape == () and value.dtype == "float32" and abs(float(value) - old) < 1e-4:
                node.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array((value * 0 + new).astype("float32")))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [(4.0, 5.0, "must be 1"), (24**0.5, 8**0.5, "divides scores")],
)
def test_a_graph_that_computes_something_else_is_refused(tmp_path: Path, old: float, new: float, said: str) -> None:
    path = edited(tmp_path, "region_tiny_cfg", lambda graph: set_constant(graph, old, new))

    with pytest.raises(CheckpointMismatch, match=said):
        supertonic.read_checkpoint(path)


def test_other_guidance_factors_are_read_from_the_graph(tmp_path: Path) -> None:
    def soften(graph: Any) -> None:
        set_constant(graph, 3.0, 1.5)
        set_constant(graph, 4.0, 2.5)

    config, _ = supertonic.read_checkpoint(edited(tmp_path, "region_tiny_cfg", soften))

    assert (config.guidance_cond, config.guidance_uncond) == (2.5, 1.5)


def test_another_graph_of_the_release_is_named(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info("latent", onnx.TensorProto.FLOAT, [1, 144, "L"])
    node = onnx.helper.make_node("Identity", ["latent"], ["wav_tts"])
    graph = onnx.helper.make_graph([node], "vocoder", [value], [value])
    onnx.save(onnx.helper.make_model(graph), str(tmp_path / "a.onnx"))

    with pytest.raises(CheckpointMismatch, match=r"this is vocoder\.onnx"):
        supertonic.read_checkpoint(tmp_path / "a.onnx")


def test_unreadable_and_absent_files(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"no protobuf at all")
    with pytest.raises(CheckpointMismatch, match="not a readable ONNX file"):
        supertonic.read_checkpoint(tmp_path / "a.onnx")
    with pytest.raises(CheckpointMismatch, match=r"vector_estimator\.onnx"):
        supertonic.read_checkpoint(tmp_path)
    save_file({"conv.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointMismatch, match="not a Supertonic vector estimator"):
        supertonic.read_checkpoint(tmp_path / "other.safetensors")


def test_a_named_configuration_must_fit() -> None:
    with pytest.raises(CheckpointMismatch, match="hidden is 32, wanted 512"):
        supertonic.read_checkpoint(golden("region_tiny_cfg").onnx, "supertonic-3")
    with pytest.raises(UnknownModel, match="known are supertonic-3"):
        supertonic.read_checkpoint(golden("region_tiny_cfg").onnx, "supertonic-4")


def test_without_onnx_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_onnx(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "onnx":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_onnx)
    with pytest.raises(MissingDependency, match=r"voicehub-aot\[onnx\]"):
        supertonic.read_checkpoint(golden("region_tiny").onnx)
