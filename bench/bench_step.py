"""One sampling step of a request: the denoiser with every guidance branch packed, guidance, and the Euler update.

    python bench/bench_step.py --model supertonic --lengths 64,128,250
    python bench/bench_step.py --model f5tts --lengths 64,128,250,512 --rounds 9 --json step.jsonl --gate

Candidates (see candidates.py for the first three and how all are checked before they are timed, measuring.py for the
roofline):

    eager, torch.compile, onnxruntime
    ours           the packed artifact: what depends on the request alone is prepared once, as in a sampling loop
    ours-shared    the artifact with shared weights, one engine a length (not by default)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

from candidates import COMPILED, EAGER, ONNX, OURS, chosen_of, line_up, opened
from measuring import COLUMNS, cells, measure, records, step_flops
from subject import DEFAULT_LENGTHS, resolve, sweep_parser, use_threads
from timing import Times, append_json, environment, print_table

SHARED = "ours-shared"
CANDIDATES = (EAGER, COMPILED, ONNX, OURS, SHARED)
TARGETS: Mapping[str, Mapping[int, float]] = {  # over eager, by frames
    "f5tts": {128: 1.35, 512: 1.12},
    "supertonic": {64: 1.35, 128: 1.35},
}
FLOOR = 1.0  # over eager and torch.compile, at every length


def verdict(model: str, frames: int, times: Mapping[str, Times]) -> tuple[bool, str]:
    """Whether ours meets the targets at this length, and the numbers in words."""
    ours = times[OURS]
    wanted = {EAGER: max(FLOOR, TARGETS.get(model, {}).get(frames, FLOOR)), COMPILED: FLOOR}
    met = {name: ours.speedup_over(times[name]) >= least for name, least in wanted.items() if name in times}
    parts = [f"{ours.speedup_over(times[name]):.2f}x of {name} (target {wanted[name]:.2f}x)" for name in met]
    return all(met.values()), f"{'PASS' if all(met.values()) else 'SHORT'} {frames} frames: {', '.join(parts)}"


def main() -> int:
    arguments = sweep_parser(__doc__, rounds=15, holds="packed weights")
    arguments.add_argument("--candidates", default=",".join(CANDIDATES[:4]), help="default %(default)s")
    arguments.add_argument("--shared-artifact", type=Path, help="the one with shared weights (default: one is built)")
    options = arguments.parse_args()
    chosen = chosen_of(arguments, options.candidates, CANDIDATES)
    lengths = options.lengths or DEFAULT_LENGTHS[options.model]
    threads = use_threads(options.threads)
    subject = resolve(options.model, options.config)
    given = {OURS: (options.artifact, "packed"), SHARED: (options.shared_artifact, "shared")}
    runtimes = {
        name: opened(subject, path, lengths, threads, mode=mode)
        for name, (path, mode) in given.items()
        if name in chosen
    }
    line = line_up(subject, chosen, runtimes)
    flops = step_flops(subject, lengths)
    print(f"{subject.title}: one step, {subject.rows} packed rows; eager is {line.kind}")
    print(environment())
    pause_s = options.pause_ms / 1e3
    measured = [measure(line, frames, flops[frames], options.rounds, pause_s) for frames in lengths]
    append_json(options.json, "step", [row for m in measured for row in records(m)])
    print_table(f"{subject.title}: one step", COLUMNS, [row for m in measured for row in cells(m)])
    verdicts = [verdict(subject.model.name, m.frames, m.times) for m in measured if OURS in m.times]
    print("\n".join(text for _, text in verdicts))
    return 0 if all(met for met, _ in verdicts) or not options.gate else 6


if __name__ == "__main__":
    from voicehub_aot.errors import AotError

    try:
        sys.exit(main())
    except AotError as error:
        sys.exit(str(error))
