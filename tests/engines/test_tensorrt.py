"""The TensorRT engine: graph, profiles, plan key and the checks at load here; builder and runtime on a GPU."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import toy

from voicehub_aot import engines
from voicehub_aot.compiler.export import export_program, export_region, named_dims
from voicehub_aot.compiler.jobs import dynamic_axes, plan_jobs, size_spans
from voicehub_aot.compiler.options import Options
from voicehub_aot.compiler.split import split
from voicehub_aot.engines import Source, StageCode, _plan, tensorrt
from voicehub_aot.errors import (
    ArtifactCorrupt,
    CompileFailed,
    EngineUnavailable,
    MissingDependency,
    NoBucketFits,
    TargetMismatch,
    VersionUnsupported,
)
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.region import TensorSpec
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.target import default_target, parse_target

TARGET = parse_target(default_target())
HOPPER = _plan.Machine(sm=90, tensorrt="10.9.0.34")
KEY = _plan.Key(machine=HOPPER, precision="fp32", graph="0123456789abcdef" * 4)
X = TensorSpec(name="x", shape=("B", "frames", 64), dtype="float32")


def options(**axes):
    return Options(Buckets(axes=axes), (euler(linear(2)), euler(linear(7))), TARGET)


def stage_code(seed=0):
    """The toy's step, exported, with the job it came from."""
    graph, symbols = export_region(toy.region(seed))
    chosen = options(frames=(16,))
    job = plan_jobs(split(graph, toy.SPEC, symbols), chosen, "tensorrt")[1]
    dynamic = {v.name: d for v, d in zip(job.inputs, dynamic_axes(job, named_dims(toy.SPEC)), strict=True)}
    program = export_program(job.module, job.examples, dynamic, "step")
    return job, StageCode("step", program, job.inputs, job.outputs, job.examples, size_spans(toy.SPEC, chosen))


# Profiles


def test_each_bucket_is_a_span_and_rows_count_the_guidance_branches():
    spans = size_spans(toy.SPEC, options(frames=(64, 128), batch=(1, 4)))

    assert spans == {
        "B": ((1, 2), (3, 8)),
        "frames": ((1, 64), (65, 128)),
        "text": ((1, 64),),  # not promised: the region's limits
        "N": ((1, 7),),
    }


def test_an_unpromised_batch_serves_a_few_requests():
    assert size_spans(toy.SPEC, options(frames=(64,)))["B"] == ((1, 2), (3, 8))


def test_a_profile_is_narrow_and_tuned_for_its_bucket():
    built = _plan.profiles([X], {"B": ((1, 2),), "frames": ((1, 64), (65, 128)), "text": ((1, 9), (10, 20))})

    assert [(p["x"].least, p["x"].likely, p["x"].most) for p in built] == [
        ((1, 1, 64), (2, 64, 64), (2, 64, 64)),
        ((1, 65, 64), (2, 128, 64), (2, 128, 64)),
    ]


def test_a_size_computed_from_another_follows_it():
    halved = TensorSpec(name="y", shape=(3, "2*frames + 1", "N"), dtype="float32")

    (profile,) = _plan.profiles([halved], {"frames": ((4, 8),), "N": ((1, 7),)})

    assert (profile["y"].least, profile["y"].most) == ((3, 9, 1), (3, 17, 7))


def test_too_many_profiles_are_merged_without_a_gap():
    frames = tuple((16 * n + 1, 16 * n + 16) for n in range(15))
    built = _plan.profiles([X], {"B": ((1, 2), (3, 8)), "frames": frames})

    assert len(built) == 16
    covered = sorted({(p["x"].least[1], p["x"].most[1]) for p in built})
    assert covered[0][0] == 1
    assert covered[-1][1] == 240
    assert all(a[1] + 1 == b[0] for a, b in pairwise(covered))


def test_a_size_without_a_range_is_named():
    with pytest.raises(CompileFailed, match="frames"):
        _plan.profiles([X], {"B": ((1, 2),)})


@pytest.mark.parametrize(("shape", "number"), [((1, 1, 64), 0), ((2, 64, 64), 0), ((1, 65, 64), 1), ((2, 128, 64), 1)])
def test_a_call_finds_its_profile(shape, number):
    assert _plan.profile_for(plan(), {"x": shape}, "step") == number


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 129, 64), (1, 64, 63), (1, 64)])
def test_a_call_beyond_every_profile_says_what_is_too_large(shape):
    with pytest.raises(NoBucketFits, match=r"x \(.*largest \(2, 128, 64\).*batch="):
        _plan.profile_for(plan(), {"x": shape}, "step")


# The graph


