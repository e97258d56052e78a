"""What the process around a runtime does to it: forks, copies, torch's settings, changed files, few descriptors."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from shutil import copytree, rmtree

import pytest
import torch

from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.watch import Watch
from voicehub_aot.compiler.models import resolve
from voicehub_aot.engines import _memory, aoti
from voicehub_aot.errors import ArtifactCorrupt, LoadError, OptionUnsupported, UsageError
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.load import load
from voicehub_aot.runtime.runtime import Runtime

ARTIFACTS = ["supertonic_packed", "supertonic_shared", "f5_shared"]
LIBRARY = "model.wrapper.so"


@pytest.fixture(params=ARTIFACTS)
def artifact(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(params=["supertonic_packed", "supertonic_shared"])
def mine(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An artifact to damage."""
    copytree(request.getfixturevalue(request.param), tmp_path / "mine.aot")
    return tmp_path / "mine.aot"


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sampled(runtime: Runtime) -> torch.Tensor:
    """Two rows, one of them short, of conditioning of ones."""
    sizes: dict[str | int, int] = {"B": 2, "frames": 8, "text": 5}
    given = {
        i.name: torch.ones([sizes.get(s, s) for s in i.shape], dtype=i.torch_dtype, device="cpu")
        for i in runtime.spec.conditioning
    }
    return runtime.sample(seed=1, lengths=[8, 6], **given)


def evaluated(runtime: Runtime) -> torch.Tensor:
    """Upstream's own call, at a time of the first program."""
    sizes: dict[str | int, int] = {"B": 2, "frames": 8, "text": 5}
    given = {
        i.name: torch.ones([sizes.get(s, s) for s in i.shape], dtype=i.torch_dtype, device="cpu")
        for i in (runtime.spec.state, *runtime.spec.conditioning)
    }
    state = given.pop(runtime.spec.state.name)
    times = torch.tensor(
        [0.0, runtime.programs[next(iter(runtime.programs))].times[1]], dtype=torch.float64, device="cpu"
    )
    return runtime.evaluate(state, times, packed=True, lengths=[8, 6], **given)


# --- loading again and again

RELOADS = """
import gc, json, os, re, sys
import voicehub_aot

def state():
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = len(maps.readlines())
    with open("/proc/self/status") as status:
        resident = int(re.search(r"VmRSS:\\\\s+(\\\\d+)", status.read())[1])
    return mapped, len(os.listdir("/proc/self/fd")), resident

for n in range(160):
    if n == 40:
        before = state()
    runtime = voicehub_aot.load(sys.argv[1], threads=1)
    if n % 2:
        runtime = None
after = state()
print(json.dumps([b - a for a, b in zip(before, after)]))
""".replace("\\\\", "\\")


def test_loading_again_and_again_leaves_nothing_behind(artifact: Path) -> None:
    """Measured: 0 to 3 mappings of malloc's, no descriptor, up to 1.4 MiB in 120 loads; it was 240, 0, 60 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", RELOADS, str(artifact)], capture_output=True, text=True, timeout=300, check=True
    )
    mappings, descriptors, kilobytes = json.loads(done.stdout)
    assert mappings <= 12
    assert descriptors <= 0
    assert kilobytes < 6000


def test_a_shared_engine_that_is_opened_again_reads_the_new_weights(supertonic_shared: Path) -> None:
    """Its loader is an old one, which had let go of the weights."""
    first = load(supertonic_shared, threads=1)
    want = sampled(first)
    second = load(supertonic_shared, threads=1)
    del first
    third = load(supertonic_shared, threads=1)
    assert torch.equal(sampled(second), want)
    assert torch.equal(sampled(third), want)


def test_the_mapping_of_packed_weights_is_taken_out_and_the_librarys_own_are_not(supertonic_packed: Path) -> None:
    runtime = load(supertonic_packed, threads=1)
    for library in supertonic_packed.rglob(LIBRARY):
        own = _memory.mappings(library)
        assert any("x" in mapping.permissions for mapping in own)
        assert [m for m in own if m.offset >= aoti._image_end(library)] == []
    assert sampled(runtime).isfinite().all()


def descriptors() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


@contextmanager
def at_most_descriptors(further: int) -> Iterator[None]:
    """All taken but so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()) + 8, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(further):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def test_artifacts_that_come_and_go_take_one_descriptor_each(mine: Path) -> None:
    """Each is at the place of the one before, which is not run in its stead."""
    want = sampled(load(mine, threads=1))
    before = len(descriptors())
    for number in range(12):
        other = mine.with_name("other.aot")
        copytree(mine, other)
        rmtree(mine)
        other.rename(mine)
        assert torch.equal(sampled(load(mine, threads=1)), want), number
    assert len(descriptors()) <= before + 12


def test_artifacts_that_stay_take_one_descriptor_each(mine: Path) -> None:
    before = len(descriptors())
    kept = []
    for number in range(4):
        copytree(mine, mine.with_name(f"{number}.aot"))
        kept.append(load(mine.with_name(f"{number}.aot"), threads=1))
    assert len(descriptors()) <= before + 4


