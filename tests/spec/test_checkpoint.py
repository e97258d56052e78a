import argparse
import datetime
import shlex
import struct
import subprocess
import sys
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from voicehub_aot.errors import CheckpointMismatch, MissingDependency
from voicehub_aot.spec.checkpoint import Reading, check_shapes, locate, read_tensors, read_weights

WEIGHTS = {"proj.weight": torch.arange(6.0).reshape(2, 3)}

# locate


def test_a_local_path_is_itself(tmp_path):
    assert locate(str(tmp_path), []) == tmp_path


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.pt").touch()

    assert locate("~/model.pt", []) == tmp_path / "model.pt"


@pytest.mark.parametrize("source", ["", "absent/model.pt", "~nobody-of-this-name/model.pt", "x" * 5000])
def test_a_path_that_is_not_there_is_refused(source):
    with pytest.raises(CheckpointMismatch, match="checkpoint '"):
        locate(source, [])


@pytest.mark.parametrize("source", ["hf:", "hf:name", "hf:owner/name@", "hf:owner/name:", "hf:owner /name", "hf:a/b c"])
def test_a_malformed_hub_id_shows_the_form_wanted(source):
    with pytest.raises(CheckpointMismatch, match=r"wanted hf:owner/name\[@revision\]\[:file\]"):
        locate(source, [])


