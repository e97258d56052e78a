"""The whole of it on one machine, first in numbers, then in sound.

    .venv/bin/python bench/demo.py

Builds Supertonic v3 with synthetic weights, proves it, samples it, and shows what the artifact's own report says. Then
builds and proves the demo voice, whose weights are trained, and speaks a sentence into a WAV. Runs the command line, as
a user would, in the folder demo/.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

PROGRAMS = {
    "voicehub-aot": [str(Path(sysconfig.get_path("scripts")) / "voicehub-aot")],
    "python": [sys.executable],
}
VOICE = Path(__file__).parents[1] / "examples/demo_voice"
SENTENCE = "yellow elephant garden music"
MIB = 2**20


def run(program: str, *arguments: str) -> float:
    """One command, its output where this one's goes. Returns its seconds; a failure ends the demo with its code."""
    print(f"\n$ {shlex.join([program, *arguments])}", flush=True)
    start = time.perf_counter()
    done = subprocess.run([*PROGRAMS[program], *arguments], check=False)
    if done.returncode:
        print(f"demo: {program} {arguments[0]} ended with exit code {done.returncode}", file=sys.stderr)
        sys.exit(done.returncode)
    return time.perf_counter() - start


def show(artifact: Path) -> None:
    """The tables of its parity report."""
    from timing import print_table

    from voicehub_aot.artifacts import report as reports, store

    report = reports.read_json(artifact / store.PARITY / "report.json")
    manifest = store.read_manifest(artifact)
    print()
    print_table(
        f"{report.model} {report.config}, {report.checkpoint} weights: one guided evaluation",
        ["bucket", "engine ms", "eager ms", "engine is", "GFLOP/s"],
        [[t.label, f"{t.engine_ms:.1f}", f"{t.eager_ms:.1f}", f"{t.speedup:.2f}x", f"{t.gflops:.1f}"]
         for t in report.timings],
    )  # fmt: skip
    print("eager is this package's own module, not upstream's: bench/bench_step.py compares with upstream")
    groups: dict[str, int] = {}
    for name, entry in manifest.files.items():
        group = name.partition("/")[0] if "/" in name else name
        groups[group] = groups.get(group, 0) + entry.size
    weights = sum(stage.weight_bytes for name, stage in manifest.stages.items() if name != "table")
    rows = [*sorted(groups.items(), key=lambda item: -item[1]), ("all files", sum(groups.values()))]
    print_table(
        f"Sizes; prepare and step read {weights / MIB:.1f} MiB of weights",
        ["part", "MiB", "of weights"],
        [[name, f"{size / MIB:.1f}", f"{size / weights:.3f}"] for name, size in rows],
    )
    print_table(
        "Parity, against float64; budgets rest on the spread of float32 runs",
        ["check", "cases", "failed", "most of its budget"],
        reports.summary(report),
    )


def supertonic(artifact: Path, config: str, buckets: str) -> dict[str, float]:
    """Seconds of each command."""
    command = functools.partial(run, "voicehub-aot")
    length = buckets.partition(",")[0]
    seconds = {
        "build": command(
            "build", "supertonic", "--config", config, "--weights", "synthetic", "--buckets", buckets,
            "--steps", "5", "--jobs", "2", "-o", str(artifact), "--force",
        ),
        "verify": command("verify", str(artifact)),
        "sample": command(
            "sample", str(artifact), "--length", length, "--seed", "0", "--random",
            "-o", str(artifact.with_name("latent.safetensors")),
        ),
    }  # fmt: skip
    show(artifact)
    return seconds


def voice(artifact: Path) -> dict[str, float]:
    """Seconds of each command. An utterance of five words has up to 200 frames, and as many token ids."""
    command = functools.partial(run, "voicehub-aot")
    return {
        "build the voice": command(
            "build", "f5tts", "--config", str(VOICE / "config.json"), "--checkpoint", str(VOICE / "model.safetensors"),
            "--buckets", "frames=128,256", "--buckets", "text=256", "--steps", "8", "--jobs", "2",
            "-o", str(artifact), "--force",
        ),
        "verify it": command("verify", str(artifact)),
        "speak": run(
            "python", str(VOICE / "speak.py"), SENTENCE, "--artifact", str(artifact),
            "--output", str(artifact.with_name("hello.wav")),
        ),
    }  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--config", default="supertonic-3", help="released size, or tiny (default %(default)s)")
    arguments.add_argument("--buckets", default="64,128", help="default %(default)s")
    arguments.add_argument("--folder", type=Path, default=Path("demo"), help="default %(default)s")
    options = arguments.parse_args()
    options.folder.mkdir(exist_ok=True)
    start = time.perf_counter()
    seconds = supertonic(options.folder / "supertonic.aot", options.config, options.buckets)
    seconds |= voice(options.folder / "demo_voice.aot")
    parts = ", ".join(f"{name} {took:.0f} s" for name, took in seconds.items())
    print(f"demo: {time.perf_counter() - start:.0f} s in all ({parts})")


if __name__ == "__main__":
    main()
