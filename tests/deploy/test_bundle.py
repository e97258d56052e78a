"""Bundles for other hosts: what a host without the package computes from them, and Triton's model repository."""

import ast
import importlib.util
import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
import triton_schema
from google.protobuf import text_format
from safetensors.numpy import load_file

from voicehub_aot import errors
from voicehub_aot.artifacts import store
from voicehub_aot.compiler.build import build
from voicehub_aot.compiler.options import Options
from voicehub_aot.deploy import bundle
from voicehub_aot.deploy.bundle import write_bundle
from voicehub_aot.runtime.load import load
from voicehub_aot.spec import guidance
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler, midpoint
from voicehub_aot.spec.target import default_target, parse_target

EXAMPLE = Path(__file__).parents[2] / "examples/run_onnx_dir.py"


def module_at(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model(toy.Toy):
    """The toy with all that a request may say of its sizes: a frames' extent apart from the length, a text length."""

    def forward(self, x, time, cond, ids, lengths, extent, text_lengths, drop):
        is_text = torch.arange(ids.shape[1]) < text_lengths[:, None]
        velocity, summary = super().forward(x, time, cond, torch.where(is_text, ids, -1), lengths, drop)
        return velocity + (extent - lengths)[:, None, None] * x, summary


def spec():
    *inputs, lengths, drop = toy.SPEC.inputs
    frames, text = toy.SPEC.dims
    more = [lengths.model_copy(update={"name": name}) for name in ("extent", "text_lengths")]
    dims = (
        frames.model_copy(update={"extent": "extent"}),
        text.model_copy(update={"length": "text_lengths"}),
    )
    return toy.SPEC.model_copy(update={"inputs": (*inputs, lengths, *more, drop), "dims": dims})


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, engine_cache):
    """Two programs, and values of every kind of source, one that `prepare` computes for each evaluation among them."""
    module = Model().eval().requires_grad_(False)
    module.load_state_dict(toy.region().module.state_dict())
    options = Options(
        Buckets(axes={"frames": (8, 16)}),
        (midpoint(linear(2)), euler(linear(3))),
        parse_target(default_target()),
        engines=("onnxruntime",),
        weights_mode="shared",
        shapes="dynamic",
        parity=False,
    )
    output = tmp_path_factory.mktemp("bundle") / "toy.aot"
    build(replace(toy.model(), region=Region(spec(), module)), options, output)
    return output


