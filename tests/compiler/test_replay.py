"""Recorded reference cases through `replay` on the eager module, nothing skipped; what replay itself refuses."""

import shutil

import pytest
from recorded import GOLDEN, PATHS, cases_for, check

from voicehub_aot import adapters
from voicehub_aot.compiler.replay import case_folders, replay
from voicehub_aot.errors import EngineUnavailable, UsageError


def test_the_golden_folder_holds_every_model():
    assert {path.parent.name for path in PATHS} >= set(adapters.names())


@pytest.mark.parametrize("case", cases_for("eager"))
def test_a_recorded_case_is_reproduced(case):
    check("eager", case)


@pytest.mark.parametrize("case", ["f5tts/sampler_tiny"])
def test_openvino_reproduces_it_too(case):
    outcomes = replay(GOLDEN / case, "openvino")

    assert outcomes
    assert all(o.passed for o in outcomes)


PACKED = ["f5tts/sampler_tiny_b"]  # supertonic: tests/conftest.py builds it packed, parity proven


@pytest.mark.parametrize("case", PACKED)
def test_packed_engines_reproduce_it_too(case):
    outcomes = replay(GOLDEN / case, "aoti", "packed")

    assert outcomes
    assert all(o.passed for o in outcomes)


def test_a_wrong_recording_fails(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "f5tts" / "region_tiny"
    shutil.copytree(GOLDEN / "f5tts" / "region_tiny", folder)
    tensors = load_file(folder / "tensors.safetensors")
    tensors["output/velocity"][0, 0, 0] += 1e-2
    save_file(tensors, folder / "tensors.safetensors")

    failed = [o for o in replay(folder, "eager") if not o.passed]

    assert [o.output for o in failed] == ["velocity"]
    assert failed[0].worst == pytest.approx(1e-2, rel=0.05)


def test_an_output_that_no_model_computes_is_an_error(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "f5tts" / "region_tiny"
    shutil.copytree(GOLDEN / "f5tts" / "region_tiny", folder)
    tensors = load_file(folder / "tensors.safetensors")
    save_file({**tensors, "output/waveform": tensors["output/velocity"].clone()}, folder / "tensors.safetensors")

    with pytest.raises(UsageError, match=r"outputs \['waveform'\] are not understood; known are .*'velocity'"):
        replay(folder, "eager")


def test_an_unknown_engine_and_an_empty_folder_are_errors(tmp_path):
    with pytest.raises(EngineUnavailable, match="eager, aoti, onnxruntime, openvino, tensorrt"):
        replay(GOLDEN / "f5tts" / "region_tiny", "warp")
    with pytest.raises(UsageError, match="no recorded case"):
        case_folders([tmp_path])