@pytest.mark.parametrize("source", ["hf:owner/name", "hf:owner/name@v1", "hf:owner/name@v1:folder/model.pt"])
def test_an_offline_hub_id_says_that_the_hub_is_offline(monkeypatch, source):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    with pytest.raises(CheckpointMismatch) as caught:
        locate(source, ["*.safetensors"])

    assert str(caught.value).startswith(f"{source}: could not be fetched")
    assert "HF_HUB_OFFLINE is set" in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:owner/name", (("owner/name",), {"revision": None, "allow_patterns": ["*.pt"]})),
        ("hf:owner/name@v1", (("owner/name",), {"revision": "v1", "allow_patterns": ["*.pt"]})),
        ("hf:owner/name:a/b.pt", (("owner/name", "a/b.pt"), {"revision": None})),
        ("hf:owner/name@v1:b.pt", (("owner/name", "b.pt"), {"revision": "v1"})),
    ],
)
def test_a_hub_id_is_fetched_by_its_parts(monkeypatch, tmp_path, source, expected):
    calls = []

    def fetch(*args, **options):
        calls.append((args, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    path = locate(source, ["*.pt"])

    args, options = expected
    assert path == tmp_path
    assert calls == [(args, {**options, "local_files_only": False})]


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_hub_is_asked_for_cached_files_only_when_offline(monkeypatch, tmp_path, value, offline):
    asked = []

    def fetch(*args, local_files_only, **options):
        asked.append(local_files_only)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setenv("HF_HUB_OFFLINE", value)

    locate("hf:owner/name", ["*.pt"])

    assert asked == [offline]


def test_a_missing_hub_client_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(MissingDependency, match=r"voicehub-aot\[hub\]"):
        locate("hf:owner/name", [])


# read_tensors


def test_safetensors_are_read(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")

    assert torch.equal(read_tensors(tmp_path / "model.safetensors")["proj.weight"], WEIGHTS["proj.weight"])


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_of_a_whole_model_only_the_wanted_part_is_kept(tmp_path, name):
    whole = {"head.a": torch.ones(1), "head.b": torch.ones(2), "trunk.head.a": torch.ones(3), "other": torch.ones(4)}
    if name.endswith("safetensors"):
        save_file(whole, tmp_path / name)
    else:
        torch.save(whole, tmp_path / name)

    assert set(read_tensors(tmp_path / name, ("head.", "oth"))) == {"head.a", "head.b", "other"}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin"])
def test_torch_files_are_read_with_their_nesting(tmp_path, suffix):
    file = tmp_path / f"model{suffix}"
    torch.save({"ema": WEIGHTS, "step": 3}, file)

    loaded = read_tensors(file)

    assert loaded["step"] == 3
    assert torch.equal(loaded["ema"]["proj.weight"], WEIGHTS["proj.weight"])


@pytest.mark.parametrize("size", [0, 4, 20, -1])
def test_truncated_safetensors_are_unreadable(tmp_path, size):
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS, file)
    file.write_bytes(file.read_bytes()[:size])

    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors: unreadable .*download it again"):
        read_tensors(file)


# Each of these makes the unpickler raise another type.
@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", b"(\xc4.", b"X\x01", b".", struct.pack("<I", 7) * 9])
def test_a_bad_pickle_is_unreadable(tmp_path, content):
    file = tmp_path / "model.pt"
    file.write_bytes(content)

    with pytest.raises(CheckpointMismatch, match=r"model\.pt: unreadable"):
        read_tensors(file)


@pytest.mark.parametrize("size", [10, 200, -30])
def test_a_truncated_torch_file_is_unreadable(tmp_path, size):
    file = tmp_path / "model.pt"
    torch.save(WEIGHTS, file)
    file.write_bytes(file.read_bytes()[:size])

    with pytest.raises(CheckpointMismatch, match=r"model\.pt: unreadable"):
        read_tensors(file)


class Payload:
    """An object that a checkpoint has no business holding."""


def test_a_pickle_of_other_objects_is_refused_unopened(tmp_path):
    file = tmp_path / "model.pt"
    torch.save({"payload": Payload()}, file)

    with pytest.raises(CheckpointMismatch, match=r"unreadable .*Weights only load failed"):
        read_tensors(file)


def test_a_file_that_holds_no_mapping_is_refused(tmp_path):
    file = tmp_path / "model.pt"
    torch.save([torch.zeros(1)], file)

    with pytest.raises(CheckpointMismatch, match="holds a list, wanted a mapping"):
        read_tensors(file)


@pytest.mark.parametrize("name", ["model.onnx", "model"])
def test_an_unknown_file_type_lists_the_known_ones(tmp_path, name):
    with pytest.raises(CheckpointMismatch, match=r"unknown file type .*wanted \.safetensors, \.pt"):
        read_tensors(tmp_path / name)


@pytest.mark.parametrize("name", ["absent.safetensors", "absent.pt"])
def test_an_absent_file_is_unreadable(tmp_path, name):
    with pytest.raises(CheckpointMismatch, match="unreadable"):
        read_tensors(tmp_path / name)


class Trained(torch.nn.Module):
    """A whole module, as torch.save(model) writes it."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(3, 2, bias=False)
        self.proj.weight.data = WEIGHTS["proj.weight"].clone()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({**WEIGHTS, "loss": np.float64(0.5)}, r"numpy\S*\.scalar"),
        ({"state_dict": WEIGHTS, "args": argparse.Namespace(lr=1)}, r"argparse\.Namespace"),
        ({**WEIGHTS, "at": datetime.date(2024, 1, 1)}, r"datetime\.date"),
        ({**WEIGHTS, "path": PurePosixPath("a")}, r"pathlib\S*\.PurePosixPath"),
        ({"model": {"proj.weight": WEIGHTS["proj.weight"].numpy()}}, r"numpy\S*_reconstruct"),
    ],
)
def test_other_objects_are_named_and_the_command_printed_drops_them(tmp_path, content, name, zipped):
    file = tmp_path / "the model's.pt"
    torch.save(content, file, _use_new_zipfile_serialization=zipped)

    with pytest.raises(CheckpointMismatch, match=name) as caught:
        read_tensors(file)

    assert str(caught.value).isprintable()
    command = shlex.split(str(caught.value)[str(caught.value).index("python -c") :])
    subprocess.run([sys.executable, *command[1:]], check=True)
    kept = read_weights(tmp_path / "the model's.tensors.pt", Reading())[0]
    assert torch.equal(kept["proj.weight"], WEIGHTS["proj.weight"])
    assert len(kept) == 1


def test_a_pickled_module_is_named(tmp_path):
    torch.save(Trained(), tmp_path / "model.pt")

    with pytest.raises(CheckpointMismatch, match=r"Trained.*python -c"):
        read_tensors(tmp_path / "model.pt")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_names_in_a_file_do_not_reach_the_terminal_as_commands(tmp_path, suffix):
    weights = {"proj\x1b[31m.weight\r\x9b2J": torch.ones(1)}
    save = save_file if suffix == ".safetensors" else torch.save
    save(weights, tmp_path / f"model{suffix}")

    with pytest.raises(CheckpointMismatch, match=r"1 unexpected: proj\\x1b\[31m") as caught:
        check_shapes("tiny", read_tensors(tmp_path / f"model{suffix}"), {})

    assert str(caught.value).isprintable()


# check_shapes


def test_matching_weights_pass_in_silence():
    check_shapes("tiny", WEIGHTS, {"proj.weight": (2, 3)})


def test_all_three_kinds_of_mismatch_stand_in_one_message():
    weights = {**WEIGHTS, "extra.bias": torch.zeros(1)}

    with pytest.raises(CheckpointMismatch) as caught:
        check_shapes("tiny", weights, {"proj.weight": (3, 2), "norm.weight": (2,)})

    assert str(caught.value) == (
        "tiny: the checkpoint is not this model's. 1 missing: norm.weight; 1 unexpected: extra.bias; "
        "1 mis-shaped: proj.weight is [2, 3], wanted [3, 2]. "
        "Choose the configuration it was trained with (--config), or another checkpoint"
    )


def test_long_lists_are_cut_with_the_number_left_out():
    with pytest.raises(CheckpointMismatch, match=r"30 missing: k00, .*k11, and 18 more\."):
        check_shapes("tiny", {}, {f"k{i:02}": (1,) for i in range(30)})


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_tensors_of_no_or_one_value_are_looked_at(shape):
    check_shapes("tiny", {"a": torch.zeros(shape)}, {"a": shape})
    if torch.Size(shape).numel():
        with pytest.raises(CheckpointMismatch, match="1 tensors hold values that cannot be used: a has 1 of 1 not"):
            check_shapes("tiny", {"a": torch.full(shape, float("nan"))}, {"a": shape})


def test_the_largest_float32_is_a_value_and_the_next_float64_too_if_it_rounds_to_it():
    largest = torch.finfo(torch.float32).max
    near = torch.tensor([largest, -largest, largest * (1 + 2**-26)], dtype=torch.float64)
    check_shapes("tiny", {"a": near}, {"a": (3,)})
    too_large = torch.tensor([0.0, -largest * (1 + 2**-24)], dtype=torch.float64)
    with pytest.raises(CheckpointMismatch, match=r"a has 1 of 2 not finite in float32, first -3\.40\d+e\+38 at \[1\]"):
        check_shapes("tiny", {"a": too_large}, {"a": (2,)})


def test_every_tensor_that_cannot_be_used_is_in_one_message():
    weights = {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.int8), "c": torch.tensor([float("inf")])}
    with pytest.raises(CheckpointMismatch, match=r"2 tensors .*: b is int8, c has 1 of 1 not finite"):
        check_shapes("tiny", weights, {name: (1,) for name in weights})


# a folder


def test_a_folder_of_an_adapter_is_refused_but_not_one_with_whole_weights_beside_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointMismatch, match=r"LoRA.*adapter_config\.json.*merge them into the weights first"):
        locate(str(tmp_path), [])
    (tmp_path / "model.safetensors").touch()
    assert locate(str(tmp_path), []) == tmp_path