@pytest.mark.parametrize("further", range(5))
def test_a_process_that_may_open_no_further_file_is_told_so(mine: Path, further: int) -> None:
    """Wherever in loading the last descriptor goes; 0 is before the manifest."""
    load(mine, threads=1)  # what is imported on the way has been
    other = mine.with_name("other.aot")
    copytree(mine, other)
    with at_most_descriptors(further):
        if further < 2:
            with pytest.raises(LoadError, match=r"too many files open .*; close some, or raise its limit"):
                load(other, threads=1)
        else:
            try:
                load(other, threads=1)
            except LoadError as error:
                assert "too many files open" in str(error)
    assert load(other, threads=1).programs


# --- forks

FORKS = """
import json, os, signal, sys
import torch, voicehub_aot

path, threads, computes, inside = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "computes", sys.argv[4]

def sampled(runtime):
    sizes = {"B": 1, "frames": 16, "text": 5}
    inputs = runtime.spec.conditioning
    given = {i.name: torch.ones([sizes.get(s, s) for s in i.shape], dtype=i.torch_dtype) for i in inputs}
    return runtime.sample(seed=1, lengths=[16], **given).sum().item()

runtime = voicehub_aot.load(path, threads=threads)
want = sampled(voicehub_aot.load(path, threads=1))
torch.set_num_threads(threads)
if computes:
    assert abs(sampled(runtime) - want) < 1e-3
if inside == "while another runs":
    runtime._turns.__enter__()
child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        if inside.startswith("loads"):
            runtime = voicehub_aot.load(path, threads=int(inside.split()[1]))
        print(json.dumps(abs(sampled(runtime) - want) < 1e-3), flush=True)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child hung"
"""
USED = r"was opened in process \d+, and this one .* is a fork of it; .*Load the artifact in each process after the fork"
LOADED = r"was forked after its parent \(process \d+\) had computed, .* wanted 2 .*threads=1, or fork before"


@pytest.mark.parametrize(
    ("threads", "parent", "child", "words"),
    [
        (2, "computes", "uses the parent's", USED),
        (2, "waits", "uses the parent's", USED),
        (2, "computes", "loads 2", LOADED),
        (2, "computes", "loads 1", ""),
        (2, "waits", "loads 2", ""),
        (1, "computes", "uses the parent's", ""),
        (1, "computes", "loads 2", ""),
        (1, "computes", "while another runs", USED),
    ],
)
def test_a_forked_process_answers_or_refuses_and_never_hangs(
    supertonic_shared: Path, threads: int, parent: str, child: str, words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(supertonic_shared), str(threads), parent, child],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if words:
        assert answer[0] == "ProcessForked"
        assert re.search(words, answer[1])
    else:
        assert answer is True


# --- files that change under an open runtime


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-8, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-8, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))


