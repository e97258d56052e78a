"""Recorded reference cases through `replay`: on the eager module and on compiled engines, nothing skipped."""

import json
import os
import shutil
from pathlib import Path

import pytest

from voicehub_aot import adapters
from voicehub_aot.errors import EngineUnavailable, UsageError
from voicehub_aot.golden import find_cases
from voicehub_aot.replay import case_folders, replay

GOLDEN = Path(os.environ.get("VOICEHUB_AOT_GOLDEN", Path(__file__).with_name("golden")))


def mark_released(path):
    """Released-size cases take minutes."""
    return [pytest.mark.slow] if "real" in path.name else []


CASES = [
    pytest.param(path, id=f"{path.parent.name}-{path.name}", marks=mark_released(path)) for path in find_cases(GOLDEN)
]


def test_the_golden_folder_holds_every_model():
    assert {p.values[0].parent.name for p in CASES} >= set(adapters.names())


def graph_of(path):
    """Cases of one configuration have one graph, whose engine is made once in the default run."""
    case = json.loads((path / "case.json").read_text())
    return case["model_type"], json.dumps(case["config"], sort_keys=True)


ONCE = {graph_of(case.values[0]): case.values[0] for case in CASES}  # the last of each graph: a whole loop, mostly


def marks_of(engine, case):
    again = engine != "eager" and ONCE[graph_of(case.values[0])] != case.values[0]
    return [pytest.mark.slow] if again else case.marks


RUNS = [
    pytest.param(engine, *case.values, id=f"{engine}-{case.id}", marks=marks_of(engine, case))
    for engine in ("eager", "aoti", "onnxruntime")
    for case in CASES
]


@pytest.mark.parametrize(("engine", "case"), RUNS)
def test_a_recorded_case_is_reproduced(engine, case):
    outcomes = replay(case, engine, "shared")

    recorded = json.loads((case / "case.json").read_text())["outputs"]
    assert [o.output for o in outcomes] == sorted(recorded) or {o.output for o in outcomes} == set(recorded)
    assert [o for o in outcomes if not o.passed] == []


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


def test_an_unknown_engine_and_an_empty_folder_are_errors(tmp_path):
    with pytest.raises(EngineUnavailable, match="eager, aoti, onnxruntime, openvino, tensorrt"):
        replay(GOLDEN / "f5tts" / "region_tiny", "warp")
    with pytest.raises(UsageError, match="no recorded case"):
        case_folders([tmp_path])
