"""How often the parity gate errs: correct engines refused, and wrong ones let through.

Correct engines: the toy region's compiled engine over the weights of many seeds, and every tiny model's own module.
Each is checked against a recording of its own process, and against one that a process without the setting made; the
settings make the matrix libraries take other code paths. Wrong engines: the faults of tests/planted.py.

    python bench/bench_gate.py --seeds 200
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]  # PYTHONSAFEPATH leaves a script's own folder out

import planted  # noqa: E402
import torch  # noqa: E402
import toy  # noqa: E402

from voicehub_aot import adapters  # noqa: E402
from voicehub_aot.artifacts.report import Finding  # noqa: E402
from voicehub_aot.compiler import models  # noqa: E402
from voicehub_aot.compiler.assemble import time_table  # noqa: E402
from voicehub_aot.compiler.export import export_region  # noqa: E402
from voicehub_aot.compiler.split import split  # noqa: E402
from voicehub_aot.proof import parity  # noqa: E402
from voicehub_aot.proof.cases import Recording, load_recording, save_recording  # noqa: E402
from voicehub_aot.runtime.eager import eager_runtime  # noqa: E402
from voicehub_aot.runtime.evaluator import EngineEvaluator  # noqa: E402
from voicehub_aot.runtime.runtime import Runtime  # noqa: E402
from voicehub_aot.spec.bucket import Buckets  # noqa: E402
from voicehub_aot.spec.program import Program  # noqa: E402
from voicehub_aot.spec.region import Region  # noqa: E402
from voicehub_aot.spec.schedule import linear  # noqa: E402
from voicehub_aot.spec.solver import euler, midpoint  # noqa: E402

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "MKL_CBWR=COMPATIBLE": {"MKL_CBWR": "COMPATIBLE"},
    "MKL_CBWR=AVX2": {"MKL_CBWR": "AVX2"},
    "ONEDNN_MAX_CPU_ISA=AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "ATEN_CPU_CAPABILITY=avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "two threads": {"OMP_NUM_THREADS": "2"},
}
PROGRAMS = (euler(linear(3)), midpoint(linear(2)))
TOY_BUCKETS = [{"frames": 16}]


def subjects(seeds: int) -> Iterator[tuple[str, Region, tuple[Program, ...], list[dict[str, int]]]]:
    """(name, region, programs, buckets) of the toy with many weights, and of every model at tiny size."""
    for seed in range(seeds):
        yield f"toy-{seed}", toy.region(seed), PROGRAMS, TOY_BUCKETS
    for name in adapters.names():
        model = models.resolve(name, "tiny", "synthetic")
        sized = model.region.spec.main_dim == "frames"
        yield name, model.region, (models.program(model, 3),), [{"frames": 16}] if sized else [{}]


def recorded(region: Region, programs: tuple[Program, ...], buckets: list[dict[str, int]]) -> Recording:
    exact = eager_runtime(Region(region.spec, copy.deepcopy(region.module).double()), programs, "exact", torch.float64)
    return parity.record(eager_runtime(region, programs, "eager"), exact, buckets, max_batch=8)


class CompiledToy:
    """The toy's engine, compiled once, opened over the weights of any seed."""

    def __init__(self, folder: Path) -> None:
        self.compiled = toy.Compiled("aoti", "shared", folder)

    def runtime(self, seed: int) -> Runtime:
        graph, symbols = export_region(toy.region(seed))
        stages = split(graph, toy.SPEC, symbols)
        weights = {n: t for s in (stages.prepare, stages.mixed, stages.step) if s for n, t in s.constants.items()}
        opened = []
        for job in (self.compiled.prepare, self.compiled.step):
            entry = self.compiled.entry(job)
            constants = {c.name: weights[c.name].contiguous() for c in entry.constants}
            opened.append((entry, self.compiled.open(job, constants)))
        tables = {p.name: time_table(stages, p) for p in PROGRAMS}
        evaluator = EngineEvaluator(toy.SPEC, Buckets(axes={}), opened[0], opened[1:], tables)
        return Runtime(toy.SPEC, evaluator, {p.name: p for p in PROGRAMS}, Buckets(axes={}), name="toy")


def checked(setting: str, seeds: int, folder: Path | None) -> dict[str, object]:
    """Every correct engine against its own recording, and against the one in `folder`."""
    findings: list[tuple[str, Finding]] = []
    with tempfile.TemporaryDirectory() as scratch:
        compiled = CompiledToy(Path(scratch))
        for name, region, programs, buckets in subjects(seeds):
            ours = name.startswith("toy-")
            engine = compiled.runtime(int(name[4:])) if ours else eager_runtime(region, programs, name)
            recordings = [recorded(region, programs, buckets)]
            if folder is not None:
                recordings.append(load_recording(folder / name))
            findings += [(name, finding) for recording in recordings for finding in parity.check(engine, recording)]
    compared = [(name, finding) for name, finding in findings if finding.check != "sensitivity"]
    worst, where = max(((finding.used, f"{name}: {finding.name}") for name, finding in compared), default=(0.0, ""))
    return {
        "measured": "correct engines",
        "setting": setting,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "seeds": seeds,
        "findings": len(findings),
        "refused": [f"{name}: {finding.name}: {finding.verdict}" for name, finding in findings if not finding.passed],
        "most_of_a_budget": round(worst, 3),
        "at": where,
    }


def planted_faults(setting: str, seeds: int) -> dict[str, object]:
    """Every planted fault over the weights of several seeds: how far over its budget the worst finding is."""
    over: dict[str, float] = {}
    for seed in range(seeds):
        recording = recorded(toy.region(seed), PROGRAMS, TOY_BUCKETS)
        for name, make in planted.FAULTS.items():
            wrong = eager_runtime(Region(toy.SPEC, make(seed)), PROGRAMS, "wrong")
            worst = max(finding.used for finding in parity.check(wrong, recording) if finding.check != "sensitivity")
            over[name] = min(over.get(name, worst), worst)
    return {
        "measured": "planted faults",
        "setting": setting,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "seeds": seeds,
        "least_times_over_budget": {name: float(f"{value:.3g}") for name, value in over.items()},
        "let_through": sorted(name for name, value in over.items() if value <= 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="weights of the toy that are tried")
    parser.add_argument("--fault-seeds", type=int, default=5, help="weights that every fault is planted in")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        print(json.dumps(checked(arguments.child, arguments.seeds, arguments.folder)), flush=True)
        print(json.dumps(planted_faults(arguments.child, arguments.fault_seeds)), flush=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        torch.set_num_threads(1)
        for name, region, programs, buckets in subjects(arguments.seeds):
            save_recording(recorded(region, programs, buckets), Path(scratch) / name)
        for setting in arguments.settings:
            counts = ["--seeds", str(arguments.seeds), "--fault-seeds", str(arguments.fault_seeds)]
            command = [sys.executable, __file__, "--child", setting, "--folder", scratch, *counts]
            subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ, **SETTINGS[setting]}, check=True)


if __name__ == "__main__":
    main()
