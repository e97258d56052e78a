"""Artifacts that somebody made up: every digest is right, and nothing else need be. Each kind is named."""

from __future__ import annotations

import copy as copying
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from artifact_fuzz import signed
from conftest import Ran
from safetensors.torch import load_file, save_file

from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.reading import parse_json, read_bytes
from voicehub_aot.errors import ArtifactCorrupt, LoadError, TargetMismatch, VersionUnsupported
from voicehub_aot.proof.verify import verify
from voicehub_aot.runtime.load import load

Command = Callable[..., Ran]
Document = dict[str, Any]
MANIFEST, WEIGHTS = store.MANIFEST, store.WEIGHTS
PROGRAM = "programs/euler-3.json"
CASES = "parity/cases.json"
FUZZ = Path(__file__).parents[1].joinpath("artifact_fuzz.py")


@pytest.fixture
def copy(supertonic_shared: Path, tmp_path: Path) -> Path:
    shutil.copytree(supertonic_shared, tmp_path / "copy.aot")
    return tmp_path / "copy.aot"


def sign(artifact: Path, change: Callable[[Document], object] = lambda _: None) -> None:
    """The manifest after `change`, with digests of the files as they are and its own, whatever else it says."""
    document = json.loads((artifact / MANIFEST).read_text())
    document["files"] = {name: entry.model_dump() for name, entry in store.list_files(artifact).items()}
    change(document)
    (artifact / MANIFEST).write_text(json.dumps(signed(document)))


def put(*path: Any, to: Any) -> Callable[[Document], None]:
    """Replaces the node at `path`."""

    def change(document: Document) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


