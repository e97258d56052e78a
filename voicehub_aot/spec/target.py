"""What a build is for: a device and an instruction set; and what this machine has of them."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import torch
from pydantic import BaseModel, ConfigDict

from voicehub_aot.errors import OptionUnsupported, TargetMismatch

# Feature flags as Linux names them. Source: x86-64 psABI, micro-architecture levels.
X86_64_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
X86_64_V4 = (*X86_64_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS = {"x86-64-v3": X86_64_V3, "x86-64-v4": X86_64_V4}
VECTOR_BITS = {"x86-64-v3": 256, "x86-64-v4": 512}


class Target(BaseModel):
    """isa: a level above, or "native". features: what a machine must have to run the code."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    device: str
    isa: str
    machine: str
    system: str
    features: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.device}:{self.isa}"

    @property
    def folder(self) -> str:
        return f"{self.device}-{self.isa}"


def host_features() -> frozenset[str]:
    """The processor's feature flags, as Linux reports them; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(flags.split(":", 1)[1].split())


def default_target() -> str:
    return "cpu:x86-64-v3" if platform.machine() == "x86_64" else "cpu:native"


def parse_target(text: str) -> Target:
    """ "cpu:x86-64-v3", "cpu:x86-64-v4" or "cpu:native"; raises OptionUnsupported, also if this machine lacks it.

    A build runs what it builds, so it must be possible here.
    """
    device, _, isa = text.partition(":")
    isa = isa or default_target().partition(":")[2]
    known = [f"cpu:{level}" for level in LEVELS] + ["cpu:native"]
    if device != "cpu" or (isa not in LEVELS and isa != "native"):
        raise OptionUnsupported(f"--target {text!r} is not supported; choose one of {', '.join(known)}")
    features = LEVELS.get(isa, tuple(sorted(host_features())))
    target = Target(
        device=device, isa=isa, machine=platform.machine(), system=platform.system().lower(), features=features
    )
    if isa in LEVELS and platform.machine() != "x86_64":
        raise OptionUnsupported(f"--target {text!r} needs an x86-64 machine, this is {platform.machine()}")
    missing = missing_features(target.features)
    if missing:
        raise OptionUnsupported(
            f"--target {text!r}: this processor lacks {', '.join(missing)}, so parity cannot be run"
        )
    return target


def missing_features(features: Iterable[str]) -> list[str]:
    return sorted(set(features) - host_features())


def check_target(target: Target, where: str) -> None:
    """Raises TargetMismatch if code built for `target` could not run on this machine."""
    here = (platform.system().lower(), platform.machine())
    if (target.system, target.machine) != here:
        raise TargetMismatch(
            f"{where}: built for {target.system}/{target.machine}, this is {here[0]}/{here[1]}; rebuild it here"
        )
    missing = missing_features(target.features)
    if missing:
        raise TargetMismatch(
            f"{where}: built for {target.name}, this processor lacks {', '.join(missing[:8])}; "
            f"rebuild with --target {default_target()} or on this machine"
        )


def torch_minor() -> str:
    """The part of torch's version that compiled code depends on, e.g. "2.13"."""
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


def usable_threads(system: Path = Path("/")) -> int:
    """Compute threads to run: OMP_NUM_THREADS if it is set, else this process's affinity, capped by its cgroups' quota.

    system: where /proc and /sys lie. Raises OptionUnsupported if OMP_NUM_THREADS is not a positive integer or a list
    of them, one a nesting level, of which the first counts.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").strip()
    if asked:
        first = asked.split(",")[0].strip()
        if not (first.isascii() and first.isdigit() and int(first) > 0):
            raise OptionUnsupported(f"OMP_NUM_THREADS={asked!r} must be a positive integer; correct it, or unset it")
        return int(first)
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([count, *(max(1, math.ceil(quota)) for quota in _cpu_quotas(system))])


def _cpu_quotas(system: Path) -> list[float]:
    """Processors that each cgroup of this process may use, where it is limited: its own and those above it.

    Version 2 has one tree for all resources, version 1 one for each; a container often sees its own cgroup as the root.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError):
        lines = ["0::/"]
    quotas = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "cpu" not in controllers.split(","):
            continue
        read, names = (
            (_quota_v1, (controllers, "cpu", "cpu,cpuacct", "cpuacct,cpu"))
            if controllers
            else (_quota_v2, ("", "unified"))
        )
        for name in dict.fromkeys(names):
            top, inside = system / "sys/fs/cgroup" / name, PurePosixPath(path.lstrip("/"))
            quotas += [quota for part in (inside, *inside.parents) if (quota := read(top / part)) is not None]
    return quotas


def _quota_v2(folder: Path) -> float | None:
    return _ratio(_words(folder / "cpu.max"))


def _quota_v1(folder: Path) -> float | None:
    return _ratio([*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")])


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeError):
        return []


def _ratio(words: list[str]) -> float | None:
    """Quota and period, both in microseconds; "max" or a negative quota is none."""
    try:
        quota, period = map(int, words)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None
