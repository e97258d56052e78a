"""What a service's memory does: requests of varied lengths through one artifact, one after the other, in this process.

    voicehub-aot build supertonic --weights synthetic --buckets 64,128,250 --steps 5 --no-parity -o supertonic.aot
    python bench/bench_soak.py supertonic.aot --requests 2000 --low 20 --high 250 --steps 1 --json soak.jsonl

Lengths, and sizes of whatever else varies, are uniform in [low, high] from a seed. One JSON line at the start and
after so many requests. resident: private memory (RssAnon) plus the pages of the artifact's own files, beyond what the
process held after `import torch`: shared code of torch and other libraries is not counted, since every process of the
machine uses the same pages. ratio: that to the weights that prepare and step read. rss_ratio: the same of all pages
(VmRSS), library code among them. waste: positions of the main dimension that are padding, as a share of the real ones.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch  # noqa: F401  its own memory is not counted

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # PYTHONSAFEPATH leaves a script's own folder out

RATIO = 1.25  # of the weights


def held(artifact: Path) -> dict[str, int]:
    """Bytes: rss, and resident as defined above."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    number = {key: 1024 * int(re.findall(rf"{key}:\s+(\d+)", status)[0]) for key in ("VmRSS", "RssAnon")}
    inside, mapped = False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(artifact.resolve()) in line
        elif inside and line.startswith(("Shared_Clean", "Private_Clean")):
            mapped += 1024 * int(line.split()[1])
    return {"rss": number["VmRSS"], "resident": number["RssAnon"] + mapped}


def soak(options: argparse.Namespace) -> list[dict[str, Any]]:
    base = held(options.artifact)
    from subject import draw

    from voicehub_aot.artifacts import store
    from voicehub_aot.runtime.load import open_artifact
    from voicehub_aot.spec.bucket import Ladder

    manifest = store.read_manifest(options.artifact)
    if options.own_sizes:
        manifest = manifest.model_copy(update={"ladder": Ladder()})
    runtime = open_artifact(options.artifact, manifest, threads=options.threads, overflow="run")
    weights = sum(stage.weight_bytes for name, stage in manifest.stages.items() if name != "table")
    spec, numbers = runtime.spec, random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    start, frames, padded = time.perf_counter(), 0, 0

    def record(count: int) -> None:
        now = held(options.artifact)
        growth = {key: now[key] - base[key] for key in now}
        rows.append(
            {
                "model": manifest.model,
                "requests": count,
                "weight_bytes": weights,
                "resident_bytes": growth["resident"],
                "ratio": round(growth["resident"] / weights, 3),
                "rss_ratio": round(growth["rss"] / weights, 3),
                "waste": round(padded / frames - 1, 4) if frames else 0.0,
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        print(rows[-1], flush=True)

    record(0)
    for count in range(1, options.requests + 1):
        size, text = (numbers.randint(options.low, options.high) for _ in range(2))
        state, request = draw(spec, size, text, seed=count)
        conditioning: dict[str, Any] = dict(request)
        for _ in runtime.trajectory(noise=state, stop=options.steps, **conditioning):
            pass
        if spec.main is not None:
            frames, padded = frames + size, padded + runtime.ladder.fit(spec.main, size)
        del state, request, conditioning
        if count in (1, 20, 80, 160, 320, 640, 1280, options.requests):
            record(count)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "artifact", type=Path, nargs="?", default=Path("demo/supertonic.aot"), help="default that of `make demo`"
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--low", type=int, default=20)
    parser.add_argument("--high", type=int, default=250)
    parser.add_argument("--steps", type=int, help="of each request (default: the whole program)")
    parser.add_argument("--threads", type=int, help="compute threads (default: what this process may use)")
    parser.add_argument("--own-sizes", action="store_true", help="pad nothing, whatever the artifact's ladder says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON object per row")
    parser.add_argument("--gate", action="store_true", help="exit with 6 if the last ratio is over the target")
    options = parser.parse_args()
    from timing import append_json, environment

    rows = soak(options)
    append_json(options.json, "soak", rows)
    print(environment())
    met = rows[-1]["ratio"] <= RATIO
    print(f"{'PASS' if met else 'SHORT'}: {rows[-1]['ratio']:.3f} of the weights (target {RATIO:.2f})")
    return 0 if met or not options.gate else 6


if __name__ == "__main__":
    from voicehub_aot.errors import AotError

    try:
        sys.exit(main())
    except AotError as error:
        sys.exit(str(error))