def test_the_parser_reads_the_stage_with_its_weights_from_the_file_beside_it(tmp_path):
    import onnxruntime

    job, code = stage_code()
    graph = _plan.write_graph(code, tmp_path)
    session = onnxruntime.InferenceSession(graph.path, providers=["CPUExecutionProvider"])

    results = session.run(None, {v.name: t.numpy() for v, t in zip(job.inputs, job.examples, strict=True)})

    assert graph.precision == "fp32"
    assert set(graph.weights) == set(code.weights)
    for got, want in zip(results, job.module(*job.examples), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want)


def test_the_digest_is_of_the_graph_and_not_of_its_weights(tmp_path):
    first, second = (_plan.write_graph(stage_code(seed)[1], tmp_path / str(seed)) for seed in (0, 1))

    assert first.digest == second.digest


def test_precision_tells_every_float_type():
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    nodes = [
        helper.make_node("Cast", ["x"], ["low"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["low"], ["y"], to=TensorProto.FLOAT),
    ]

    assert _plan.precision(helper.make_model(helper.make_graph(nodes, "g", [value], [result]))) == "bf16-fp32"


# Key, record and what is checked at load


def plan(**changes):
    profiles = _plan.profiles([X], {"B": ((1, 2),), "frames": ((1, 64), (65, 128))})
    return _plan.Plan(**{"key": KEY, "profiles": profiles, "workspace_bytes": (1024, 2048), **changes})


def installed(folder, built, **changes):
    """An artifact that holds this plan."""
    _plan.write_plan(folder / "compiled", built, b"plan")
    path = tensorrt.install(folder / "compiled", folder / "artifact", "step", TARGET)
    files = [f.relative_to(folder / "artifact").as_posix() for f in (folder / "artifact").rglob("*") if f.is_file()]
    fields = {"digests": dict.fromkeys(files, ""), "inputs": (X,), "outputs": (), "constants": {}, "where": "a step"}
    return Source(**{"root": folder / "artifact", "path": path, **fields, **changes})


def test_a_plan_is_named_by_gpu_version_precision_and_graph():
    assert KEY.name == "sm90-trt10.9.0.34-fp32-0123456789abcdef"


def test_an_installed_plan_is_found_again(tmp_path):
    read, file = _plan.read_plan(installed(tmp_path, plan()), HOPPER)

    assert read == plan()
    assert (file.name, file.read_bytes()) == (f"{KEY.name}.plan", b"plan")
    assert file.parent == tmp_path / "artifact/engines/tensorrt/step"


@pytest.mark.parametrize(
    ("machine", "error", "says"),
    [
        ({"sm": 89}, TargetMismatch, "sm90.*sm89"),
        ({"tensorrt": "10.9.0.35"}, VersionUnsupported, r"10\.9\.0\.34.*10\.9\.0\.35"),
    ],
)
def test_a_plan_of_another_machine_is_refused(tmp_path, machine, error, says):
    with pytest.raises(error, match=says):
        _plan.read_plan(installed(tmp_path, plan()), HOPPER.model_copy(update=machine))


def test_a_plan_of_another_graph_than_the_record_tells_is_corrupt(tmp_path):
    source = installed(tmp_path, plan())
    other = plan(key=KEY.model_copy(update={"graph": "f" * 64}))
    (source.root / source.path / _plan.RECORD).write_text(other.model_dump_json())

    with pytest.raises(ArtifactCorrupt, match=r"ffffffffffffffff\.plan, which is missing"):
        _plan.read_plan(source, HOPPER)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"digests": {}}, "plan.json is missing"),
        ({"inputs": (X.model_copy(update={"name": "z"}),)}, "not the stage's z"),
        ({"inputs": (X.model_copy(update={"shape": ("B", 64)}),)}, "not the stage's x"),
    ],
)
def test_a_record_that_does_not_fit_the_manifest_is_corrupt(tmp_path, changes, says):
    with pytest.raises(ArtifactCorrupt, match=says):
        _plan.read_plan(installed(tmp_path, plan(), **changes), HOPPER)


def test_a_damaged_record_is_corrupt(tmp_path):
    source = installed(tmp_path, plan())
    (source.root / source.path / _plan.RECORD).write_text(json.dumps({"key": 1}))

    with pytest.raises(ArtifactCorrupt, match="not the record of a plan"):
        _plan.read_plan(source, HOPPER)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tensorrt.timing_cache(tmp_path, HOPPER)
    _plan.replace_file(file, b"old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _plan.replace_file(file, b"new")

    assert file.relative_to(tmp_path).as_posix() == "tensorrt/sm90-trt10.9.0.34.timing"
    assert list(file.parent.iterdir()) == [file]
    assert file.read_bytes() == b"old"


# What is missing here


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)

    with pytest.raises(MissingDependency, match=r"pip install 'voicehub-aot\[tensorrt\]'"):
        engines.get("tensorrt").check()


