"""What an artifact costs: build seconds, bytes on disk, resident memory; packed, and shared with several buckets.

    python bench/bench_artifact.py --model supertonic --lengths 64,128,250 --json artifact.jsonl
    python bench/bench_artifact.py --model f5tts --lengths 64,128,256,512 --modes shared

Builds start with an empty engine cache unless --cache names one. Disk and memory are compared with the weights that
prepare and step read. Memory is what a fresh process holds beyond torch itself, from /proc/self/smaps_rollup: after
loading, and after one sample at each length, activations included. Rss counts pages shared with other processes in
full (the mapped weights of the shared mode among them), Pss its part of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # PYTHONSAFEPATH leaves a script's own folder out

DISK, MEMORY = 1.05, 1.25  # of the weights
MIB = 2**20


# --- in the fresh process


def resident() -> dict[str, int]:
    """Bytes of this process."""
    fields = (
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    )
    kilobytes = {name: int(value.split()[0]) for name, value in fields}
    return {"rss": 1024 * kilobytes["Rss"], "pss": 1024 * kilobytes["Pss"]}


def child(path: Path, lengths: list[int], characters: list[int], threads: int) -> None:
    """Print the resident memory after each phase, by name."""
    import torch

    torch.set_num_threads(threads)
    seen = {"torch": resident()}
    import voicehub_aot

    runtime = voicehub_aot.load(path, threads=threads)
    seen["load"] = resident()
    from subject import draw

    program = min(runtime.programs.values(), key=lambda p: len(p.times))
    for frames, count in zip(lengths, characters, strict=True):
        state, request = draw(runtime.spec, frames, count)
        conditioning: dict[str, Any] = dict(request)
        runtime.sample(noise=state, program=program.name, **conditioning)
        del state, request, conditioning
        seen[f"{frames} frames"] = resident()
    print(json.dumps(seen))


# --- in the process that measures


def measure_memory(path: Path, model: str, lengths: tuple[int, ...], threads: int) -> dict[str, dict[str, int]]:
    from subject import characters

    texts = [characters(model, frames) for frames in lengths]
    command = [sys.executable, __file__, "--child", str(path), "--threads", str(threads)]
    command += ["--lengths", ",".join(map(str, lengths)), "--text", ",".join(map(str, texts))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measure(
    subject: Any, mode: Any, lengths: tuple[int, ...], threads: int, cache: Path, folder: Path
) -> dict[str, Any]:
    """Build, weigh and run one mode."""
    from subject import build_artifact

    start = time.perf_counter()
    path, manifest = build_artifact(subject, lengths, mode, output=folder / f"{mode}.aot", cache=cache)
    build_s = time.perf_counter() - start
    weights = sum(stage.weight_bytes for name, stage in manifest.stages.items() if name != "table")
    disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    steps = [entry.seconds for entry in manifest.engines if entry.stage == "step"]
    memory = measure_memory(path, subject.model.name, lengths, threads)
    last = list(memory)[-1]
    return {
        "model": subject.model.name,
        "config": subject.model.config_name,
        "mode": mode,
        "lengths": lengths,
        "engines": len(manifest.engines),
        "build_s": build_s,
        "engine_s": {f"{e.stage} {e.bucket}" if e.bucket else e.stage: e.seconds for e in manifest.engines},
        "further_bucket_s": sum(steps[1:]) / len(steps[1:]) if steps[1:] else 0.0,
        "weight_bytes": weights,
        "disk_bytes": disk,
        "disk_ratio": disk / weights,
        "memory": memory,
        "loaded_ratio": (memory["load"]["rss"] - memory["torch"]["rss"]) / weights,
        "memory_ratio": (memory[last]["rss"] - memory["torch"]["rss"]) / weights,
    }


def main() -> int:
    from subject import DEFAULT_LENGTHS, numbers, parser, resolve, use_threads
    from timing import append_json, environment, print_table

    arguments = parser(__doc__, rounds=1)
    arguments.add_argument("--lengths", type=numbers, help="buckets, e.g. 64,128,250")
    arguments.add_argument("--modes", default="packed,shared", help="default %(default)s")
    arguments.add_argument("--cache", type=Path, help="an engine cache to use (default: an empty one)")
    options = arguments.parse_args()
    lengths = tuple(sorted(options.lengths or DEFAULT_LENGTHS[options.model]))
    threads = use_threads(options.threads)
    subject = resolve(options.model, options.config)
    with TemporaryDirectory() as scratch:
        cache = options.cache or Path(scratch) / "cache"
        rows = [measure(subject, mode, lengths, threads, cache, Path(scratch)) for mode in options.modes.split(",")]
    append_json(options.json, "artifact", rows)
    print(environment())
    print_table(
        f"{subject.title}: artifacts for {','.join(map(str, lengths))} frames",
        ["mode", "engines", "build s", "a further bucket s", "weights MiB", "disk MiB", "of weights"],
        [
            [
                row["mode"],
                row["engines"],
                f"{row['build_s']:.0f}",
                f"{row['further_bucket_s']:.1f}",
                f"{row['weight_bytes'] / MIB:.1f}",
                f"{row['disk_bytes'] / MIB:.1f}",
                f"{row['disk_ratio']:.3f}",
            ]
            for row in rows
        ],
    )
    print_table(
        "Memory of a fresh process, MiB",
        ["mode", "after", "Rss", "Pss", "beyond torch", "of weights"],
        [
            [
                row["mode"],
                phase,
                *(f"{seen[kind] / MIB:.1f}" for kind in ("rss", "pss")),
                f"{(seen['rss'] - row['memory']['torch']['rss']) / MIB:.1f}",
                f"{(seen['rss'] - row['memory']['torch']['rss']) / row['weight_bytes']:.3f}",
            ]
            for row in rows
            for phase, seen in row["memory"].items()
        ],
    )
    passed = True
    for row in rows:
        for what, ratio, target in (("disk", row["disk_ratio"], DISK), ("memory", row["memory_ratio"], MEMORY)):
            met = ratio <= target
            passed = passed and met
            print(
                f"{'PASS' if met else 'SHORT'} {row['mode']}: {what} {ratio:.3f} of the weights (target {target:.2f})"
            )
    return 0 if passed or not options.gate else 6


if __name__ == "__main__":
    internal = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    internal.add_argument("--child", type=Path)
    internal.add_argument("--lengths")
    internal.add_argument("--text")
    internal.add_argument("--threads", type=int)
    known, _ = internal.parse_known_args()
    if known.child:
        sizes, texts = ([int(n) for n in text.split(",")] for text in (known.lengths, known.text))
        child(known.child, sizes, texts, known.threads)
        sys.exit(0)
    from voicehub_aot.errors import AotError

    try:
        sys.exit(main())
    except AotError as error:
        sys.exit(str(error))
