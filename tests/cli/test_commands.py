"""The command line: exit codes, what goes to stdout and to stderr, files, and every command once end to end."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from conftest import Ran
from safetensors.torch import load_file, save_file

import voicehub_aot
from voicehub_aot.adapters import f5tts
from voicehub_aot.artifacts import report as reports, store
from voicehub_aot.errors import CheckpointMismatch
from voicehub_aot.runtime.load import load
from voicehub_aot.spec.synthetic import synthetic_weights

Command = Callable[..., Ran]
ALONE = ("--threads", 1)  # threads that wait for each other on a busy machine make tiny work slow
GOLDEN = Path(os.environ.get("VOICEHUB_AOT_GOLDEN", Path(__file__).parents[1].joinpath("golden")))


def everything(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def program(*arguments: object) -> list[str]:
    return [str(Path(sys.executable).with_name("voicehub-aot")), *map(str, arguments)]


def finished(*arguments: object) -> Ran:
    done = subprocess.run(program(*arguments), capture_output=True, text=True, timeout=900, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


# --- exit codes of the program itself


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--version"], 0, ""),
        (["build", "no_such", "--weights", "synthetic"], 2, "known are chatterbox, cosyvoice, echo, f5tts"),
        (["replay", ".", "--weights-mode", "nonsense"], 4, "choose packed or shared"),
        (["inspect", "absent.aot"], 5, "no such artifact folder"),
    ],
)
def test_the_installed_program_returns_the_documented_code(
    arguments: list[str], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = finished(*arguments)
    assert ran.code == code, ran.err
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == (f"{voicehub_aot.__version__}\n" if code == 0 else "")


def test_our_own_bugs_are_told_apart_from_mistakes(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("voicehub_aot.cli.inspection.doctor", broken)
    ran = command("doctor", "--json")
    assert ran.code == 1
    assert ran.document["error"]["type"] == "InternalError"
    assert "RuntimeError: a bug; this is our bug, please report it" in ran.err


def test_a_full_disk_is_no_bug_of_ours(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/weights.safetensors")

    monkeypatch.setattr("voicehub_aot.cli.inspection.doctor", full)
    ran = command("doctor")
    assert ran.code == 2
    assert "/somewhere/weights.safetensors: no space left; free some" in ran.err


def test_an_interrupted_command_returns_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("voicehub_aot.cli.inspection.doctor", interrupted)
    ran = command("doctor")
    assert (ran.code, ran.out, ran.err) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["models", "--nonsense"],
        ["inspect"],
        ["buckets", "--histogram", "x.json", "--max", "y"],
        ["buckets"],
    ],
)
def test_what_is_no_command_option_or_number_is_a_usage_error(command: Command, arguments: list[str]) -> None:
    ran = command(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "error (UsageError)" in ran.err


def test_help_is_shown_without_arguments_and_lists_every_command(command: Command) -> None:
    ran = command("--help")
    names = ("build", "verify", "inspect", "sample", "replay", "models", "buckets", "reweight", "export")
    assert ran.code == 0
    assert all(f" {name} " in ran.out for name in (*names, "bench", "doctor"))


# --- build: what is wrong is said before anything is written

BUILD = ("build", "supertonic", "--config", "tiny", "--weights", "synthetic", "--buckets", "16", "--steps", "2")
F5 = ("build", "f5tts", "--config", "tiny", "--weights", "synthetic", "--buckets", "16", "--steps", "2")
WRONG: list[tuple[str, list[str], int, str]] = [
    ("model", ["build", "no_such", "--weights", "synthetic"], 2, "model 'no_such' is not known; known are chatt"),
    ("config", [*BUILD, "--config", "huge"], 2, "config 'huge' is not known; known are supertonic-3, supertonic-2"),
    ("config file", [*BUILD, "--config", "absent.json"], 2, "--config 'absent.json': unreadable"),
    ("no checkpoint", ["build", "supertonic", "--config", "tiny"], 2, "'tiny' has no released checkpoint; give --che"),
    ("no steps", [*BUILD, "--steps", "0"], 2, "--steps '0': wanted different step counts of at least 1"),
    ("negative steps", [*BUILD, "--steps", "-3"], 2, "--steps '-3'"),
    ("words for steps", [*BUILD, "--steps", "a few"], 2, "--steps 'a few'"),
    ("steps twice", [*BUILD, "--steps", "3,3"], 2, "--steps '3,3'"),
    ("too many steps", [*BUILD, "--steps", "2,5000"], 2, "steps=5000: wanted 1 to 4096"),
    ("option", [*BUILD, "--option", "solver=heun"], 4, "program options ['solver'] are not known; it has none"),
    ("option without value", [*BUILD, "--option", "solver"], 2, "--option 'solver': wanted NAME=VALUE"),
    ("option's value", [*F5, "--option", "solver=heun"], 4, "solver='heun' is not known; choose one of"),
    ("option's kind", [*F5, "--option", "sway=much"], 4, "sway='much', wanted a finite number"),
    ("weights mode", [*BUILD, "--weights-mode", "nonsense"], 4, "--weights-mode 'nonsense'"),
    ("shapes", [*BUILD, "--shapes", "nonsense"], 4, "--shapes 'nonsense'"),
    ("packed and static", [*BUILD, "--shapes", "static"], 4, "--shapes static needs --weights-mode shared"),
    ("engine", [*BUILD, "--engine", "warp"], 4, "engine 'warp' is not known; known are aoti, onnx"),
    ("engine absent here", [*BUILD, "--engine", "tensorrt"], 4, "pip install 'voicehub-aot[tensorrt]'"),
    ("engine twice", [*BUILD, "--engine", "aoti,aoti"], 2, "--engine 'aoti,aoti': name each engine once"),
    ("auto and another", [*BUILD, "--engine", "auto,aoti"], 2, "name each engine once, or auto alone"),
    ("auto unproven", [*BUILD, "--engine", "auto", "--no-parity"], 2, "auto keeps what passes parity"),
    ("budget alone", [*BUILD, "--engine-budget", "9"], 2, "wanted seconds, with --engine auto"),
    ("no budget", [*BUILD, "--engine", "auto", "--engine-budget", "0"], 2, "--engine-budget 0.0"),
    ("packed nowhere", [*BUILD, "--engine", "onnxruntime", "--weights-mode", "packed"], 4, "packed: onnxruntime alw"),
    ("target", [*BUILD, "--target", "cuda:sm_90"], 4, "--target 'cuda:sm_90' is not supported; choose "),
    ("jobs", [*BUILD, "--jobs", "0"], 2, "--jobs 0: wanted 1 or more"),
    ("bucket over the maximum", [*BUILD, "--buckets", "text=101"], 2, "text buckets [101] lie outside 1..100"),
    ("bucket of nothing", [*BUILD, "--buckets", "text=0"], 2, "--buckets 'text=0'"),
    ("bucket twice", [*BUILD, "--buckets", "8"], 2, "axis 'frames' is given twice"),
    ("bucket axis", [*BUILD, "--buckets", "width=3"], 2, "unknown axis 'width'; this model has batch, frames, text"),
    ("histogram and buckets", [*BUILD, "--histogram", "lengths.json"], 2, "give either --buckets or --histogram"),
    ("absent histogram", ["build", "supertonic", "--weights", "synthetic", "--histogram", "x"], 2, "x: unreadable"),
    ("absent checkpoint", [*BUILD, "--weights", "absent.safetensors"], 5, "'absent.safetensors' does not exist"),
    ("no hub id", [*BUILD, "--weights", "hf:nobody"], 5, "'hf:nobody' is no hub id; wanted hf:owner/name"),
    ("offline hub", [*BUILD, "--weights", "hf:no/body"], 5, "HF_HUB_OFFLINE is set; check the id and the network"),
    ("empty checkpoint", [*BUILD, "--weights", "empty.safetensors"], 5, "empty.safetensors: unreadable"),
    ("cut checkpoint", [*BUILD, "--weights", "cut.safetensors"], 5, "cut.safetensors: unreadable"),
    ("checkpoint of prose", [*BUILD, "--weights", "prose.pt"], 5, "prose.pt: unreadable"),
    ("graph of prose", [*BUILD, "--weights", "prose.onnx"], 5, "prose.onnx"),
    ("unknown file type", [*BUILD, "--weights", "prose.txt"], 5, "unknown file type '.txt'"),
    ("another model's weights", [*BUILD, "--weights", "f5.safetensors"], 5, "f5.safetensors"),
    ("folder without weights", [*BUILD, "--weights", "."], 5, "wanted the released folder"),
    ("output in a file", [*BUILD, "--output", "prose.txt/model.aot"], 2, "model.aot: cannot be written"),
    ("existing output", [*BUILD, "--output", "prose.txt"], 2, "prose.txt is a file, and an artifact is a folder"),
    ("absent options", [*BUILD, "--from", "absent.toml"], 2, "--from 'absent.toml': unreadable"),
    ("options of prose", [*BUILD, "--from", "prose.txt"], 2, "--from 'prose.txt': unreadable"),
    ("unknown option", [*BUILD, "--from", "unknown.toml"], 2, "stepz: Extra inputs are not permitted; known "),
    ("option of another kind", [*BUILD, "--from", "kind.toml"], 2, "jobs: Input should be a valid integer"),
]  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with files that are not what they should be, and no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    weights = synthetic_weights(f5tts.checkpoint_shapes(f5tts.CONFIGS["tiny"]))
    save_file(weights, "f5.safetensors")
    whole = Path("f5.safetensors").read_bytes()
    Path("cut.safetensors").write_bytes(whole[: len(whole) // 2])
    Path("empty.safetensors").touch()
    for name in ("prose.pt", "prose.onnx", "prose.txt"):
        Path(name).write_text("It was a dark and stormy night.", encoding="utf-8")
    Path("lengths.json").write_text("[8, 16]", encoding="utf-8")
    Path("unknown.toml").write_text("stepz = '3'", encoding="utf-8")
    Path("kind.toml").write_text("jobs = 'many'", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("arguments", "code", "words"), [pytest.param(*w[1:], id=w[0]) for w in WRONG])
def test_a_build_that_cannot_be_says_so_and_writes_nothing(
    desk: Path, command: Command, arguments: list[str], code: int, words: str
) -> None:
    before = everything(desk)
    output = [] if "--output" in arguments else ["--output", "out.aot"]
    ran = command(*arguments, *output, "--json")
    assert ran.code == code
    assert words in " ".join(ran.err.splitlines()[-1:])
    assert set(ran.document) == {"error"}
    assert ran.document["error"]["message"] in ran.err
    assert {name for name in everything(desk) - before if not name.startswith("hub")} == set()


# --- build, end to end


@dataclass(frozen=True)
class Built:
    """output: built by `ran`, after a builder of it was killed, which had left what `left` names."""

    output: Path
    killed: int | None
    refused: Ran
    left: list[str]
    ran: Ran


def listen_to_interrupts() -> None:
    """Started in the background of a shell, we and our children would ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_build(output: Path, *options: object) -> subprocess.Popen[str]:
    """A builder of its own, past its start: its temporary folder exists."""
    arguments = program("build", "supertonic", *options, "-o", output)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    builder = subprocess.Popen(arguments, preexec_fn=listen_to_interrupts, **pipes)  # noqa: PLW1509
    deadline = time.monotonic() + 120
    while not any(p.name.startswith(f".{output.name}.tmp-") for p in output.parent.iterdir()):
        if builder.poll() is not None or time.monotonic() > deadline:
            builder.kill()
            raise AssertionError(f"the build did not start: {builder.communicate()}")
        time.sleep(0.01)
    return builder