def test_without_a_device_the_engine_is_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.9.0.34"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    with pytest.raises(EngineUnavailable, match="needs a CUDA device"):
        engines.get("tensorrt").check()


# The builder's and the refitter's answers


class FakeTensorRT:
    """The names the build calls, writing down what they were told.

    refused: weights it keeps inside. holds: weights the plan asks for, if not those marked. useless: timings.
    """

    __version__ = HOPPER.tensorrt
    BuilderFlag = SimpleNamespace(STRIP_PLAN="strip", REFIT_INDIVIDUAL="individual", TF32="tf32")
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    DataType = SimpleNamespace(FLOAT="float32")

    class ILogger:
        def __init__(self):
            pass

    def __init__(self, inputs, refused=(), plan=b"plan", holds=None, useless=None):
        self.inputs, self.refused, self.plan, self.holds, self.useless = inputs, refused, plan, holds, useless
        self.flags, self.marked, self.profiles, self.timings, self.given = {"tf32"}, [], [], [], {}

    Builder = OnnxParser = Runtime = Refitter = lambda self, *_: self
    create_network = create_builder_config = lambda self, *_: self
    num_inputs = property(lambda self: len(self.inputs))
    num_errors = 1
    Weights = staticmethod(lambda kind, address, count: (kind, address, count))

    def parse_from_file(self, path):
        return self.inputs is not None

    def get_error(self, number):
        return SimpleNamespace(desc=lambda: "an operator it does not know")

    def get_input(self, number):
        return SimpleNamespace(name=self.inputs[number].name, shape=(-1, -1), is_shape_tensor=False)

    def mark_weights_refittable(self, name):
        self.marked.append(name)
        return name not in self.refused

    def set_flag(self, flag):
        self.flags.add(flag)

    def clear_flag(self, flag):
        self.flags.discard(flag)

    def create_optimization_profile(self):
        shapes = {}
        self.profiles.append(shapes)
        return SimpleNamespace(set_shape=lambda name, *three: shapes.update({name: three}))

    def add_optimization_profile(self, profile):
        return len(self.profiles) - 1

    def create_timing_cache(self, data):
        self.timings.append(data)
        return None if data == self.useless else SimpleNamespace(serialize=lambda: data + b"+")

    def set_timing_cache(self, cache, ignore_mismatch):
        self.cache = cache
        return not ignore_mismatch

    def get_timing_cache(self):
        return self.cache

    def build_serialized_network(self, network, config):
        return self.plan

    def deserialize_cuda_engine(self, data):
        return self

    def get_all_weights(self):
        return self.marked if self.holds is None else self.holds

    def get_device_memory_size_for_profile_v2(self, number):
        return 1000 * (number + 1)

    def set_named_weights(self, name, weights):
        self.given[name] = weights
        return name not in self.refused

    def get_missing_weights(self):
        return []

    def refit_cuda_engine(self):
        return True


@pytest.fixture
def fake(monkeypatch):
    def use(inputs, **answers):
        package = FakeTensorRT(inputs, **answers)
        monkeypatch.setattr(tensorrt, "_ready", lambda: package)
        monkeypatch.setattr(tensorrt, "_machine", lambda: HOPPER)
        tensorrt._logger.cache_clear()
        return package

    yield use
    tensorrt._logger.cache_clear()


@pytest.fixture(scope="module")
def toy_step():
    return stage_code()[1]


def compile_step(code, folder, cache=None):
    code = replace(code, cache=cache or folder / "cache")
    tensorrt.compile_stage(code, "shared", TARGET, folder / "engine")
    return folder / "engine"


def test_the_builder_strips_the_weight_files_weights_and_keeps_full_float32(fake, toy_step, tmp_path):
    package = fake(toy_step.inputs)

    place = compile_step(toy_step, tmp_path)

    record = _plan.Plan.model_validate_json((place / _plan.RECORD).read_bytes())
    assert package.flags == {"strip", "individual"}
    assert set(package.marked) == set(toy_step.weights)
    assert [set(p) for p in package.profiles] == [{v.name for v in toy_step.inputs}] * len(record.profiles)
    assert record.workspace_bytes == (1000, 2000)
    assert sorted(f.name for f in place.iterdir()) == sorted([_plan.RECORD, f"{record.key.name}.plan"])
    assert sorted(f.name for f in tmp_path.iterdir()) == ["cache", "engine"]  # no scratch is left


def test_timings_are_kept_for_the_next_build(fake, toy_step, tmp_path):
    timings = []
    for number in range(2):
        package = fake(toy_step.inputs)
        compile_step(toy_step, tmp_path / str(number), tmp_path / "cache")
        timings += package.timings

    assert timings == [b"", b"+"]


