"""Memory stays bounded over requests of many lengths: the ladder's sizes, who uses them, and what a process holds."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import voicehub_aot
from voicehub_aot.artifacts.manifest import digest_of
from voicehub_aot.engines import ENGINES, kernel_bytes
from voicehub_aot.spec.bucket import Ladder, doubling, rungs_between, waste
from voicehub_aot.spec.region import Dim

FRAMES = Dim(name="frames", max=700, doc="")


def test_buckets_are_rungs_and_the_widest_steps_are_divided_first() -> None:
    assert rungs_between((64, 128, 250), 3) == (64, 128, 250)
    assert rungs_between((64, 128, 250), 4) == (64, 128, 189, 250)
    assert rungs_between((64, 128, 250), 8) == (32, 64, 96, 128, 159, 189, 220, 250)
    assert rungs_between((2, 5), 9) == (1, 2, 3, 4, 5)
    assert rungs_between((1, 2, 3), 2) == (1, 2, 3)
    assert rungs_between((), 8) == ()


def test_a_dimension_read_once_per_request_has_few_rungs_up_to_its_limit() -> None:
    assert doubling(300) == (32, 64, 96, 128, 192, 256, 300)
    assert doubling(32) == (32,)
    assert doubling(20) == (20,)
    assert len(doubling(4096)) == 14


@pytest.mark.parametrize("count", [1, 7, 12, 31])
def test_more_rungs_waste_less_and_are_as_many_as_asked_for(count: int) -> None:
    lengths = dict.fromkeys(range(1, 2049), 1)
    coarse, fine = rungs_between((2048,), count), rungs_between((2048,), count + 1)
    assert (len(coarse), len(fine)) == (count, count + 1)
    assert waste(lengths, fine) < waste(lengths, coarse)


def test_a_size_runs_at_the_next_rung_and_the_ladder_goes_on_beyond_the_last() -> None:
    ladder = Ladder(axes={"frames": (32, 64, 100)})
    sizes = (2, 32, 33, 100, 101, 128, 129, 520, 650)
    assert [ladder.fit(FRAMES, n) for n in sizes] == [32, 32, 64, 100, 112, 128, 160, 640, 700]
    assert ladder.fit(FRAMES, FRAMES.min) == FRAMES.min
    assert ladder.fit(FRAMES.model_copy(update={"name": "text"}), 33) == 33
    without = Ladder(axes={"frames": ()})
    assert len({without.fit(FRAMES, n) for n in range(1, 513)}) <= 21
    assert all(n <= without.fit(FRAMES, n) <= max(n + 7, 1.25 * n) for n in range(1, 701))


def test_rungs_must_ascend() -> None:
    with pytest.raises(ValueError, match="strictly ascending"):
        Ladder(axes={"frames": (64, 64)})


def test_only_packed_aotinductor_keeps_kernels() -> None:
    keeping = [(e, w) for e in ENGINES for w in ("packed", "shared") if kernel_bytes(e, w)]
    assert keeping == [("aoti", "packed")]


def sizes_run(runtime: voicehub_aot.Runtime, length: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the state at each evaluation of one request."""
    seen: list[torch.Size] = []
    entry, engine = runtime.evaluator.step_engines[0]
    at = next(n for n, v in enumerate(entry.inputs) if v.name == runtime.spec.state.name)

    def watched(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append(inputs[at].shape)
        return engine(inputs)

    with monkeypatch.context() as patch:
        patch.setitem(runtime.evaluator.__dict__, "step_engines", [(entry, watched)])
        text, style = torch.randn(1, 24, 5), torch.randn(1, 7, 24)
        result = runtime.sample(seed=1, lengths=[length], text_emb=text, style_ttl=style)
    assert result.shape[-1] == length
    return seen


def test_a_packed_engine_runs_at_rungs_and_a_promised_length_unpadded(supertonic_packed, monkeypatch) -> None:
    runtime = voicehub_aot.load(supertonic_packed, overflow="run")
    rungs = runtime.ladder.axes["frames"]
    assert {8, 16, 24} <= set(rungs)
    for length in (8, 16, 24):
        assert {s[-1] for s in sizes_run(runtime, length, monkeypatch)} == {length}
    ran = {s[-1] for n in range(2, 41) for s in sizes_run(runtime, n, monkeypatch)}
    assert ran <= {*rungs, 32, 40}


def test_every_way_in_runs_at_rungs(supertonic_packed) -> None:
    runtime = voicehub_aot.load(supertonic_packed)
    seen = set()
    prepare = type(runtime.evaluator).prepare

    def watched(self, inputs, program, sizes):
        seen.add(sizes["frames"])
        return prepare(self, inputs, program, sizes)

    request = {"text_emb": torch.randn(1, 24, 5), "style_ttl": torch.randn(1, 7, 24)}
    state, rung = torch.randn(1, 12, 13), runtime.ladder.fit(runtime.spec.main, 13)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(runtime.evaluator), "prepare", watched)
        runtime.evaluate(state, 0.0, **request)
        list(runtime.trajectory(noise=state, start=1, stop=2, **request))
        runtime.stepper(state, "euler-3", 0, **request)
    assert seen == {rung}


def test_shared_engines_run_at_the_sizes_asked_for(f5_shared) -> None:
    assert voicehub_aot.load(f5_shared).ladder == Ladder()


def test_an_artifact_from_before_there_were_ladders_runs_at_the_sizes_asked_for(supertonic_packed, tmp_path) -> None:
    old = shutil.copytree(supertonic_packed, tmp_path / "old.aot")
    document = json.loads((old / "manifest.json").read_text())
    del document["ladder"], document["digest"]
    (old / "manifest.json").write_text(json.dumps({**document, "digest": digest_of(document)}))
    assert voicehub_aot.load(old).ladder == Ladder()


def test_inspect_prints_the_ladder_and_what_it_wastes(command, supertonic_packed) -> None:
    shown = command("inspect", supertonic_packed, "--json").document["ladder"]["frames"]
    assert shown["rungs"] == list(voicehub_aot.load(supertonic_packed).ladder.axes["frames"])
    assert 0 < shown["expected_waste"] < 0.5
    assert re.search(r"runs at .*frames=.*expected", command("inspect", supertonic_packed).out)


SOAK = """
import ctypes, sys, torch, voicehub_aot
class Heap(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena free fast maps mapped most fastest used unused top".split()]
libc = ctypes.CDLL(None); libc.mallinfo2.restype = Heap
runtime = voicehub_aot.load(sys.argv[1], threads=1, overflow="run")
def request(frames, text):
    given = {"text_emb": torch.randn(1, 24, text), "style_ttl": torch.randn(1, 7, 24)}
    list(runtime.trajectory(noise=torch.randn(1, 12, frames), stop=1, **given))
    heap = libc.mallinfo2(); return heap.used + heap.mapped
for size in (*runtime.ladder.axes.get("frames", ()), 32, 40): request(size, 40)
for text in range(8, 41, 8): request(24, text)
before = request(24, 24)
for number in range(400): after = request(2 + number % 39, 2 + 7 * number % 39)
print(after - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks glibc for its heap")
def test_400_requests_of_varied_lengths_add_nothing_to_the_heap(supertonic_packed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SOAK, str(supertonic_packed)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**20  # one kernel takes half of that; every length its own would take 50 MB