def request():
    """Two rows of unequal length, with what must not be read behind the shorter one."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "x": torch.randn(2, 11, toy.CHANNELS, generator=generator),
        "cond": torch.randn(2, 11, toy.COND, generator=generator),
        "ids": torch.tensor([[1, 2, 3], [4, 5, 6]]),
        "lengths": torch.tensor([11, 7]),
        "extent": torch.tensor([11, 9]),
        "text_lengths": torch.tensor([3, 2]),
    }
    tensors["x"][1, 9:] = torch.nan
    tensors["cond"][1, 9:] = torch.nan
    return tensors


def edited(artifact, **changes):
    """The artifact with another manifest, signed like one that was built."""
    manifest = store.read_manifest(artifact)
    store.write_manifest(artifact, manifest.model_copy(update=changes))


# --- onnx-dir


@pytest.fixture(scope="module")
def folder(artifact, tmp_path_factory):
    output = tmp_path_factory.mktemp("bundle") / "toy"
    write_bundle(artifact, "onnx-dir", output, replace=False)
    return output


def sampled_by_host(folder, tensors, program=None, scale=None):
    scales = None if scale is None else [scale]
    host = module_at(EXAMPLE, "run_onnx_dir")
    return torch.from_numpy(
        host.sample(folder, {name: tensor.numpy() for name, tensor in tensors.items()}, program, scales)
    )


def sampled_by_runtime(artifact, tensors, **how):
    conditioning = {name: tensor for name, tensor in tensors.items() if name != "x"}
    return load(artifact).sample(noise=tensors["x"], **conditioning, **how)


@pytest.mark.parametrize(
    ("program", "scale"), [(None, None), ("euler-3", 1.5), ("midpoint-2", 0.0)], ids=["default", "chosen", "unguided"]
)
def test_a_host_without_the_package_samples_what_the_runtime_samples(artifact, folder, program, scale):
    got = sampled_by_host(folder, request(), program, scale)

    torch.testing.assert_close(got, sampled_by_runtime(artifact, request(), program=program, guidance=scale))
    assert torch.all(got[1, 9:] == 0)


@pytest.mark.parametrize("absent", [("extent",), ("extent", "lengths", "text_lengths")])
def test_lengths_a_request_leaves_out_are_those_of_its_tensors(artifact, folder, absent):
    tensors = {name: torch.nan_to_num(t) if t.is_floating_point() else t for name, t in request().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in absent}

    torch.testing.assert_close(sampled_by_host(folder, tensors), sampled_by_runtime(artifact, tensors))


@pytest.mark.parametrize("name", sorted(request()))
def test_every_input_of_the_host_matters(folder, name):
    changed = request()
    changed[name] = changed[name] * 0.5 if changed[name].is_floating_point() else changed[name] - 1
    if name == "lengths":
        changed["lengths"] = torch.tensor([10, 7])

    assert not torch.equal(sampled_by_host(folder, changed), sampled_by_host(folder, request()))


def test_a_model_without_guidance_has_one_branch(artifact, tmp_path):
    plain = shutil.copytree(artifact, tmp_path / "plain.aot")
    edited(plain, region=spec().model_copy(update={"guidance": None}))
    write_bundle(plain, "onnx-dir", tmp_path / "out", replace=False)
    described = json.loads((tmp_path / "out/bundle.json").read_text())

    assert (described["guidance"], described["branches"]) == (None, [{"name": "conditional", "flags": {"drop": False}}])
    torch.testing.assert_close(sampled_by_host(tmp_path / "out", request()), sampled_by_runtime(plain, request()))
    assert "guidance" not in bundle.triton_config("plain", store.read_manifest(plain))


def test_the_reference_host_needs_numpy_and_onnxruntime_alone():
    tree = ast.parse(EXAMPLE.read_text())
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}

    assert imported - set(sys.stdlib_module_names) == {"numpy", "onnxruntime"}


def test_the_folder_holds_one_copy_of_the_weights_and_says_what_it_holds(artifact, folder):
    described = json.loads((folder / "bundle.json").read_text())

    assert {p.name for p in folder.iterdir()} == {*described["files"], "bundle.json"}
    assert {n: f["sha256"] for n, f in described["files"].items()} == {
        n: store.sha256(artifact / n) for n in ("prepare.onnx", "step.onnx", "weights.safetensors")
    }
    assert described["branches"][1] == {"name": "unconditional", "flags": {"drop": True}}
    assert (described["guidance"]["equation"], described["guidance"]["scales"]) == ("classifier_free", [2.0])
    assert described["promised"] == {"axes": {"frames": [8, 16]}}


def test_every_source_of_a_stage_input_occurs(folder):
    stages = json.loads((folder / "bundle.json").read_text())["stages"]
    sources = {stage: {(i["source"], i["by_evaluation"]) for i in stages[stage]["inputs"]} for stage in stages}

    assert {("request", False), ("table", False)} <= sources["prepare"]
    assert {("state", False), ("request", False), ("table", True), ("prepare", False), ("prepare", True)} <= sources[
        "step"
    ]


def test_time_tables_are_where_the_bundle_says(folder):
    described, tensors = json.loads((folder / "bundle.json").read_text()), load_file(folder / store.WEIGHTS)
    tables = [t for program in described["programs"].values() for t in program["tables"]]

    assert tables
    for table in tables:
        there = np.memmap(folder / table["file"], table["dtype"], "r", table["offset"], tuple(table["shape"]))
        np.testing.assert_array_equal(there, tensors[table["tensor"]])


def test_every_equation_has_a_formula():
    assert bundle.FORMULAS.keys() == guidance.EQUATIONS.keys()


# --- triton-repository


@pytest.fixture(scope="module")
def repository(artifact, tmp_path_factory):
    output = tmp_path_factory.mktemp("bundle") / "models"
    write_bundle(artifact, "triton-repository", output, replace=False)
    return output


def test_the_configuration_is_one_of_the_published_schema(repository):
    config = triton_schema.parse((repository / "toy/config.pbtxt").read_text())

    kinds = triton_schema.ENUMS["DataType"].split()
    inputs = {i.name: (kinds[i.data_type], list(i.dims), i.optional) for i in config.input}
    assert (config.name, config.backend, config.max_batch_size) == ("toy", "python", 0)
    assert inputs == {
        "cond": ("TYPE_FP32", [-1, -1, toy.COND], False),
        "ids": ("TYPE_INT64", [-1, -1], False),
        "noise": ("TYPE_FP32", [-1, -1, toy.CHANNELS], True),
        "seed": ("TYPE_INT64", [-1], True),
        "lengths": ("TYPE_INT64", [-1], True),
        "extent": ("TYPE_INT64", [-1], True),
        "text_lengths": ("TYPE_INT64", [-1], True),
        "program": ("TYPE_STRING", [1], True),
        "guidance": ("TYPE_FP64", [1], True),
        "guidance_by_branch": ("TYPE_STRING", [1], True),
    }
    assert [(o.name, kinds[o.data_type], list(o.dims)) for o in config.output] == [
        ("latent", "TYPE_FP32", [-1, -1, toy.CHANNELS])
    ]
    assert (repository / "toy/1" / config.parameters["artifact"].string_value / store.MANIFEST).is_file()


def test_a_name_with_quotes_is_written_as_text(artifact):
    text = bundle.triton_config('odd "name" \'é', store.read_manifest(artifact))

    assert triton_schema.parse(text).name == 'odd "name" \'é'


@pytest.mark.parametrize("wrong", ["max_batch: 1", "input { dtype: TYPE_FP32 }", "input { data_type: FP32 }"])
def test_the_schema_refuses_what_it_does_not_have(wrong):
    with pytest.raises(text_format.ParseError):
        triton_schema.parse(wrong)


class Tensor:
    """Text arrives as an object array of bytes."""

    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array

    @staticmethod
    def from_dlpack(name, tensor):
        return Tensor(name, tensor.numpy())


class TritonError:
    INTERNAL, INVALID_ARG = 1, 3

    def __init__(self, text, code):
        self.text, self.code = text, code


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self.output_tensors, self.error = output_tensors, error


def asking(**inputs):
    tensors = [Tensor(name, np.asarray(value)) for name, value in inputs.items()]
    return types.SimpleNamespace(inputs=lambda: tensors)


@pytest.fixture
def back_end(monkeypatch):
    names = types.SimpleNamespace(Tensor=Tensor, TritonError=TritonError, InferenceResponse=InferenceResponse)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", names)
    return names


@pytest.fixture
def served(back_end, repository):
    """The repository's model, as the server opens it."""
    config = triton_schema.parse((repository / "toy/config.pbtxt").read_text())
    parameters = {name: {"string_value": value.string_value} for name, value in config.parameters.items()}
    model = module_at(repository / "toy/1/model.py", "served_model").TritonPythonModel()
    model.initialize({"model_config": json.dumps({"parameters": parameters})})
    return model


