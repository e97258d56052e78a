"""What adapters share: tables as each upstream computes them, one shape of their folders, files, names and sizes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from voicehub_aot import adapters
from voicehub_aot.adapters import _tables
from voicehub_aot.errors import CheckpointMismatch, UnknownModel, UsageError
from voicehub_aot.spec.checkpoint import check_sizes, find, only_tensors
from voicehub_aot.spec.hyperparameters import named_config, not_positive, refuse
from voicehub_aot.spec.network import count, size

TIMES = (0.0, 1e-3, 0.3, 0.999, 1.0)


# --- tables, to the last bit: angles reach 1000 rad, where another order of products shows


@pytest.mark.parametrize("time", TIMES)
def test_sines_first_is_f5s_table_and_s3gens(time: float) -> None:
    """SWivid/F5-TTS, modules.py, SinusPositionEmbedding; chatterbox and CosyVoice, matcha's SinusoidalPosEmb."""
    frequencies = torch.exp(torch.arange(128).float() * -(math.log(10000) / 127))
    angles = 1000 * torch.tensor([time])[:, None] * frequencies
    assert torch.equal(_tables.sines_first(torch.tensor([time]), 256), torch.cat((angles.sin(), angles.cos()), dim=-1))


def test_sines_first_rounds_in_the_times_dtype() -> None:
    time = torch.tensor([0.3], dtype=torch.bfloat16)
    table = _tables.sines_first(time, 32)
    assert table.dtype == torch.bfloat16
    assert (table.float() - _tables.sines_first(time.float(), 32)).abs().max() > 0.1


@pytest.mark.parametrize("time", TIMES)
def test_cosines_first_is_echos_table(time: float) -> None:
    angles = torch.tensor([time])[:, None] * (1000.0 * torch.exp(-math.log(10000.0) * torch.arange(64).float() / 64))
    wanted = torch.cat((angles.cos(), angles.sin()), dim=-1)
    assert torch.equal(_tables.cosines_first(torch.tensor([time]), 128, scale=1000.0), wanted)


@pytest.mark.parametrize("step", [0.0, 1.0, 500.0, 999.0])
def test_cosines_first_is_vibevoices_table(step: float) -> None:
    angles = torch.tensor([step])[:, None] * torch.exp(-math.log(10000) * torch.arange(0, 64, dtype=torch.float32) / 64)
    wanted = torch.cat((angles.cos(), angles.sin()), dim=-1)
    assert torch.equal(_tables.cosines_first(torch.tensor([step]), 128, scale=1.0), wanted)


@pytest.mark.parametrize("width", [16, 64])
def test_rope_is_f5s_table_and_echos(width: int) -> None:
    """One row of positions, as F5-TTS has it, or one for each batch row, as Echo-TTS does within a block."""
    inverse = 1.0 / (10000.0 ** (torch.arange(0, width, 2).float() / width))
    angles = torch.einsum("i,j->ij", torch.arange(700).float(), inverse)[:, None]
    cos, sin = _tables.rope_of(torch.arange(700), _tables.inverse_frequencies(width))
    assert torch.equal(cos, angles.cos())
    assert torch.equal(sin, angles.sin())
    later = torch.stack((torch.arange(697), torch.arange(697) + 3))
    batched = _tables.rope_of(later, _tables.inverse_frequencies(width))
    assert torch.equal(batched[0], torch.stack((cos[:-3], cos[3:])))


# --- one shape


@pytest.mark.parametrize("name", adapters.names())
def test_every_adapter_has_the_same_files_and_names(name: str) -> None:
    folder = Path(adapters.__file__).parent / name
    assert {"__init__.py", "checkpoint.py", "cases.py"} <= {file.name for file in folder.glob("*.py")}
    sections = [line for line in (folder / "checkpoint.py").read_text().splitlines() if line.startswith("# --- ")]
    assert sections == ["# --- hyperparameters", "# --- keys and shapes", "# --- files"]
    adapter = adapters.load(name)
    config = adapter.CONFIGS["tiny"]
    assert (
        adapter.region_spec(config)
        == adapter.region(  # type: ignore[attr-defined]
            config, weights_of(adapter, config)
        ).spec
    )


def weights_of(adapter: adapters.Adapter, config: object) -> dict[str, Tensor]:
    shapes = adapter.checkpoint_shapes(config)
    return {key: torch.zeros(shape) for key, shape in shapes.items()} | adapter.formula_weights(config)


# --- files, names, sizes


def test_the_first_pattern_that_matches_decides(tmp_path: Path) -> None:
    patterns = ("model.safetensors", "**/*.pt")
    with pytest.raises(CheckpointMismatch, match=r"no model\.safetensors or \*\.pt in it"):
        find(tmp_path, patterns)
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "a.pt").touch()
    assert find(tmp_path, patterns) == inner / "a.pt"
    (tmp_path / "b.pt").touch()
    with pytest.raises(CheckpointMismatch, match=r"several checkpoints \(b\.pt, inner/a\.pt\); name one file"):
        find(tmp_path, patterns)
    (tmp_path / "model.safetensors").touch()
    assert find(tmp_path, patterns) == tmp_path / "model.safetensors"
    assert find(tmp_path / "b.pt", patterns) == tmp_path / "b.pt"


def test_a_name_stands_for_its_configuration() -> None:
    assert named_config("m", {"tiny": 3}, "tiny") == 3
    assert named_config("m", {"tiny": 3}, 4) == 4
    assert named_config("m", {"tiny": 3}, None) is None
    with pytest.raises(UnknownModel, match="m: configuration 'huge' is not known; known are tiny"):
        named_config("m", {"tiny": 3}, "huge")


def test_faults_are_of_the_user_or_of_the_file() -> None:
    assert not_positive({"a": 1, "b": True}, ("a",)) is None
    fault = not_positive({"a": 1, "b": True}, ("a", "b"))
    assert fault == "b=True is not a positive integer"
    with pytest.raises(UsageError, match="m: b=True is not a positive integer; give upstream's"):
        refuse("m", fault)
    with pytest.raises(CheckpointMismatch, match=r"f\.pt: its tensors have impossible shapes: b=True .*; give a model"):
        check_sizes(Path("f.pt"), fault, "a model")
    with pytest.raises(CheckpointMismatch, match=r"f\.pt: 'step' is a int, wanted a tensor"):
        only_tensors(Path("f.pt"), {"a": torch.zeros(1), "step": 3})


def test_one_missing_tensor_changes_no_size() -> None:
    weights = {f"blocks.{i}.{name}.weight": torch.zeros(4, 3) for i in (0, 1, 2) for name in ("up", "down")}
    del weights["blocks.0.up.weight"]
    assert size(weights, 9, ("blocks.*.up.weight", 0)) == 4
    assert size(weights, 9, ("blocks.0.up.weight", 0), ("blocks.0.down.weight", 1)) == 3
    assert size(weights, 9, ("into.weight", 0), ("blocks.0.down.weight", 2)) == 9
    assert count(weights, "blocks") == 3
    assert count({**weights, "blocks.99999999.up.weight": torch.zeros(1)}, "blocks") == 4
    assert count(weights, "layers") == 0