@pytest.fixture(scope="module")
def small(supertonic_packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Options from a file, and a flag over one of them. Its engines are in the cache, from `supertonic_packed`."""
    folder = tmp_path_factory.mktemp("cli [with] brackets")
    options = folder / "options.toml"
    options.write_text('config = "tiny"\ncheckpoint = "synthetic"\nbuckets = "16"\nsteps = "7,9"\n')
    output = folder / "small.aot"
    arguments = ("--from", options, "--steps", 2, "--program", "quick:steps=1", "--json")
    builder = start_build(output, *arguments)
    refused = finished("build", "supertonic", *arguments, "-o", output)
    builder.kill()
    builder.communicate()
    left = sorted(p.name for p in folder.iterdir())
    ran = finished("build", "supertonic", *arguments, "-o", output)
    return Built(output, builder.returncode, refused, left, ran)


def test_a_killed_build_leaves_nothing_that_loads_and_the_next_one_succeeds(small: Built) -> None:
    assert small.killed == -signal.SIGKILL
    assert "small.aot" not in small.left
    assert any(name.startswith(".small.aot.tmp-") for name in small.left)
    assert small.ran.code == 0, small.ran.err
    assert {p.name for p in small.output.parent.iterdir()} == {"small.aot", "options.toml"}
    assert load(small.output).programs.keys() == {"euler-2", "quick"}


def test_a_second_builder_of_one_output_is_refused(small: Built) -> None:
    assert (small.refused.code, small.refused.document["error"]["type"]) == (2, "UsageError")
    assert "another build is writing it" in small.refused.err


def test_a_build_prints_one_document_and_its_progress_beside_it(small: Built) -> None:
    assert small.ran.document["artifact"] == str(small.output)
    assert (small.ran.document["model"], small.ran.document["config"]) == ("supertonic", "tiny")
    assert f"wrote {small.output}" in small.ran.err
    assert "engine aoti step: from cache" in small.ran.err


def test_flags_win_over_the_file_of_options(small: Built) -> None:
    assert small.ran.document["programs"] == ["euler-2", "quick"]
    assert small.ran.document["buckets"] == {"frames": [16]}


def test_what_is_approximate_is_said_wherever_an_artifact_is_shown(small: Built, command: Command) -> None:
    *_, quick = small.ran.document["decisions"]
    assert (quick["name"], quick["safety"]) == ("quick", "approximate")
    assert quick["distance"] > 0
    report = reports.read_json(small.output / "parity/report.json")
    assert [d.model_dump() for d in report.decisions] == small.ran.document["decisions"]
    assert "approximate" in command("inspect", small.output).out
    assert "approximate" in (small.output / "parity/report.html").read_text(encoding="utf-8")


def test_the_resolved_options_can_build_it_again(small: Built, command: Command) -> None:
    config = small.output / "config.toml"
    kept = tomllib.loads(config.read_text(encoding="utf-8"))
    assert (kept["buckets"], kept["steps"]) == (["frames=16"], "2")
    assert kept["program"] == [{"name": "quick", "steps": 1}]
    ran = command("build", "supertonic", "--from", config, "-o", small.output)
    assert ran.code == 2, "every option was understood"
    assert f"{small.output} exists" in ran.err


def test_an_interrupted_build_cleans_up_and_returns_130(tmp_path: Path) -> None:
    output = tmp_path / "interrupted.aot"
    builder = start_build(output, *BUILD[2:])
    builder.send_signal(signal.SIGINT)
    out, err = builder.communicate(timeout=120)
    assert (builder.returncode, out) == (130, ""), err
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert not any(tmp_path.iterdir())


# --- models, doctor, inspect, buckets


@pytest.mark.parametrize(
    ("model", "config", "source"),
    [
        ("supertonic", None, "hf:Supertone/supertonic-3"),
        ("supertonic", "supertonic-2", "hf:Supertone/supertonic-2"),
        ("f5", "E2TTS_Base", "hf:SWivid/E2-TTS"),
    ],
)
def test_a_released_checkpoint_needs_no_address(
    command: Command, monkeypatch: pytest.MonkeyPatch, model: str, config: str | None, source: str
) -> None:
    asked = []

    def locate(where: str, files: object) -> Path:
        asked.append(where)
        raise CheckpointMismatch("the hub is not asked in tests")

    monkeypatch.setattr("voicehub_aot.compiler.models.locate", locate)
    ran = command("build", model, *(["--config", config] if config else []), "--buckets", "64,128")
    assert (ran.code, asked) == (5, [source])


def test_models_lists_what_can_be_built(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {row["model"]: row for row in command("models", "--json").document}
    assert {"f5tts", "supertonic"} <= set(listed)
    assert listed["f5tts"]["default"] in listed["f5tts"]["configs"]
    assert "tiny" in listed["supertonic"]["configs"]
    assert listed["f5tts"]["traits"] == f5tts.TRAITS.model_dump(mode="json")
    monkeypatch.setenv("COLUMNS", "80")
    table = command("models").out
    assert max(map(len, table.splitlines())) <= 80
    words = {row["model"] for row in listed.values()} | {config for row in listed.values() for config in row["configs"]}
    assert words | {"discrete-step-count"} <= set(table.split())  # none is broken over lines


def test_doctor_says_what_decides_a_build(command: Command) -> None:
    facts = command("doctor", "--json").document
    assert facts["torch"].startswith(torch.__version__.split("+")[0])
    assert facts["cache"] == os.environ["VOICEHUB_AOT_CACHE_DIR"]
    assert int(facts["threads"]) >= 1
    assert "default target" in command("doctor").out


def test_inspect_shows_the_manifest(supertonic_packed: Path, command: Command) -> None:
    summary = command("inspect", supertonic_packed, "--json").document
    assert summary["programs"] == ["euler-3", "euler-2"]
    assert {i["name"] for i in summary["inputs"]} >= {"noisy_latent", "text_emb", "style_ttl", "lengths"}
    assert not {i["name"] for i in summary["inputs"]} & {"time", "drop"}, "what a caller cannot pass"
    assert [e["stage"] for e in summary["engines"]] == ["prepare", "step"]
    assert (
        summary["bytes"]
        == sum(p.stat().st_size for p in supertonic_packed.rglob("*") if p.is_file())
        - (supertonic_packed / store.MANIFEST).stat().st_size
    )
    shown = command("inspect", supertonic_packed).out
    assert all(words in shown for words in ("style_ttl", "what left the step", "euler-3"))


def test_a_path_with_brackets_is_shown_as_it_is(supertonic_packed: Path, command: Command, tmp_path: Path) -> None:
    """rich would take [bold] for a style, and [/b] for the end of one that never began."""
    odd = tmp_path / "a [bold] [" / "b] name.aot"
    shutil.copytree(supertonic_packed, odd)
    ran = command("inspect", odd)
    assert ran.code == 0
    assert "[bold] [/b] name.aot" in ran.out.replace("\n", " ").replace("  ", " ")


def test_buckets_compares_with_powers_of_two(command: Command, tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps([100] * 9 + [250]))
    found = command("buckets", "--histogram", tmp_path / "lengths.json", "--max", 2, "--json").document
    assert found["chosen"] == {"buckets": [100, 250], "waste": 0.0}
    assert found["powers of two"]["waste"] > 0.2
    assert "100,250" in command("buckets", "--histogram", tmp_path / "lengths.json", "--max", 2).out
    (tmp_path / "none.json").write_text("[]")
    assert command("buckets", "--histogram", tmp_path / "none.json").code == 2


# --- sample


def test_a_random_sample_writes_one_tensor(supertonic_packed: Path, command: Command, tmp_path: Path) -> None:
    asked = ("sample", supertonic_packed, *ALONE, "--random", "--length", 8, "--length", 5, "--seed", 3)
    told = command(*asked, "-o", tmp_path / "one.safetensors", "--json").document
    one = load_file(tmp_path / "one.safetensors")
    assert list(one) == ["latent"]
    assert told["shape"] == list(one["latent"].shape) == [2, 12, 8]
    assert one["latent"].std() > 0.5
    assert not one["latent"][1, :, 5:].any()
    assert command(*asked, "-o", tmp_path / "two.safetensors", "--program", 2).code == 0
    assert not torch.equal(load_file(tmp_path / "two.safetensors")["latent"], one["latent"])
    assert command(*asked, "-o", tmp_path / "two.safetensors", "--program", "euler-3").code == 0
    assert (tmp_path / "two.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    assert everything(tmp_path) == {"one.safetensors", "two.safetensors"}


def test_a_sample_from_a_file_is_what_the_runtime_gives(f5_shared: Path, command: Command, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "cond": torch.randn(1, 9, 20, generator=generator),
        "text": torch.randint(0, 24, (1, 6), generator=generator),
    }
    save_file(inputs, tmp_path / "in.safetensors")
    files = ("--inputs", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors")
    assert command("sample", f5_shared, *ALONE, *files, "--length", 9, "--seed", 4, "--guidance", 1.5).code == 0
    want = load(f5_shared, threads=1).sample(seed=4, lengths=[9], guidance=1.5, **inputs)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["latent"], want)
    noise = torch.randn(1, 9, 20, generator=generator)
    save_file({**inputs, "noise": noise}, tmp_path / "in.safetensors")
    assert command("sample", f5_shared, *ALONE, *files).code == 0
    assert torch.equal(
        load_file(tmp_path / "out.safetensors")["latent"], load(f5_shared, threads=1).sample(noise=noise, **inputs)
    )


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--length", 8], 2, "give either --inputs FILE with the conditioning, or --random"),
        (["--random", "--inputs", "x.safetensors", "--length", 8], 2, "give either --inputs"),
        (["--random"], 2, "--random needs --length for each row"),
        (["--random", "--length", 0], 2, "--length 0: wanted 1 to 100 frames"),
        (["--random", "--length", -1], 2, "--length -1"),
        (["--random", "--length", 10**12], 2, "wanted 1 to 100 frames"),
        (["--random", "--length", 25], 2, "frames=25 exceeds the largest bucket 24"),
        (["--random", "--length", 8, "--program", 7], 2, "program 7 is not built"),
        (["--random", "--length", 8, "--guidance", "nan"], 2, "guidance=nan, wanted a finite number"),
        (["--random", "--length", 8, "--guidance", "1e38"], 2, "the result is not finite with guidance=1e+38"),
        (["--random", "--length", 8, "--threads", 0], 4, "threads=0"),
        (["--random", "--length", 8, "--seed", 2**64], 2, "seed=18446744073709551616"),
        (
            ["--random", "--length", 8, "-o", "absent/out.safetensors"],
            2,
            "absent/out.safetensors: lies in no folder",
        ),
        (["--random", "--length", 8, "-o", "."], 2, ".: is a folder"),
        (["--inputs", "absent.safetensors", "--length", 8], 2, "--inputs 'absent.safetensors': unreadable"),
        (["--inputs", "some.safetensors", "--length", 8], 2, "missing ['style_ttl', 'text_emb']"),
        (["--inputs", "lengths.safetensors", "--length", 8], 2, "holds ['lengths']; give these as options"),
        (["--inputs", "some.safetensors"], 2, "give --length for each row, or a tensor `noise`"),
    ],
    ids=str,
)
def test_a_sample_that_cannot_be_says_so_and_writes_nothing(
    supertonic_packed: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: list[Any], code: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_file({"other": torch.zeros(1)}, "some.safetensors")
    save_file({"lengths": torch.tensor([8])}, "lengths.safetensors")
    before = everything(tmp_path)
    ran = command("sample", supertonic_packed, *ALONE, "-o", "out.safetensors", *options, "--json")
    assert (ran.code, words in ran.err) == (code, True), ran.err
    assert set(ran.document) == {"error"}
    assert everything(tmp_path) == before


# --- verify


def drifted(artifact: Path, folder: Path) -> Path:
    """A copy whose recorded reference is another: every digest is right, the numbers are not."""
    copy = folder / "drifted.aot"
    shutil.copytree(artifact, copy)
    file = copy / store.PARITY / "references.safetensors"
    save_file(
        {k: v + 0.01 if k.endswith("float32") or k.endswith("exact") else v for k, v in load_file(file).items()}, file
    )
    manifest = store.read_manifest(copy)
    store.write_manifest(copy, manifest.model_copy(update={"files": store.list_files(copy)}))
    return copy


def test_verify_passes_what_was_built_and_writes_every_report(
    f5_shared: Path, command: Command, tmp_path: Path
) -> None:
    reports = [tmp_path / name for name in ("parity.xml", "parity.html", "parity.json")]
    ran = command(
        "verify", f5_shared, *ALONE, "--junit", reports[0], "--html", reports[1], "--report", reports[2], "--json"
    )
    assert ran.code == 0, ran.err
    assert ran.document["findings"]
    assert all(finding["passed"] for finding in ran.document["findings"])
    suite = ElementTree.fromstring(reports[0].read_text())
    assert int(suite.get("tests", 0)) > 0
    assert suite.get("failures") == "0"
    times = [float(case.get("time", 0)) for case in suite.iter("testcase")]
    assert all(seconds > 0 for seconds in times)
    assert float(suite.get("time", 0)) == pytest.approx(sum(times), abs=1e-3 * len(times))
    assert "PASSED" in reports[1].read_text()
    assert json.loads(reports[2].read_text()) == ran.document
    assert "trajectory" in command("verify", f5_shared, *ALONE).out


def test_verify_fails_what_drifted(f5_shared: Path, command: Command, tmp_path: Path) -> None:
    copy = drifted(f5_shared, tmp_path)
    ran = command("verify", copy, *ALONE, "--junit", tmp_path / "parity.xml", "--json")
    assert ran.code == 3
    failed = [finding for finding in ran.document["findings"] if not finding["passed"]]
    assert {finding["check"] for finding in failed} >= {"evaluation", "trajectory", "padding"}
    assert f"{len(failed)} of {len(ran.document['findings'])} cases failed, first " in ran.err
    assert int(ElementTree.fromstring((tmp_path / "parity.xml").read_text()).get("failures", 0)) > 0


def test_a_report_that_cannot_be_written_is_a_usage_error(f5_shared: Path, command: Command, tmp_path: Path) -> None:
    for flag in ("--junit", "--html", "--report"):
        ran = command("verify", f5_shared, flag, tmp_path / "absent" / "parity")
        assert (ran.code, "lies in no folder" in ran.err) == (2, True)


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_what_a_report_needs_is_asked_before_the_work_and_no_other_is_written(
    f5_shared: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "voicehub_aot.artifacts.charts", raising=False)
    monkeypatch.delattr("voicehub_aot.artifacts.charts", raising=False)
    monkeypatch.setattr("voicehub_aot.proof.verify.verify", lambda *_: pytest.fail("the work was begun"))
    names = ("--junit", tmp_path / "a.xml", "--html", tmp_path / "a.html", "--report", tmp_path / "a.json")

    ran = command("verify", f5_shared, *names)

    assert (ran.code, "voicehub-aot[report]" in ran.err) == (4, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["junit", "html", "as_json"])
def test_a_report_that_fails_leaves_no_other(
    f5_shared: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def broken(_: object) -> str:
        raise RuntimeError("broken")

    monkeypatch.setattr(f"voicehub_aot.artifacts.report.{part}", broken)
    monkeypatch.setattr("voicehub_aot.proof.parity.check", lambda *_: [])
    names = ("--junit", tmp_path / "a.xml", "--html", tmp_path / "a.html", "--report", tmp_path / "a.json")

    assert command("verify", f5_shared, *names).code == 1
    assert list(tmp_path.iterdir()) == []


# --- replay


def test_replay_runs_recorded_cases_on_the_models_module(command: Command) -> None:
    cases = [GOLDEN / "supertonic" / "region_tiny", GOLDEN / "f5tts" / "sampler_tiny"]
    rows = command("replay", *cases, "--json").document
    assert {row["case"] for row in rows} == {"supertonic/region_tiny", "f5tts/sampler_tiny"}
    assert all(row["passed"] and row["used"] < 1 for row in rows)
    assert "supertonic/region_tiny" in command("replay", cases[0]).out


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_replay_fails_on_a_recorded_output_that_is_another(command: Command, tmp_path: Path, value: float) -> None:
    case = tmp_path / "supertonic" / "region_tiny"
    shutil.copytree(GOLDEN / "supertonic" / "region_tiny", case)
    tensors = load_file(case / "tensors.safetensors")
    name = next(k for k in sorted(tensors) if k.startswith("output/"))
    tensors[name].view(-1)[3] += value
    save_file(tensors, case / "tensors.safetensors")
    ran = command("replay", case, "--json")
    assert ran.code == 3
    assert [row["output"] for row in ran.document if not row["passed"]] == [name.removeprefix("output/")]
    assert "1 of " in ran.err


def test_replay_of_nothing_or_on_an_unknown_engine_passes_nothing(command: Command, tmp_path: Path) -> None:
    empty = command("replay", tmp_path)
    assert (empty.code, "holds no recorded case" in empty.err) == (2, True)
    assert command("replay", tmp_path / "absent").code == 2
    (tmp_path / "case.json").write_text("{}")
    assert command("replay", tmp_path).code == 2
    unknown = command("replay", GOLDEN / "f5tts" / "region_tiny", "--engine", "warp")
    assert (unknown.code, "known are eager, aoti" in unknown.err) == (4, True)


# --- bench


def test_bench_times_every_bucket_and_a_gate_can_fail(f5_shared: Path, command: Command) -> None:
    rows = command("bench", f5_shared, *ALONE, "--json").document
    assert [row["bucket"] for row in rows] == ["frames=16", "frames=32"]
    assert all(row["engine_ms"] > 0 and row["speedup"] is None for row in rows)
    ran = command("bench", f5_shared, *ALONE, "--checkpoint", "synthetic", "--min-speedup", 1000, "--json")
    assert ran.code == 6
    assert all(row["eager_ms"] > 0 and row["speedup"] < 1000 for row in ran.document)
    assert "wanted at least 1000.0x" in ran.err
    assert command("bench", f5_shared, "--min-speedup", 1).code == 2


# --- reweight


def finetune(path: Path, change: float = 0.02) -> Path:
    """Released keys and shapes of the tiny F5, other values; its path tells no version."""
    config = f5tts.CONFIGS["tiny"]
    weights = {**synthetic_weights(f5tts.checkpoint_shapes(config)), **f5tts.formula_weights(config)}
    generator = torch.Generator().manual_seed(0)
    moved = {
        k: v + change * torch.randn(v.shape, generator=generator) for k, v in weights.items() if "inv_freq" not in k
    }
    save_file(moved, path)
    return path


def test_a_finetune_keeps_the_options(f5_shared: Path, command: Command, tmp_path: Path) -> None:
    built, output, tuned = tmp_path / "built.aot", tmp_path / "tuned.aot", finetune(tmp_path / "tuned.safetensors")
    shutil.copytree(f5_shared, built)
    (built / store.SETTINGS).write_text('# build\nconfig = "tiny"\ncheckpoint = "synthetic"\nsteps = "4"\n')
    listed = store.read_manifest(built).model_copy(update={"files": store.list_files(built)})
    store.write_manifest(built, listed)
    assert command("reweight", built, "--weights", tuned, "-o", output).code == 0
    kept = tomllib.loads((output / store.SETTINGS).read_text())
    assert kept == {"config": "tiny", "checkpoint": str(tuned), "steps": "4"}


@pytest.mark.parametrize("command_name", ["build", "reweight", "bench"])
@pytest.mark.parametrize("change", ["one nan", "int8"])
def test_values_that_cannot_be_used_return_5_before_anything_is_exported(
    f5_shared: Path, command: Command, tmp_path: Path, command_name: str, change: str
) -> None:
    """A NaN in the embedding of a rare token passes every parity case."""
    file, key = finetune(tmp_path / "tuned.safetensors"), "ema_model.transformer.text_embed.text_embed.weight"
    weights = load_file(file)
    if change == "int8":
        weights[key] = weights[key].to(torch.int8)
    else:
        weights[key][-1, 3] = math.nan
    save_file(weights, file)
    ran = command(
        *{
            "build": ["build", "f5tts", "--config", "tiny", "-o", tmp_path / "new.aot"],
            "reweight": ["reweight", f5_shared, "-o", tmp_path / "new.aot"],
            "bench": ["bench", f5_shared],
        }[command_name],
        *("--checkpoint", file, "--json"),
    )
    assert (ran.code, ran.document["error"]["type"]) == (5, "CheckpointMismatch")
    assert f"{key} {'is int8' if change == 'int8' else 'has 1 of 800 not finite'}" in ran.document["error"]["message"]
    assert "export" not in ran.err
    assert {p.name for p in tmp_path.iterdir()} == {file.name}


def test_the_kind_of_weights_is_chosen_told_and_kept(f5_shared: Path, command: Command, tmp_path: Path) -> None:
    tuned, output = load_file(finetune(tmp_path / "tuned.safetensors")), tmp_path / "raw.aot"
    both = {"ema_model_state_dict": {k: t * 2 for k, t in tuned.items()}, "model_state_dict": tuned}
    torch.save(both, tmp_path / "both.pt")
    built = tmp_path / "built.aot"
    shutil.copytree(f5_shared, built)
    (built / store.SETTINGS).write_text('config = "tiny"\ncheckpoint = "synthetic"\nweights_kind = "ema"\n')
    store.write_manifest(built, store.read_manifest(built).model_copy(update={"files": store.list_files(built)}))
    ran = command("reweight", built, "--weights", tmp_path / "both.pt", "--weights-kind", "raw", "-o", output, "--json")
    assert ran.code == 0, ran.err
    note = "both.pt: took the raw weights, 'model_state_dict'; --weights-kind ema takes 'ema_model_state_dict'"
    assert note in ran.err
    assert ran.document["checkpoint"]["notes"] == [note]
    assert store.read_manifest(output).checkpoint.notes == (note,)
    kept = tomllib.loads((output / store.SETTINGS).read_text())
    assert kept == {"config": "tiny", "checkpoint": str(tmp_path / "both.pt"), "weights_kind": "raw"}
    assert command("build", "f5tts", "--weights", tmp_path / "both.pt", "--weights-kind", "best").code == 2


def test_a_manifest_without_notes_is_as_it_was(f5_shared: Path) -> None:
    """Digests of artifacts of before there were notes stay right."""
    assert set(json.loads((f5_shared / store.MANIFEST).read_text())["checkpoint"]) == {"source", "digest"}


def test_a_finetune_gets_its_artifact_without_a_compiler(f5_shared: Path, command: Command, tmp_path: Path) -> None:
    output = tmp_path / "tuned.aot"
    ran = command("reweight", f5_shared, "--weights", finetune(tmp_path / "tuned.safetensors"), "-o", output, "--json")
    assert ran.code == 0, ran.err
    assert ran.document["config"] == "tiny"
    assert (ran.document["checkpoint"]["source"], ran.document["programs"]) == (
        str(tmp_path / "tuned.safetensors"),
        ["euler-4"],
    )
    before, after = (store.read_manifest(p) for p in (f5_shared, output))
    assert before.checkpoint.digest != after.checkpoint.digest
    assert [e.key for e in before.engines] == [e.key for e in after.engines]
    libraries = [name for name in before.files if name.startswith(store.ENGINES)]
    assert len(libraries) == 4
    assert all((f5_shared / name).read_bytes() == (output / name).read_bytes() for name in libraries)
    old, new = load(f5_shared, threads=1), load(output, threads=1)
    inputs: dict[str, Any] = {"cond": torch.zeros(1, 8, 20), "text": torch.ones(1, 5, dtype=torch.int64)}
    change = new.sample(seed=1, lengths=[8], **inputs) - old.sample(seed=1, lengths=[8], **inputs)
    assert change.abs().max() > 0.01
    assert command("verify", output, *ALONE).code == 0


def test_packed_weights_cannot_be_replaced(supertonic_packed: Path, command: Command, tmp_path: Path) -> None:
    ran = command("reweight", supertonic_packed, "--weights", "synthetic", "-o", tmp_path / "tuned.aot", "--json")
    assert (ran.code, ran.document["error"]["type"]) == (4, "OptionUnsupported")
    assert not any(tmp_path.iterdir())


def test_weights_of_another_shape_cannot_replace_any(f5_shared: Path, command: Command, tmp_path: Path) -> None:
    weights = load_file(finetune(tmp_path / "tuned.safetensors"))
    weights["ema_model.transformer.proj_out.bias"] = torch.zeros(21)
    save_file(weights, tmp_path / "tuned.safetensors")
    ran = command("reweight", f5_shared, "--weights", tmp_path / "tuned.safetensors", "-o", tmp_path / "tuned.aot")
    assert (ran.code, "proj_out.bias is [21], wanted [20]" in ran.err) == (5, True)
    assert everything(tmp_path) == {"tuned.safetensors"}