def test_each_request_of_a_list_gets_its_own_answer(served, artifact):
    tensors, runtime = request(), load(artifact)
    given = {name: tensor for name, tensor in tensors.items() if name != "x"}
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    chosen = {"program": np.array([b"3"], dtype=object), "guidance": np.array([0.5])}

    noise, wrong, seeded, seeds = served.execute(
        [
            asking(noise=tensors["x"].numpy(), **arrays),
            asking(noise=tensors["x"].numpy(), cond=arrays["cond"]),
            asking(seed=np.array([4]), **arrays, **chosen),
            asking(seed=np.array([7, 4]), **arrays),
        ]
    )

    def latent(response):
        (tensor,) = response.output_tensors
        assert (tensor.name(), response.error) == ("latent", None)
        return torch.from_numpy(tensor.as_numpy())

    assert torch.equal(latent(noise), runtime.sample(noise=tensors["x"], **given))
    assert torch.equal(latent(seeded), runtime.sample(seed=4, program=3, guidance=0.5, **given))
    assert torch.equal(latent(seeds), runtime.sample(seed=[7, 4], **given))
    assert wrong.error.code == TritonError.INVALID_ARG
    assert "InputMismatch: toy: missing ['ids']" in wrong.error.text


def test_an_unknown_program_is_the_callers_mistake_and_a_bug_is_ours(served):
    arrays = {name: tensor.numpy() for name, tensor in request().items() if name != "x"}
    name = np.array([b"euler-9"], dtype=object)

    unknown, broken = served.execute([asking(seed=np.array([1]), program=name, **arrays), object()])

    assert (unknown.error.code, broken.error.code) == (TritonError.INVALID_ARG, TritonError.INTERNAL)
    assert "ProgramNotBuilt: toy: program 'euler-9' is not built" in unknown.error.text
    assert "our bug" in broken.error.text


