"""Supertonic against onnxruntime on graphs of the released form, and within the package supertonic's own loop."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle.upstream import load
from torch import Tensor, nn

import voicehub_aot
from voicehub_aot.adapters import supertonic
from voicehub_aot.compiler import models
from voicehub_aot.compiler.build import build
from voicehub_aot.compiler.options import Options
from voicehub_aot.errors import ProgramNotBuilt
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.golden import Case, read_case
from voicehub_aot.spec.target import default_target, parse_target

pytestmark = pytest.mark.oracle

GOLDEN = Path(os.environ.get("VOICEHUB_AOT_GOLDEN", Path(__file__).parents[1] / "golden")) / "supertonic"
FORMS = {"v2": "region_tiny", "v3": "region_tiny_cfg"}
ENGINES = ("eager", "compiled")
PROGRAMS = tuple(supertonic.program(n) for n in (8, 5))
SHAPES = [  # latent frames and characters of each row
    ([1], [1]),
    ([2], [20]),
    ([40], [20]),
    ([17], [1]),
    ([23, 23], [11, 11]),
    ([40, 1], [1, 20]),
    ([9, 10], [6, 5]),
    ([31, 12, 5], [20, 9, 2]),
    ([2, 40, 39], [7, 1, 19]),
    ([1, 1, 1], [1, 2, 3]),
]
MOMENTS = [(0, 5), (7, 8), (3, 5), (4, 8), (4, 5)]  # current_step and total_step


@dataclass(frozen=True)
class Form:
    """A graph of the release's form under onnxruntime, and what was built from it."""

    case: Case
    session: Any
    runtimes: Mapping[str, Runtime]

    def upstream(self, feeds: Mapping[str, Tensor]) -> Tensor:
        (latent,) = self.session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
        return torch.from_numpy(latent)


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Form:
    onnxruntime = load("onnxruntime")
    case = read_case(GOLDEN / FORMS[request.param])
    model = models.from_case(case)
    options = Options(
        buckets=Buckets(axes={"frames": (64,)}),
        programs=PROGRAMS,
        target=parse_target(default_target()),
        weights_mode="shared",
        parity=False,
    )
    artifact = tmp_path_factory.mktemp("supertonic") / request.param
    build(model, options, artifact)
    runtimes = {"eager": eager_runtime(model.region, PROGRAMS, "supertonic"), "compiled": voicehub_aot.load(artifact)}
    single = onnxruntime.SessionOptions()
    single.intra_op_num_threads = 1  # its pool would spin beside torch's
    session = onnxruntime.InferenceSession(case.onnx, single, providers=["CPUExecutionProvider"])
    return Form(case, session, runtimes)


def prefix_mask(lengths: list[int]) -> Tensor:
    """[B, 1, N] float, 1 = real."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None, None]).float()


def feeds_of(case: Case, frames: list[int], characters: list[int], seed: int) -> dict[str, Tensor]:
    """Random inputs under the released names, each row at a moment of its own; garbage in the padding included."""
    generator = torch.Generator().manual_seed(seed)
    config = supertonic.config_from(case.config)
    rows = len(frames)
    moments = torch.tensor([MOMENTS[(seed + row) % len(MOMENTS)] for row in range(rows)], dtype=torch.float32)
    return {
        "noisy_latent": torch.randn(rows, config.latent_channels, max(frames), generator=generator),
        "text_emb": torch.randn(rows, config.text_dim, max(characters), generator=generator),
        "style_ttl": torch.randn(rows, config.n_style, config.style_dim, generator=generator),
        "latent_mask": prefix_mask(frames),
        "text_mask": prefix_mask(characters),
        "current_step": moments[:, 0].contiguous(),
        "total_step": moments[:, 1].contiguous(),
    }


@pytest.mark.parametrize(("frames", "characters"), SHAPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_evaluation_is_the_graphs(form: Form, engine: str, frames: list[int], characters: list[int]) -> None:
    denoiser = form.runtimes[engine].denoiser()
    for seed in range(len(MOMENTS)):
        feeds = feeds_of(form.case, frames, characters, seed)
        wanted = form.upstream(feeds)
        assert (wanted - feeds["noisy_latent"] * feeds["latent_mask"]).std() > 0.01
        torch.testing.assert_close(denoiser(**feeds), wanted, atol=2e-5, rtol=0)


# --- the package's loop


def session_of(run: Callable[[dict[str, Any]], Any]) -> Any:
    """What the package takes for an onnxruntime session: `run` answers with one output."""

    class Session(load("onnxruntime").InferenceSession):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def run(self, _: Any, feeds: dict[str, Any]) -> list[Any]:
            return [run(feeds)]

    return Session()


def synthesize(form: Form, estimate: Callable[[dict[str, Any]], Any], rows: int, steps: int, tmp_path: Path) -> Tensor:
    """Supertonic.__call__ with `estimate` as vector estimator -> the latent that it hands to the vocoder."""
    core, config, generator = load("supertonic.core"), form.case.config, np.random.default_rng(3)
    (tmp_path / "unicode_indexer.json").write_text(json.dumps(list(range(128))))
    frame_s = 512 * config["chunk_compress_factor"] / 44100
    durations_s = (np.array([33.5, 12.5, 7.5], dtype=np.float32) * frame_s)[:rows]  # half a frame is a frame
    style = generator.standard_normal((rows, config["n_style"], config["style_dim"]), dtype=np.float32)

    def encode(feeds: dict[str, Any]) -> np.ndarray:
        return generator.standard_normal((rows, config["text_dim"], feeds["text_ids"].shape[1]), dtype=np.float32)

    loop = core.Supertonic(
        {
            "ae": {"sample_rate": 44100, "base_chunk_size": 512},
            "ttl": {name: config[name] for name in ("chunk_compress_factor", "latent_dim")},
        },
        core.UnicodeProcessor(str(tmp_path / "unicode_indexer.json")),
        dp_ort=session_of(lambda _: durations_s),
        text_enc_ort=session_of(encode),
        vector_est_ort=session_of(estimate),
        vocoder_ort=session_of(lambda feeds: feeds["latent"]),
    )
    np.random.seed(11)  # the package draws its noise from numpy's global generator
    texts = ["A text of some length.", "Short.", "Hm?"][:rows]
    latent, _ = loop(texts, core.Style(style, style[:, :8, :16]), total_step=steps, speed=1.0)
    return torch.from_numpy(latent)


def estimate_with(denoiser: nn.Module) -> Callable[[dict[str, Any]], Any]:
    """The denoiser as the vector estimator's session: numpy in, numpy out."""
    return lambda feeds: denoiser(**{name: torch.from_numpy(value) for name, value in feeds.items()}).numpy()


@pytest.mark.parametrize("steps", [5, 8])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_packages_loop_runs_with_our_denoiser(
    form: Form, engine: str, rows: int, steps: int, tmp_path: Path
) -> None:
    ours = estimate_with(form.runtimes[engine].denoiser())
    wanted = synthesize(form, lambda feeds: form.session.run(None, feeds)[0], rows, steps, tmp_path)
    assert wanted.shape == (rows, form.case.config["latent_channels"], 34)
    torch.testing.assert_close(synthesize(form, ours, rows, steps, tmp_path), wanted, atol=5e-5, rtol=0)


def test_the_packages_loop_with_steps_that_were_not_built_is_refused(form: Form, tmp_path: Path) -> None:
    ours = estimate_with(form.runtimes["compiled"].denoiser())
    with pytest.raises(ProgramNotBuilt, match="rebuild with the step count"):
        synthesize(form, ours, 1, 7, tmp_path)
