"""The eager candidates compute what upstream computes: held to recorded cases, and to the modules that we compile."""

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch

from voicehub_aot import adapters
from voicehub_aot.compiler.models import from_case
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.spec.golden import read_case

BENCH = Path(__file__).parents[2] / "bench"
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def plain(bench, case):
    model = from_case(case)
    guidance = model.region.spec.guidance
    weights = model.region.module.state_dict()
    return bench("reference").plain(model.name, model.config, guidance.others[0].scale if guidance else 0.0, weights)


@pytest.mark.parametrize("name", ["region_tiny", "region_tiny_cfg", "region_tiny_full"])
def test_supertonic_reference_is_the_recorded_graph_padding_included(bench, name):
    case = read_case(GOLDEN / "supertonic" / name)
    order = (
        "noisy_latent", "text_emb", "style_ttl", "latent_mask", "text_mask", "current_step", "total_step",
    )  # fmt: skip

    with torch.no_grad():
        found = plain(bench, case)(*(case.inputs[n] for n in order))

    atol, rtol = case.tolerance_of("denoised_latent")
    torch.testing.assert_close(found, case.outputs["denoised_latent"], atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", ["region_tiny_nomask", "region_tiny_v0"])
def test_f5_reference_is_the_recorded_network(bench, name):
    case = read_case(GOLDEN / "f5tts" / name)
    module = plain(bench, case)
    x, cond, time = case.inputs["x"], case.inputs["cond"], case.inputs["time"][0]
    module.cfg_strength = case.scalars["cfg_strength"]

    with torch.no_grad():
        prepared = module.prepare({"cond": cond, "text": case.inputs["text"]}, x)
        after = module(x, cond, prepared["text_cond"], prepared["text_uncond"], time, torch.tensor(1.0))

    found = {"guided": after - x} | {f"text_embed_{b}": prepared[f"text_{b}"] for b in ("cond", "uncond")}
    for output, tensor in found.items():
        atol, rtol = case.tolerance_of(output)
        torch.testing.assert_close(tensor, case.outputs[output], atol=atol, rtol=rtol)


VARIANTS = [
    ("supertonic", "tiny", {}),
    ("supertonic", "tiny-v2", {}),
    ("f5tts", "tiny", {}),
    ("f5tts", "tiny", {"text_mask_padding": False, "pe_attn_head": 1}),  # as in v0
    ("f5tts", "tiny", {"qk_norm": "rms_norm", "long_skip_connection": True}),
]


@pytest.mark.parametrize(("name", "config", "changes"), VARIANTS)
def test_a_request_in_upstreams_loop_ends_where_ours_does(bench, monkeypatch, name, config, changes):
    adapter = adapters.load(name)
    changed = dataclasses.replace(adapter.CONFIGS[config], **changes)
    monkeypatch.setitem(adapter.CONFIGS, config, changed)
    subject = bench("subject").resolve(name, config, (3,))
    program = subject.program(3)
    state, request = bench("subject").draw(subject.spec, 29, 11)

    found = bench("reference").sample(subject.plain(), request, state, program.schedule)

    ours = eager_runtime(subject.model.region, [program], name)
    wanted = ours.sample(noise=state, program=program.name, **request)
    assert bench("subject").difference(found, wanted, state) < 1e-5
    assert bench("subject").difference(found, wanted + 0.1 * wanted.abs().max(), state) > 1e-3


def test_the_reference_loads_no_second_copy_of_the_weights(bench):
    subject = bench("subject").resolve("supertonic", "tiny")

    ours, reference = subject.weights, dict(subject.plain().state_dict())

    assert {n: t.data_ptr() for n, t in ours.items()} == {n: t.data_ptr() for n, t in reference.items()}