def test_a_back_end_that_misreads_arrays_loads_no_model(back_end, monkeypatch):
    """What Triton 2.51 makes of every array where NumPy 2 is installed."""
    from voicehub_aot.deploy import triton_model

    repeated = np.broadcast_to(np.float32(0), 3)
    monkeypatch.setattr(Tensor, "from_dlpack", staticmethod(lambda name, tensor: Tensor(name, repeated)))
    with pytest.raises(errors.VersionUnsupported, match="install 'numpy<2'"):
        triton_model.TritonPythonModel().initialize({"model_config": "{}"})


def test_the_model_takes_its_thread_count_from_the_configuration(back_end, repository, monkeypatch):
    seen = {}
    module = module_at(repository / "toy/1/model.py", "threaded_model")
    monkeypatch.setattr(module, "load", lambda path, threads: seen.update(path=path, threads=threads))
    parameters = {"artifact": {"string_value": "toy.aot"}, "threads": {"string_value": "2"}}

    module.TritonPythonModel().initialize({"model_config": json.dumps({"parameters": parameters})})

    assert seen == {"path": repository / "toy/1/toy.aot", "threads": 2}


# --- the command


def test_export_tells_what_it_wrote(artifact, command, tmp_path):
    ran = command("export", artifact, "--format", "onnx-dir", "-o", tmp_path / "out", "--json")

    assert ran.code == 0, ran.err
    assert ran.document["files"] == ["bundle.json", "prepare.onnx", "step.onnx", "weights.safetensors"]
    assert "config.pbtxt" in command("export", artifact, "--format", "triton-repository", "-o", tmp_path / "t").out
    assert {p.name for p in tmp_path.iterdir()} == {"out", "t"}


def packed(artifact):
    """Its graphs are another engine's."""
    entries = store.read_manifest(artifact).engines
    edited(artifact, engines=tuple(e.model_copy(update={"engine": "aoti"}) for e in entries))


def altered(artifact):
    with (artifact / "step.onnx").open("r+b") as file:
        file.write(b"?")


@pytest.mark.parametrize(
    ("damage", "layout", "code", "words"),
    [
        (None, "gguf", 4, "--format 'gguf' is not known; choose onnx-dir or triton-repository"),
        (packed, "onnx-dir", 4, "holds aoti, no onnxruntime graphs; rebuild with --engine onnxruntime"),
        (altered, "onnx-dir", 5, "step.onnx was altered"),
        (altered, "triton-repository", 5, "step.onnx was altered"),
    ],
)
def test_what_cannot_be_exported_says_so_and_writes_nothing(artifact, command, tmp_path, damage, layout, code, words):
    copy = shutil.copytree(artifact, tmp_path / "toy.aot")
    if damage:
        damage(copy)

    ran = command("export", copy, "--format", layout, "-o", tmp_path / "out", "--json")

    assert (ran.code, set(ran.document)) == (code, {"error"})
    assert words in ran.document["error"]["message"]
    assert [p.name for p in tmp_path.iterdir()] == ["toy.aot"]


def test_an_export_replaces_by_force_alone_and_never_its_artifact(artifact, command, tmp_path):
    copy = shutil.copytree(artifact, tmp_path / "shelf/toy.aot")
    output = tmp_path / "out"
    export = ("export", copy, "--format", "onnx-dir", "-o")

    assert command(*export, output).code == 0
    assert (command(*export, output).code, command(*export, output, "--force").code) == (2, 0)
    for wrong in (copy, copy / "inside", copy.parent):
        ran = command(*export, wrong, "--force")
        assert (ran.code, "holds the artifact" in ran.err) == (2, True)
    store.verify_files(copy, store.read_manifest(copy))
