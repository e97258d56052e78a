"""One sampling step at released size and every length, ours beside each peer: what compiling with us is worth.

    python bench/bench_peers.py --model supertonic --json peers.jsonl --gate
    python bench/bench_peers.py --model f5tts --artifact f5.aot --auto-artifact f5-auto.aot --json peers.jsonl

    eager, torch.compile, onnxruntime, openvino    upstream's step, see candidates.py
    ours:aoti, ours:onnxruntime                    one artifact that holds both engines, opened with each
    auto                                           an artifact that chose an engine for each length by measurement

OpenVINO comes with an extra: pip install 'voicehub-aot[openvino]'. Eager F5 is upstream's own module only where
f5-tts is installed (`make oracle` brings an environment that has it); the output says which it was.

Targets for `auto`: see FLOOR, TARGETS and SHARE. Where one is missed the bench prints by how much. With --gate the exit
code is then 6, as it is when a target could not be judged. JSON rows are written after each length.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

from candidates import EAGER, ONNX, PEERS, chosen_of, line_up, missing, opened
from measuring import COLUMNS, Measured, cells, measure, records, step_flops
from subject import Subject, build_artifact, resolve, sweep_parser, use_threads
from timing import append_json, command, environment, print_table, versions

if TYPE_CHECKING:
    from voicehub_aot.runtime.runtime import Runtime

ENGINES = {f"ours:{name}": name for name in ("aoti", "onnxruntime", "openvino")}
AUTO = "auto"
CANDIDATES = (*PEERS, *ENGINES, AUTO)
LENGTHS = {
    "f5tts": (32, 64, 128, 256, 512, 1024),
    "supertonic": (32, 64, 128, 256, 512, 1000),  # the released graph has 1000 positions
}
BUDGET_S = 240.0


@dataclass(frozen=True)
class Target:
    """`auto` is at least this many times as fast as a peer. frames: at this length alone."""

    model: str
    peer: str
    least: float
    frames: int | None = None


FLOOR = 1.0  # over the fastest peer, at every length
TARGETS = (Target("f5tts", EAGER, 1.5, frames=128), Target("supertonic", ONNX, 1.1))
SHARE, SHARE_FROM = 0.87, 128  # of the packed-matrix roofline; from so many frames up


@dataclass(frozen=True)
class Claim:
    """A number held to a target. what: with %s for the numbers, e.g. "%s of eager"."""

    what: str
    value: float
    least: float
    percent: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.least

    def __str__(self) -> str:
        show = (lambda v: f"{100 * v:.1f} %") if self.percent else (lambda v: f"{v:.2f}x")
        short = "" if self.met else f", short by {100 * (1 - self.value / self.least):.1f} %"
        return f"{show(self.value)} of {self.what} (target {show(self.least)}{short})"


def judged_in(m: Measured) -> str | None:
    """`auto`; where it was not measured, the fastest engine of ours at this length."""
    ours = [name for name in (AUTO, *ENGINES) if name in m.times]
    return AUTO if AUTO in ours else min(ours, key=lambda name: m.times[name].median, default=None)


def claims(m: Measured, judged: str) -> tuple[list[Claim], list[str]]:
    """What holds at this length, and the targets that nothing was measured for."""
    ours, found, open_ = m.times[judged], [], []
    peers = {name: times for name, times in m.times.items() if name in PEERS}
    if peers:
        fastest = min(peers, key=lambda name: peers[name].median)
        found.append(Claim(f"{fastest}, the fastest peer", ours.speedup_over(peers[fastest]), FLOOR))
    else:
        open_.append(f"{FLOOR:.2f}x of the fastest peer")
    for target in TARGETS:
        if target.model != m.line.subject.model.name or target.frames not in (None, m.frames):
            continue
        if target.peer in peers:
            what = f"{EAGER}, {m.line.kind}" if target.peer == EAGER else f"{target.peer} on the whole model"
            found.append(Claim(what, ours.speedup_over(peers[target.peer]), target.least))
        else:
            open_.append(f"{target.least:.2f}x of {target.peer}")
    if m.frames >= SHARE_FROM:
        found.append(Claim("the roofline", m.share(judged), SHARE, percent=True))
    return found, open_


def verdict(m: Measured) -> tuple[bool, str]:
    """Whether every target of this length is met, and the numbers in words."""
    judged = judged_in(m)
    if judged is None:
        return False, f"{m.frames} frames: not judged, no candidate of ours was measured"
    found, open_ = claims(m, judged)
    name = f"{judged} ({m.engines[judged]})" if judged == AUTO else f"{judged} in place of {AUTO}"
    words = [*map(str, found), *(f"not judged: {target}" for target in open_), *(f"{peer} failed" for peer in m.failed)]
    met = all(claim.met for claim in found)
    complete = judged == AUTO and not open_ and not m.failed
    return met and complete, f"{'PASS' if met else 'SHORT'} {m.frames} frames, {name}: {'; '.join(words)}"


def open_ours(
    subject: Subject, chosen: Sequence[str], lengths: Sequence[int], threads: int, given: Path | None, auto: Path | None
) -> dict[str, Runtime]:
    """Ours by candidate; artifacts that are not given are built. Each runtime holds its own copy of packed weights."""
    engines = tuple(ENGINES.values())
    wanted = [name for name in ENGINES if name in chosen]
    if wanted and given is None:
        given = build_artifact(subject, lengths, engines=engines)[0]
    runtimes = {name: opened(subject, given, lengths, threads, ENGINES[name]) for name in wanted}
    if AUTO in chosen:
        runtimes[AUTO] = opened(subject, auto, lengths, threads, engines=engines, auto=True)
    return runtimes


def left_out(chosen: Sequence[str]) -> dict[str, str]:
    """Candidates that cannot take part, and why."""
    return {name: reason for name in chosen if (reason := missing(name))}


def chose(runtime: Runtime) -> bool:
    """Whether its artifact holds an engine for each length by choice; one that kept a single engine has no other."""
    manifest = runtime.manifest
    return manifest is not None and (manifest.mixed or len(manifest.engine_names) == 1)


def main() -> int:
    arguments = sweep_parser(__doc__, rounds=15, lengths=LENGTHS, holds="every engine of ours")
    arguments.add_argument("--candidates", default=",".join(CANDIDATES), help="default %(default)s")
    arguments.add_argument("--auto-artifact", type=Path, help="chose its engines (default: one is built)")
    arguments.add_argument(
        "--budget-s",
        type=float,
        default=BUDGET_S,
        help="of timed calls a length, else fewer rounds (default %(default)s)",
    )
    options = arguments.parse_args()
    asked = chosen_of(arguments, options.candidates, CANDIDATES)
    absent = left_out(asked)
    chosen = [name for name in asked if name not in absent]
    lengths = options.lengths or LENGTHS[options.model]
    threads = use_threads(options.threads)
    subject = resolve(options.model, options.config)
    for name, reason in absent.items():
        print(f"{name} is left out: {reason}")
    runtimes = open_ours(subject, chosen, lengths, threads, options.artifact, options.auto_artifact)
    if unproven := AUTO in runtimes and not chose(runtimes[AUTO]):
        print(f"{AUTO}: this artifact holds no choice by measurement, so its first engine serves every length")
    line = line_up(subject, chosen, runtimes)
    flops = step_flops(subject, lengths)

    print(f"{subject.title}: one step, {subject.rows} packed rows; eager is {line.kind}")
    print(environment())
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    print(command())
    measured = []
    for frames in lengths:
        m = measure(line, frames, flops[frames], options.rounds, options.pause_ms / 1e3, options.budget_s)
        append_json(options.json, "peers", records(m))
        measured.append(m)
    print_table(f"{subject.title}: one step", COLUMNS, [row for m in measured for row in cells(m)])
    verdicts = [verdict(m) for m in measured]
    print("\n".join(text for _, text in verdicts))
    passed = all(met for met, _ in verdicts) and not absent and not unproven
    return 0 if passed or not options.gate else 6


if __name__ == "__main__":
    from voicehub_aot.errors import AotError

    try:
        sys.exit(main())
    except AotError as error:
        sys.exit(str(error))
