"""A whole request, from noise and conditioning to the final state: ours against eager with upstream's own caches.

    python bench/bench_request.py --model supertonic --lengths 64,128,250 --steps 8
    python bench/bench_request.py --model f5tts --lengths 128 --steps 7 --rounds 5

ours     `Runtime.sample` on the packed artifact: checks, layout, prepare, then every step
eager    upstream's own module where its package is installed (f5-tts), else its computation in plain torch, in
         upstream's loop. F5: both text embeddings computed once and cached over the steps, as upstream does.
         Supertonic: nothing cached, its graph takes text and style anew in every step.

Both start from the same noise and must end in the same state before they are timed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

import reference
import torch
from candidates import EAGER, OURS, opened
from measuring import record
from subject import (
    DEFAULT_LENGTHS,
    DEFAULT_STEPS,
    characters,
    difference,
    draw,
    resolve,
    sweep_parser,
    use_threads,
)
from timing import append_json, environment, interleaved, note, print_table

TOLERANCE = 1e-3  # relative, of the final state: rounding grows over the steps
FLOOR = 1.0  # a request may never be slower than eager


def main() -> int:
    arguments = sweep_parser(__doc__, rounds=9)
    arguments.add_argument("--steps", type=int, help="of the sampling loop (default: 8 for supertonic, 7 for f5tts)")
    options = arguments.parse_args()
    lengths = options.lengths or DEFAULT_LENGTHS[options.model]
    steps = options.steps or DEFAULT_STEPS[options.model]
    threads = use_threads(options.threads)
    subject = resolve(options.model, options.config, (steps,))
    program = subject.program(steps)
    runtime = opened(subject, options.artifact, lengths, threads)
    kind, eager = subject.upstream()
    print(f"{subject.title}: whole requests of {program.name}; eager is {kind}")
    print(environment())
    table, records, passed = [], [], True
    for frames in lengths:
        state, request = draw(subject.spec, frames, characters(subject.model.name, frames))
        candidates = {
            EAGER: lambda s=state, r=request: reference.sample(eager, r, s, program.schedule),
            OURS: lambda s=state, r=request: runtime.sample(noise=s, program=program.name, **r),
        }
        error = difference(candidates[OURS](), candidates[EAGER](), state)
        if not error <= TOLERANCE:
            raise SystemExit(f"{subject.title}, {frames} frames: ours and eager end {error:.2e} apart")
        with torch.no_grad():
            times = interleaved(
                candidates,
                options.rounds,
                pause_s=options.pause_ms / 1e3,
                warm_up=1,
                on_round=lambda number, frames=frames: note(f"{frames} frames, round {number}"),  # type: ignore[misc]
            )
        speedup = times[OURS].speedup_over(times[EAGER])
        passed = passed and speedup >= FLOOR
        for name, t in times.items():
            ratio = t.speedup_over(times[EAGER])
            cells = [f"{1e3 * t.median:.1f}", f"{1e3 * t.p95:.1f}", f"{1e3 * t.median / steps:.2f}", f"{ratio:.2f}x"]
            table.append([frames, name, *cells, f"{error:.1e}"])
            row = record(subject, frames, name, t, times[EAGER], kind, options.pause_ms / 1e3)
            records.append(row | {"program": program.name, "difference": error})
    append_json(options.json, "request", records)
    columns = ["frames", "candidate", "ms", "p95 ms", "ms a step", "of eager", "difference"]
    print_table(f"{subject.title}: a request of {steps} steps", columns, table)
    print(f"{'PASS' if passed else 'SHORT'}: no request slower than eager (target {FLOOR:.2f}x)")
    return 0 if passed or not options.gate else 6


if __name__ == "__main__":
    from voicehub_aot.errors import AotError

    try:
        sys.exit(main())
    except AotError as error:
        sys.exit(str(error))