def test_timings_that_are_refused_are_measured_anew(fake, toy_step, tmp_path):
    package = fake(toy_step.inputs, useless=b"damaged")
    file = tensorrt.timing_cache(tmp_path / "cache", HOPPER)
    _plan.replace_file(file, b"damaged")

    compile_step(toy_step, tmp_path)

    assert package.timings == [b"damaged", b""]
    assert file.read_bytes() == b"+"


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"refused": ("out.bias",)}, r"keep weights inside: out\.bias"),
        ({"plan": None}, "built no plan"),
        ({"holds": ["out.weight"]}, r"disagree about .*out\.bias"),
    ],
)
def test_a_builder_that_fails_fails_the_build(fake, toy_step, tmp_path, answers, says):
    fake(toy_step.inputs, **answers)

    with pytest.raises(CompileFailed, match=says):
        compile_step(toy_step, tmp_path)

    assert not (tmp_path / "engine").exists()


def test_a_graph_the_parser_refuses_tells_why(fake, toy_step, tmp_path):
    fake(None)

    with pytest.raises(CompileFailed, match="an operator it does not know"):
        compile_step(toy_step, tmp_path)


def refit(package, weights):
    tensorrt._refit(package, Source(None, "step", {}, (), (), weights, "a step"))


def test_weights_are_read_from_the_one_copy(fake):
    weight = torch.ones(3, 2)
    package = fake([], holds=["w"])

    refit(package, {"w": weight, "another": torch.zeros(1)})

    assert package.given == {"w": ("float32", weight.data_ptr(), 6)}


@pytest.mark.parametrize(("weights", "says"), [({}, "lacks w"), ({"w": torch.ones(1)}, "refused weight 'w'")])
def test_a_weight_that_does_not_fit_is_named(fake, weights, says):
    package = fake([], holds=["w"], refused=("w",))

    with pytest.raises(ArtifactCorrupt, match=says):
        refit(package, weights)


# On a GPU


@pytest.fixture(scope="module")
def on_device(tmp_path_factory):
    try:
        tensorrt.check()
    except (MissingDependency, EngineUnavailable) as missing:
        pytest.skip(str(missing))
    return toy.Compiled("tensorrt", "shared", tmp_path_factory.mktemp("tensorrt"))


def within(job, frames, rows=2):
    """The job's examples, cut to sizes that were promised."""
    sizes = {"frames": frames, "B": rows, "N": 2}
    inputs = []
    for value, example in zip(job.inputs, job.examples, strict=True):
        cut = example
        for axis, size in enumerate(value.shape):
            cut = cut.narrow(axis, 0, min(sizes.get(size, cut.shape[axis]), cut.shape[axis]))
        inputs.append(cut.contiguous())
    return inputs


def run(engine, inputs):
    return [t.cpu() for t in engine([t.cuda() for t in inputs])]


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["prepare", "step"])
@pytest.mark.parametrize(("frames", "rows"), [(16, 2), (1, 1), (7, 1)])
def test_an_opened_stage_computes_the_stage(on_device, stage, frames, rows):
    job = getattr(on_device, stage)
    inputs = within(job, frames, rows)

    results = run(on_device.open(job), inputs)

    for got, want in zip(results, job.module(*inputs), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_a_plan_takes_other_weights(on_device):
    job = on_device.step
    ours = {n: t.clone() for n, t in on_device.constants(job).items()}
    inputs = within(job, 16)
    (before,) = run(on_device.open(job), inputs)

    ours["out.bias"] += 1.0
    (after,) = run(on_device.open(job, ours), inputs)

    assert (after - before).abs().max().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.gpu
def test_calls_keep_their_inputs_and_own_their_outputs_whatever_the_stream(on_device):
    job = on_device.step
    engine = on_device.engine.open_stage(on_device.source(job), 2)
    inputs = [t.cuda() for t in within(job, 16)]
    kept = [t.clone() for t in inputs]
    (want,) = engine(inputs)
    want = want.cpu()

    def call(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            (got,) = engine(inputs)
            again = engine(inputs)[0]
            assert got.data_ptr() not in {again.data_ptr(), *(t.data_ptr() for t in inputs)}
            return got.cpu()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, range(32)))

    for got in results:
        torch.testing.assert_close(got, want)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


@pytest.mark.gpu
def test_a_call_does_not_wait_for_the_device(on_device):
    job = on_device.step
    engine = on_device.open(job)
    inputs = [t.cuda() for t in within(job, 16)]
    engine(inputs)
    torch.cuda.synchronize()

    torch.cuda._sleep(2_000_000_000)  # cycles: about a second of device work ahead of the call
    done = torch.cuda.Event()
    engine(inputs)
    done.record()

    assert not done.query()