def drop(*path: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return change


def both(*changes: Callable[[Document], None]) -> Callable[[Document], None]:
    return lambda document: [change(document) for change in changes] and None


def without_mark(document: Document) -> None:
    """As an artifact of an earlier version, which does not say what its engines were made for."""
    for entry in document["engines"]:
        entry.pop("made_for", None)


# --- the manifest

INPUT, STEP_INPUT = ("region", "inputs"), ("engines", 1, "inputs")
STAGE = ("stages", "step")
INSIDE = "must be relative, lie inside"
OUTSIDE = ["../copy.aot/engines", "/etc/passwd", "engines/./x", "engines/../engines", "a\\b", "a\0b", "", "a//b", "a/"]
CHANGES: list[tuple[str, Callable[[Document], None], str]] = [
    ("no engines", put("engines", to=[]), "engines: holds no engine for the stage prepare"),
    ("no step engine", drop("engines", slice(1, None)), "engines: holds no engine for the stage step"),
    ("a bucket without engine", drop("engines", 2), "no step engine serves the promised bucket {'frames': 16}"),
    ("no programs", put("programs", to=[]), r"programs: \[\], wanted one or more"),
    ("a program twice", put("programs", to=["euler-3", "euler-3"]), "programs: .* distinct names"),
    ("a program that is absent", put("programs", to=["euler-9"]), "files: lacks 'programs/euler-9.json'"),
    ("a program outside", put("programs", to=["../../x"]), "files: lacks 'programs/../../x.json'"),
    ("no torch", drop("versions", "torch"), "versions: lacks torch"),
    ("no table stage", drop("stages", "table"), "stages: .* wanted table, prepare, step"),
    ("another stage", put("stages", "more", to={}), "stages.more"),
    ("buckets of no dimension", put("buckets", "axes", to={"depth": [8]}), "buckets: .* unknown axis 'depth'"),
    ("buckets beyond the model", put("buckets", "axes", "frames", 1, to=10**6), "buckets: .* lie outside"),
    ("buckets without end", put("buckets", "axes", "batch", to=list(range(1, 10**5))), "199998 combinations, wanted"),
    ("a size of true", put("buckets", "axes", "frames", 0, to=True), "buckets.axes.frames.0: .* integer"),
    ("a size as a fraction", put("buckets", "axes", "frames", 0, to=8.5), "buckets.axes.frames.0: .* integer"),
    ("weights unlisted", drop("files", WEIGHTS), f"files: lacks '{WEIGHTS}', and only what is listed"),
    ("program unlisted", drop("files", PROGRAM), f"files: lacks '{PROGRAM}'"),
    ("a digest of prose", put("files", WEIGHTS, "sha256", to="x"), "files.weights.safetensors.sha256: "),
    ("a size below nothing", put("files", WEIGHTS, "size", to=-1), "files.weights.safetensors.size: "),
    ("an engine's files unlisted", lambda m: [m["files"].pop(n) for n in [*m["files"]] if "prepare" in n] and None,
     "files holds nothing at 'engines/aoti/.*prepare'"),
    ("two engines at one path", lambda m: m["engines"][1].update(path=m["engines"][2]["path"]), "at the same path"),
    ("dtype of an input", put(*INPUT, 0, "dtype", to="float128"), "region.inputs.0.dtype: "),
    ("dtype of a border", put(*STEP_INPUT, 0, "dtype", to="float64"), "engines.1.inputs.0.dtype: dtype 'float64'"),
    ("dtype of a weight", put("engines", 0, "constants", 0, "dtype", to="F32"), "dtype 'F32' is not known"),
    ("a state of integers", put(*INPUT, 0, "dtype", to="int64"), "region.inputs.0: .* a state is float32"),
    ("a state without rows", put(*INPUT, 0, "shape", to=[12, "frames"]), "region.inputs.0: .* 'B' first"),
    ("a state of nothing", put(*INPUT, 0, "shape", 1, to=0), "region.inputs.0.shape.1"),
    ("a wider state", put(*INPUT, 0, "shape", 1, to=13), "is brought by nothing"),
    ("two states", put(*INPUT, 2, "binding", to="STATE"), "exactly one STATE input"),
    ("no state", drop(*INPUT, 0), "exactly one STATE input"),
    ("no time", drop(*INPUT, 1), "wanted a TIME input"),
    ("an input twice", lambda m: m["region"]["inputs"].append(m["region"]["inputs"][2]), "given twice"),
    ("an unknown size", put(*INPUT, 2, "shape", 2, to="texts"), r"unknown dimensions \['texts'\]"),
    ("a pad that is not an integer", put(*INPUT, 4, "pad", to=0.5), "pad 0.5, wanted an integer"),
    ("a pad beyond float32", put(*INPUT, 2, "pad", to=1e39), "region.inputs.2.pad"),
    ("no valid integer", put(*INPUT, 4, "high", to=1), "no integer lies from 1 to below 1"),
    ("no size of a dimension", put("region", "dims", 0, "min", to=200), "min 200 exceeds max 100"),
    ("a length of nothing", put("region", "dims", 0, "length", to="style"), "length or extent 'style'"),
    ("one input for two lengths", put("region", "dims", 1, "length", to="lengths"), "an input serves twice"),
    ("main_dim of nothing", put("region", "main_dim", to="depth"), "main_dim 'depth' is not a dimension"),
    ("no outputs", put("region", "outputs", to=[]), "wanted an output"),
    ("an output that nothing computes", put("region", "outputs", to=["velocity", "more"]), "are not computed"),
    ("an unknown equation", put("region", "guidance", "equation", to="none"), "equation 'none' is not known"),
    ("no branches", put("region", "guidance", "branches", to=[]), "region.guidance.branches: "),
    ("a branch twice", lambda m: m["region"]["guidance"]["branches"].append({"name": "conditional"}), "given twice"),
    ("a flag that is not a flag", put("region", "guidance", "branches", 1, "flags", to={"lengths": True}), "not flags"),
    ("a scale beyond float32", put("region", "guidance", "branches", 1, "scale", to=1e39), "branches.1.scale"),
    ("a call without the state", drop("region", "call", "parameters", 0), "no argument of the call feeds the state"),
    ("a call that feeds nothing", put("region", "call", "parameters", 3, "feeds", to="x"), "'latent_mask' .* 'x'"),
    ("a stage's input from nowhere", put(*STAGE, "inputs", 3, "name", to="x"), "stages.step: input 'x'"),
    ("a stage's output of another size", put("stages", "prepare", "outputs", 1, "shape", 2, to=7), "is brought by"),
    ("a step of two outputs", lambda m: m["stages"]["step"]["outputs"].append(m["stages"]["table"]["outputs"][0]),
     "stages"),
    ("an engine's further input", lambda m: m["engines"][1]["inputs"].append(m["engines"][1]["inputs"][0]),
     r"engines.1 \(aoti step\): its inputs and outputs are not those"),
    ("an engine without outputs", put("engines", 0, "outputs", to=[]), "its inputs and outputs are not those"),
    ("a weight of varying size", put("engines", 0, "constants", 0, "shape", to=["B"]), "fixed sizes"),
    ("an engine for another bucket", put("engines", 1, "bucket", to={"frames": 9}), "not a promised bucket"),
    ("an engine for no axis", put("engines", 1, "bucket", to={"depth": 8}), "not a promised bucket"),
    ("engines of fixed sizes for any size", put("shapes", to="dynamic"), "wanted any size"),
    ("serves what is not promised", put("engines", 1, "serves", to=[{"frames": 9}]), "serves .* wanted promised"),
    ("flops of other buckets", put("stages", "table", "flops", to={}), "flops are not of the same buckets"),
    *((f"engine path {path!r}", put("engines", 1, "path", to=path), INSIDE) for path in OUTSIDE),
    *((f"file {path!r}", put("files", path, to={"sha256": "0" * 64, "size": 0}), INSIDE) for path in OUTSIDE),
]  # fmt: skip
BY_NAME = [pytest.param(change, words, id=name) for name, change, words in CHANGES]


@pytest.mark.parametrize(("change", "words"), BY_NAME)
def test_a_manifest_that_does_not_fit_together_is_refused(
    copy: Path, change: Callable[[Document], None], words: str
) -> None:
    sign(copy, change)
    with pytest.raises(ArtifactCorrupt, match=f"manifest.json: unreadable .*{words}"):
        load(copy)


OTHERS: list[tuple[str, Callable[[Document], None], type[LoadError], str]] = [
    ("device", put("target", "device", to="cuda"), TargetMismatch, "built for cuda:x86-64-v3, wanted cpu"),
    ("engine", lambda m: [e.update(engine="abacus") for e in m["engines"]] and None, VersionUnsupported,
     "engine 'abacus' is not known, known are"),
    ("torch", put("versions", "torch", to=""), VersionUnsupported, "built with torch , this is"),
    ("schema", put("schema_version", to="1"), VersionUnsupported, "schema version '1'"),
    ("range of integers", put(*INPUT, 4, "high", to=10**6), ArtifactCorrupt, "was made for another region"),
    ("a larger dimension", put("region", "dims", 1, "max", to=10**6), ArtifactCorrupt, "made for another region"),
    ("lengths swapped", both(put("region", "dims", 0, "length", to="extent"),
                             put("region", "dims", 0, "extent", to="lengths")), ArtifactCorrupt, "another region"),
    ("more at once", put("engines", 0, "most_requests", to=9), ArtifactCorrupt, "made for another region, border"),
    ("engines swapped", lambda m: [e.update(path=p["path"]) for e, p in
                                   zip(m["engines"][1:], copying.deepcopy(m["engines"][:0:-1]), strict=True)] and None,
     ArtifactCorrupt, "made for another region, border or sizes"),
    ("no weights to bind", both(put("engines", 0, "constants", to=[]), without_mark), ArtifactCorrupt,
     "the weight file lacks"),
    ("packed, with weights outside", both(put("weights_mode", to="packed"), without_mark), ArtifactCorrupt,
     "holds packed weights, and names others"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), [pytest.param(*o[1:], id=o[0]) for o in OTHERS])
def test_what_fits_together_and_not_this_machine_or_the_engines_is_refused(
    copy: Path, change: Callable[[Document], None], error: type[LoadError], words: str
) -> None:
    sign(copy, change)
    with pytest.raises(error, match=words):
        load(copy)


def test_an_engine_that_takes_other_tensors_than_the_manifest_says_is_refused(copy: Path) -> None:
    """The libraries of two stages changed places before the digests were taken."""
    one, other = (next(copy.rglob(f"{stage}/**/model.wrapper.so")) for stage in ("prepare", "step-frames8"))
    one.rename(copy / "aside")
    other.rename(one)
    (copy / "aside").rename(other)
    sign(copy)
    with pytest.raises(ArtifactCorrupt, match=r"the library takes \d+ tensors and gives"):
        load(copy)


def test_an_artifact_of_an_earlier_version_opens(copy: Path) -> None:
    """It lacks fields that have defaults by now, and its digest is of what it has."""
    sign(copy, without_mark)
    assert load(copy).programs


# --- documents

TEXTS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("nested", lambda _: b"[" * 200_000, "is nested deeper than 32 levels"),
    ("nested objects", lambda _: b'{"a":' * 200_000, "is nested deeper than 32 levels"),
    ("a little nested", lambda _: b"[" * 40 + b"]" * 40, "is nested deeper than 32 levels"),
    ("not UTF-8", lambda text: text[:9] + b"\xff" + text[9:], "codec can't decode"),
    ("UTF-16", lambda text: text.decode().encode("utf-16"), "codec can't decode"),
    ("a key twice", lambda text: text.replace(b"{", b'{"name": 1, "name": 2, ', 1), "the key 'name' stands twice"),
    ("NaN", lambda text: text.replace(b"{", b'{"n": NaN, ', 1), "the number NaN is not finite"),
    ("infinity", lambda text: text.replace(b"{", b'{"n": -Infinity, ', 1), "the number -Infinity is not finite"),
    ("a float beyond floats", lambda text: text.replace(b"{", b'{"n": 1e999, ', 1), "the number 1e999 is not finite"),
    ("5,000 digits", lambda text: text.replace(b"{", b'{"n": ' + b"9" * 5000 + b", ", 1), "Exceeds the limit"),
    ("cut", lambda text: text[: len(text) // 2], "unreadable"),
    ("empty", lambda _: b"", "unreadable"),
    ("a number", lambda _: b"3", "unreadable"),
]


@pytest.mark.parametrize("file", [MANIFEST, PROGRAM, CASES])
@pytest.mark.parametrize(("change", "words"), [pytest.param(c, w, id=name) for name, c, w in TEXTS])
def test_a_document_that_is_not_strict_json_is_refused(
    copy: Path, file: str, change: Callable[[bytes], bytes], words: str
) -> None:
    (copy / file).write_bytes(change((copy / file).read_bytes()))
    if file != MANIFEST:
        sign(copy)
    with pytest.raises(ArtifactCorrupt, match=words):
        verify(copy, threads=1)


@pytest.mark.parametrize("file", [MANIFEST, PROGRAM, CASES])
def test_a_document_too_large_is_refused_before_it_is_read(copy: Path, file: str, command: Command) -> None:
    os.truncate(copy / file, store.LARGEST_DOCUMENT + 1)
    if file != MANIFEST:
        sign(copy)
    ran = command("verify", copy, "--json")
    assert (ran.code, ran.document["error"]["type"]) == (5, "ArtifactCorrupt")
    assert f"it has {store.LARGEST_DOCUMENT + 1} bytes, wanted at most" in ran.err


@pytest.mark.parametrize("header", [2**31, 2**40, 2**63, 2**64 - 1, 0, 1])
def test_a_weight_file_with_an_absurd_header_is_refused(copy: Path, header: int) -> None:
    content = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(struct.pack("<Q", header) + content[8:])
    sign(copy)
    with pytest.raises(ArtifactCorrupt, match=f"{WEIGHTS}: unreadable"):
        load(copy)


def test_reading_stops_at_the_bound_and_opens_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="it has 5 bytes, wanted at most 4"):
        read_bytes(tmp_path / "file", 4)
    with pytest.raises(ValueError, match="is not a regular file"):
        read_bytes(tmp_path / "pipe", 4)
    for name in ("link", ".", "absent"):
        with pytest.raises((OSError, ValueError)):
            read_bytes(tmp_path / name, 4)
    assert parse_json(b'{"a": [1, 2.5, null, "\\u00e9"]}') == {"a": [1, 2.5, None, "é"]}


# --- programs

STEPS = ("instructions",)
PROGRAMS: list[tuple[str, Callable[[Document], None], str]] = [
    ("another name", put("name", to="euler-4"), "it holds the program 'euler-4'"),
    ("a name with a folder", put("name", to="../euler-3"), "name: "),
    ("a register before it is written", put(*STEPS, 0, "x", to="y"), r"instruction 0: reads \['y'\]"),
    ("a sum of nothing", put(*STEPS, 1, "terms", to=[]), "instruction 1: reads"),
    ("a row beyond the table", put(*STEPS, 0, "evaluation", to=3), "instruction 0: evaluation 3 of 3"),
    ("a row below the table", put(*STEPS, 0, "evaluation", to=-1), "instruction 0: evaluation -1 of 3"),
    ("a row of true", put(*STEPS, 0, "evaluation", to=True), "evaluation: .* integer"),
    ("a coefficient beyond float32", put(*STEPS, 1, "terms", 0, 1, to=1e39), "must be finite in float32"),
    ("an unknown instruction", put(*STEPS, 0, "op", to="run"), "instructions.0: "),
    ("a branch twice", put(*STEPS, 0, "against", to=["unconditional", "unconditional"]), "names a branch twice"),
    ("no instructions", put(*STEPS, to=[]), "never writes 'x'"),
    ("no evaluation", put(*STEPS, to=[{"op": "combine", "out": "x", "terms": [["x", 1.0]]}]), "never evaluates"),
    ("no times", put("times", to=[]), "times: "),
    ("no step", put("schedule", to=[0.0]), "schedule: "),
    ("fewer times than the table", drop("times", 2), "instruction 4: evaluation 2 of 2"),
    ("more times than the table", lambda p: p["times"].append(1.0), r"time table .* not float32 \[4, "),
    ("times of no input", put("extra_times", to={"end": [0.0, 0.5, 1.0]}), r"times for \['end'\], wanted \[\]"),
    ("noise in the state", put("noises", to=["x"]), "wanted distinct names but 'x'"),
    ("a further field", put("more", to=1), "more: "),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [pytest.param(c, w, id=name) for name, c, w in PROGRAMS])
def test_a_program_that_the_loop_cannot_run_is_refused(
    copy: Path, change: Callable[[Document], None], words: str
) -> None:
    document = json.loads((copy / PROGRAM).read_text())
    change(document)
    (copy / PROGRAM).write_text(json.dumps(document))
    sign(copy)
    with pytest.raises(ArtifactCorrupt, match=words):
        load(copy)


# --- files


def replace_by_link(file: Path, outside: Path) -> None:
    file.rename(outside)
    file.symlink_to(outside)


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS, PROGRAM, CASES, "engines", "programs", "parity", "engines/aoti"])
@pytest.mark.parametrize("relative", [False, True])
def test_a_symlink_inside_is_refused_wherever_it_leads(copy: Path, name: str, relative: bool) -> None:
    """A file or folder that lies elsewhere may become another one after the check."""
    replace_by_link(copy / name, copy / "aside" if relative else copy.parent / "outside")
    with pytest.raises(ArtifactCorrupt, match=f"{name} is a symlink; copy"):
        load(copy)


