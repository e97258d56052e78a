"""What a build is for: a device and an instruction set; and what this machine has of them."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable
from pathlib import Path

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


def usable_threads() -> int:
    """Processors this process may use: its affinity, capped by the cgroup's CPU quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        if quota != "max":
            count = min(count, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count