def with_the_old_time(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def changed(file: Path) -> None:
        status = file.stat()
        change(file)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    return changed


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def grow(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


@pytest.mark.parametrize("use", [sampled, evaluated])
@pytest.mark.parametrize("change", [overwrite, with_the_old_time(overwrite), cut, grow])
def test_a_weight_file_that_is_written_into_under_a_runtime_is_told(
    mine: Path, change: Callable[[Path], None], use: Callable[[Runtime], torch.Tensor]
) -> None:
    runtime = load(mine, threads=1)
    use(runtime)
    change(mine / store.WEIGHTS)
    with pytest.raises(ArtifactCorrupt, match=rf"{store.WEIGHTS}: was overwritten .* rename it, instead of writing"):
        use(runtime)


def test_a_library_that_is_written_into_under_a_runtime_is_told(mine: Path) -> None:
    runtime = load(mine, threads=1)
    library = sorted(mine.rglob(LIBRARY))[0]
    grow(library)  # it runs in this process: cutting it would end it
    with pytest.raises(ArtifactCorrupt, match=rf"{LIBRARY}: was overwritten while this process has it open"):
        sampled(runtime)


def replaced(artifact: Path) -> None:
    copytree(artifact, artifact.with_name("new.aot"))
    artifact.rename(artifact.with_name("old.aot"))
    artifact.with_name("new.aot").rename(artifact)
    cut(artifact / store.WEIGHTS)


@pytest.mark.parametrize(
    "change",
    [
        rmtree,
        replaced,
        lambda a: a.rename(a.with_name("moved.aot")),
        lambda a: (a / store.WEIGHTS).unlink(),
        lambda a: (a / store.WEIGHTS).touch(),
        lambda a: (a / store.WEIGHTS).chmod(0o400),
        lambda a: (a / store.WEIGHTS).write_bytes((a / store.WEIGHTS).read_bytes()),
        lambda a: os.link(a / store.WEIGHTS, a / "another name"),
    ],
    ids=["deleted", "replaced", "moved", "weights deleted", "touched", "chmod", "the same bytes", "linked"],
)
def test_a_runtime_outlives_what_leaves_its_files_whole(mine: Path, change: Callable[[Path], object]) -> None:
    runtime = load(mine, threads=1)
    want = sampled(runtime)
    change(mine)
    assert torch.equal(sampled(runtime), want)


def test_files_that_were_only_touched_are_read_once_more_and_no_further(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    manifest = store.read_manifest(mine)
    watch = Watch(mine, {store.WEIGHTS: manifest.files[store.WEIGHTS]})
    monkeypatch.setattr("voicehub_aot.artifacts.watch.sha256", lambda path: read.append(path) or store.sha256(path))
    watch.check()
    (mine / store.WEIGHTS).touch()
    watch.check()
    watch.check()
    assert read == [mine / store.WEIGHTS]


# --- copies and pickles


def test_a_second_load_does_not_change_the_first_runtimes_threads(supertonic_shared: Path) -> None:
    first, second = load(supertonic_shared, threads=1), load(supertonic_shared, threads=2)
    used = []
    for runtime in (first, second, first):
        sampled(runtime)
        used.append(torch.get_num_threads())
    assert used == [1, 2, 1]


def test_a_copy_is_the_runtime_itself(artifact: Path) -> None:
    runtime = load(artifact, threads=1)
    assert copy.copy(runtime) is copy.deepcopy(runtime) is runtime
    denoiser = copy.deepcopy(runtime.denoiser())
    assert denoiser.runtime is runtime


def test_a_pickle_opens_the_artifact_again_with_the_same_options(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(artifact.parent)
    runtime = load(artifact.name, threads=1, concurrency=2, engine="aoti")
    content = pickle.dumps((runtime, runtime.denoiser()))
    assert len(content) < 10_000, "weights have no place in it"
    monkeypatch.chdir(tmp_path)
    again, denoiser = pickle.loads(content)
    assert torch.equal(sampled(again), sampled(runtime))
    assert denoiser.runtime is again
    assert pickle.dumps(again) == pickle.dumps(runtime)


def test_a_pickle_of_an_artifact_that_was_replaced_is_refused(
    supertonic_shared: Path, f5_shared: Path, tmp_path: Path
) -> None:
    copytree(supertonic_shared, tmp_path / "a.aot")
    content = pickle.dumps(load(tmp_path / "a.aot", threads=1))
    rmtree(tmp_path / "a.aot")
    with pytest.raises(ArtifactCorrupt, match="no such artifact folder"):
        pickle.loads(content)
    copytree(f5_shared, tmp_path / "a.aot")
    with pytest.raises(ArtifactCorrupt, match="is another artifact than the runtime was pickled with"):
        pickle.loads(content)


def test_a_runtime_without_an_artifact_says_why_it_cannot_be_pickled(supertonic_packed: Path) -> None:
    region = resolve("supertonic", "tiny", "synthetic").region
    runtime = eager_runtime(region, load(supertonic_packed, threads=1).programs.values(), "supertonic")
    for it in (runtime, runtime.denoiser()):
        with pytest.raises(UsageError, match="cannot be pickled, for it was not loaded from an artifact"):
            pickle.dumps(it)
        assert copy.deepcopy(it) is not None


# --- settings of torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def without_onednn() -> Iterator[None]:
    before = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before[0])


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": nullcontext,
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float16 by default": lambda: default_dtype(torch.float16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "meta by default": lambda: default_device("meta"),
    "within a meta device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "deterministic algorithms": deterministic,
    "high matrix precision": lambda: matmul_precision("high"),
    "without oneDNN": without_onednn,
}


@pytest.fixture(scope="module")
def without_settings(
    supertonic_packed: Path, supertonic_shared: Path, f5_shared: Path
) -> dict[Path, list[torch.Tensor]]:
    before = {path: load(path, threads=1) for path in (supertonic_packed, supertonic_shared, f5_shared)}
    return {path: [sampled(runtime), evaluated(runtime)] for path, runtime in before.items()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_torch_change_no_byte(
    artifact: Path, setting: str, without_settings: dict[Path, list[torch.Tensor]]
) -> None:
    opened_outside = load(artifact, threads=1)
    with SETTINGS[setting]():
        opened_inside = load(artifact, threads=1)
        got = [[sampled(runtime), evaluated(runtime)] for runtime in (opened_outside, opened_inside)]
        anchor = opened_inside.denoiser().anchor
    got.append([sampled(opened_inside), evaluated(opened_inside)])
    for results in got:
        for result, want in zip(results, without_settings[artifact], strict=True):
            assert result.dtype == torch.float32
            assert torch.equal(result, want)
    assert (anchor.dtype, anchor.device.type) == (torch.float32, "cpu")


def test_a_precision_that_would_change_results_is_refused(supertonic_packed: Path) -> None:
    """oneDNN then computes float32 products in bfloat16, which is not what parity was proven for."""
    runtime = load(supertonic_packed, threads=1)
    want = sampled(runtime)
    with matmul_precision("medium"), pytest.raises(OptionUnsupported, match=r"set_float32_matmul_precision\('high'\)"):
        sampled(runtime)
    assert torch.equal(sampled(runtime), want)


def test_a_seed_leaves_torchs_own_generator_alone(supertonic_packed: Path) -> None:
    runtime = load(supertonic_packed, threads=1)
    before = torch.get_rng_state()
    sampled(runtime)
    assert torch.equal(torch.get_rng_state(), before)
