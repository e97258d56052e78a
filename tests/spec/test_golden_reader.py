import json

import pytest
import torch
from safetensors.torch import save_file

from voicehub_aot.errors import UsageError
from voicehub_aot.spec.golden import find_cases, read_case
from voicehub_aot.spec.synthetic import synthetic_tensor

CASE = {
    "format": 1,
    "model_type": "tiny",
    "kind": "region",
    "config": {"dim": 4},
    "weights": "synthetic",
    "weight_shapes": {"proj.weight": [2, 3], "proj.bias": [2]},
    "scalars": {"steps": 7},
    "tolerance": {"atol": 1e-4, "rtol": 1e-5, "result": {"atol": 1e-2}},
}
TENSORS = {"input/x": torch.ones(2), "output/velocity": torch.zeros(3), "weight/proj.bias": torch.full((2,), 5.0)}


@pytest.fixture
def write(tmp_path):
    def write(name="tiny/case", tensors=TENSORS, **changes):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "case.json").write_text(json.dumps({**CASE, **changes}))
        save_file(tensors, folder / "tensors.safetensors")
        return folder

    return write


def test_a_case_is_read_with_its_prefixes_removed(write):
    case = read_case(write())

    assert (case.name, case.kind, case.config, case.scalars) == ("tiny/case", "region", {"dim": 4}, {"steps": 7})
    assert set(case.inputs) == {"x"}
    assert set(case.outputs) == {"velocity"}
    assert set(case.stored_weights) == {"proj.bias"}
    assert torch.equal(case.inputs["x"], torch.ones(2))


def test_stored_weights_replace_synthetic_ones(write):
    weights = read_case(write()).checkpoint()

    assert torch.equal(weights["proj.weight"], synthetic_tensor("proj.weight", (2, 3)))
    assert weights["proj.bias"].tolist() == [5.0, 5.0]


def test_a_case_without_weight_shapes_has_its_stored_weights_alone(write):
    case = read_case(write(weights="stored", weight_shapes={}))

    assert set(case.checkpoint()) == {"proj.bias"}


def test_an_onnx_case_knows_its_graph(write):
    folder = write(weights="onnx")

    assert read_case(folder).onnx == folder / "model.onnx"


@pytest.mark.parametrize(("output", "expected"), [("velocity", (1e-4, 1e-5)), ("result", (1e-2, 1e-5))])
def test_an_output_may_have_its_own_tolerance(write, output, expected):
    assert read_case(write()).tolerance_of(output) == expected


def test_a_tolerance_that_is_no_mapping_is_refused(write):
    case = read_case(write(tolerance={"atol": 1.0, "rtol": 0.0, "result": 0.5}))

    with pytest.raises(UsageError, match=r"tolerance of 'result' is 0\.5"):
        case.tolerance_of("result")


def test_scalars_lie_over_the_defaults_of_upstreams_call(write):
    case = read_case(write(scalars={"steps": 4}))

    assert case.scalars_over({"steps": 10, "sway": None}) == {"steps": 4, "sway": None}
    with pytest.raises(UsageError, match=r"scalars \['steps'\] are not understood; known are \['sway'\]"):
        case.scalars_over({"sway": None})


def test_inputs_are_the_wanted_ones_and_perhaps_others(write):
    case = read_case(write())

    assert set(case.check_inputs(["x"], ["mask"])) == {"x"}
    with pytest.raises(UsageError, match=r"inputs are \['x'\], wanted \['time', 'x'\] and perhaps \['mask'\]"):
        case.check_inputs(["x", "time"], ["mask"])
    with pytest.raises(UsageError, match=r"inputs are \['x'\], wanted \[\]"):
        case.check_inputs([])


def test_a_recorded_output_without_a_result_is_an_error_and_a_result_more_is_none(write):
    case = read_case(write())
    velocity = case.outputs["velocity"]

    assert set(case.recorded({"velocity": velocity, "result": velocity})) == {"velocity"}
    with pytest.raises(UsageError, match=r"outputs \['velocity'\] are not understood; known are \['result'\]"):
        case.recorded({"result": velocity})


@pytest.mark.parametrize("changes", [{"format": 2}, {"kind": "sampling"}, {"weights": "none"}, {"kind": ["region"]}])
def test_a_case_of_another_kind_or_format_is_not_understood(write, changes):
    with pytest.raises(UsageError, match="not understood; wanted format 1"):
        read_case(write(**changes))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"format": 1}', b'{"format": 1, "kind": "region"}'])
def test_a_broken_description_is_no_case(write, content):
    folder = write()
    (folder / "case.json").write_bytes(content)

    with pytest.raises(UsageError, match="not a recorded case"):
        read_case(folder)


def test_truncated_tensors_are_no_case(write):
    file = write() / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:20])

    with pytest.raises(UsageError, match="not a recorded case"):
        read_case(file.parent)


@pytest.mark.parametrize("name", ["case.json", "tensors.safetensors"])
def test_a_missing_file_is_no_case(write, name):
    folder = write()
    (folder / name).unlink()

    with pytest.raises(UsageError, match="not a recorded case"):
        read_case(folder)


def test_cases_are_found_sorted_below_every_level(write, tmp_path):
    second, first, other = write("tiny/b"), write("tiny/a"), write("big/a")

    assert find_cases(tmp_path) == [other, first, second]
    assert find_cases(tmp_path / "tiny") == [first, second]
    assert find_cases(first) == [first]


def test_cases_of_one_model_are_found(write, tmp_path):
    wanted = write("tiny/a")
    write("big/a")

    assert find_cases(tmp_path, model="tiny") == [wanted]