def test_an_artifact_behind_a_symlink_opens(copy: Path) -> None:
    """A link to the whole artifact is how releases are switched."""
    (copy.parent / "current").symlink_to(copy)
    assert load(copy.parent / "current").programs


@pytest.mark.parametrize(
    "place", ["engines/aoti/model.so", "programs/x.json", "parity/more", "engines/.hidden", "config.toml"]
)
def test_a_file_that_is_not_listed_is_refused_where_files_are_read(copy: Path, place: str) -> None:
    (copy / place).write_text("x")
    with pytest.raises(ArtifactCorrupt, match=f"{place} is not listed in manifest.json; remove it"):
        load(copy)


def test_files_that_nothing_reads_may_lie_at_the_top(copy: Path) -> None:
    """What a hub or a file manager leaves there."""
    (copy / "README.md").write_text("x")
    (copy / ".cache").mkdir()
    assert load(copy).programs


def test_a_pipe_in_place_of_a_file_is_not_waited_for(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    os.mkfifo(copy / WEIGHTS)
    with pytest.raises(ArtifactCorrupt, match=f"{WEIGHTS} is missing"):
        load(copy)


# --- tensors and recordings


def test_integer_weights_are_part_of_what_an_engine_was_made_for(copy: Path) -> None:
    """They are places where its code reads. The tiny model has none, so one is claimed to be of integers."""
    tensors = load_file(copy / WEIGHTS)
    entry = store.read_manifest(copy).engines[0]
    weights = {c.name: torch.arange(tensors[c.name].numel()) for c in entry.constants}
    other = {name: t + 1 for name, t in weights.items()}
    region = store.read_manifest(copy).region
    assert store.made_for(entry, region, weights) != store.made_for(entry, region, other)


RECORDED: list[tuple[str, Callable[[Document], None], str]] = [
    ("no cases", lambda cases: cases.clear(), "has no cases"),
    ("a case twice", lambda cases: cases.append(cases[0]), "two of one name"),
    ("another check", put(0, "check", to="more"), "0.check: "),
    ("a budget of words", put(0, "budget", to="1"), "0.budget: "),
    ("another program", put(0, "program", to="euler-9"), "is of the program 'euler-9'"),
    ("a row beyond", put(0, "evaluation", to=3), "runs evaluation 3 of 3"),
    ("a size beyond the model", put(0, "sizes", "text", to=10**6), "has the sizes"),
    ("a size too few", drop(0, "sizes", "text"), "has the sizes"),
    ("a length beyond the size", put(0, "lengths", to=[9]), "has the lengths"),
    ("lengths of more rows", put(0, "lengths", to=[8, 8]), "has the lengths"),
    ("a seed beyond torch", put(0, "seed", to=2**64), "has the seed"),
    ("another name", put(0, "name", to="x"), "lacks its result '/float32'"),
    ("results of another size", put(0, "guided", to=False), "lacks its result '/float32', or it is not float32"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [pytest.param(c, w, id=name) for name, c, w in RECORDED])
def test_a_recording_that_is_not_of_this_artifact_is_refused(
    copy: Path, change: Callable[[Any], None], words: str
) -> None:
    document = json.loads((copy / CASES).read_text())
    change(document)
    (copy / CASES).write_text(json.dumps(document))
    sign(copy)
    with pytest.raises(ArtifactCorrupt, match=words):
        verify(copy, threads=1)


@pytest.mark.parametrize("wrong", ["dtype", "absent", "steps"])
def test_recorded_results_of_other_kinds_are_refused(copy: Path, wrong: str) -> None:
    file = copy / "parity" / "references.safetensors"
    tensors = load_file(file)
    for name in list(tensors):
        if wrong == "dtype" and name.endswith("/float32"):
            tensors[name] = tensors[name].double()
        elif wrong == "absent" and name.endswith("/float32"):
            del tensors[name]
        elif wrong == "steps" and name.endswith("/steps"):
            tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file)
    sign(copy)
    with pytest.raises(ArtifactCorrupt, match=r"lacks its result '/(float32|steps)'"):
        verify(copy, threads=1)


def test_a_recording_is_read_only_after_its_digest_was_checked(copy: Path) -> None:
    (copy / CASES).write_text("[]")
    with pytest.raises(ArtifactCorrupt, match=f"{CASES} has 2 bytes"):
        verify(copy, threads=1)


@pytest.mark.parametrize("name", ["inspect", "verify", "sample", "bench", "export", "reweight"])
def test_every_command_returns_5(copy: Path, tmp_path: Path, command: Command, name: str) -> None:
    sign(copy, put("engines", 1, "path", to="../../x"))
    options = {
        "sample": ["--random", "--length", 8, "-o", tmp_path / "out"],
        "export": ["--format", "triton-repository", "-o", tmp_path / "out"],
        "reweight": ["--weights", "synthetic", "-o", tmp_path / "out"],
    }
    ran = command(name, copy, *options.get(name, []), "--json")
    assert (ran.code, ran.document["error"]["type"]) == (5, "ArtifactCorrupt")
    assert "engines.1.path: the path '../../x' must be relative" in ran.err


# --- at random


def fuzz(first: int, last: int, scratch: Path, artifacts: list[Path]) -> tuple[dict[str, int], list[str]]:
    """How often what came out, and what may not. A child that dies is started again behind its seed."""
    counts: dict[str, int] = {}
    wrong: list[str] = []
    while first < last:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        command = [sys.executable, str(FUZZ), str(first), str(last), str(scratch), *map(str, artifacts)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in ran.stdout.splitlines()]
        assert lines, ran.stderr
        changes = {line["seed"]: line["change"] for line in lines if "change" in line}
        for line in lines:
            if "result" in line:
                kind = line["result"] if line["result"] in ("refused", "ran", "declined") else "wrong"
                counts[kind] = counts.get(kind, 0) + 1
                if kind == "wrong":
                    wrong.append(f"{line['seed']}: {changes[line['seed']]}: {line['result']}\n{line['trace']}")
        first = lines[-1]["seed"] + 1
        if ran.returncode:
            wrong.append(f"{first - 1}: {changes[first - 1]}: exit {ran.returncode}\n{ran.stderr[-2000:]}")
    return counts, wrong


def check(seeds: int, scratch: Path, artifacts: list[Path]) -> None:
    counts, wrong = fuzz(0, seeds, scratch, artifacts)
    assert not wrong, "\n".join(wrong[:5])
    assert sum(counts.values()) == seeds
    assert counts["ran"] > seeds // 20, counts  # or nothing is tried beyond the first check
    assert counts["refused"] > seeds // 2, counts


def test_artifacts_changed_at_random_are_refused_or_run(
    supertonic_packed: Path, supertonic_shared: Path, f5_shared: Path, tmp_path: Path
) -> None:
    check(2000, tmp_path / "scratch", [supertonic_packed, supertonic_shared, f5_shared])


@pytest.mark.slow
def test_a_hundred_thousand_artifacts_changed_at_random_are_refused_or_run(
    supertonic_packed: Path, supertonic_shared: Path, f5_shared: Path, tmp_path: Path
) -> None:
    check(100_000, tmp_path / "scratch", [supertonic_packed, supertonic_shared, f5_shared])
