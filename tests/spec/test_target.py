"""How many compute threads a process may have: its own word, else affinity and the cgroups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from voicehub_aot.errors import OptionUnsupported
from voicehub_aot.spec.target import usable_threads

V2 = {"proc/self/cgroup": "0::/"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/\n1:name=systemd:/"}
QUOTAS: list[tuple[str, dict[str, str], int]] = [
    ("nothing known", {}, 16),
    ("2, unlimited", V2 | {"sys/fs/cgroup/cpu.max": "max 100000"}, 16),
    ("2, one", V2 | {"sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
    ("2, one and a half", V2 | {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
    ("2, a fifth", V2 | {"sys/fs/cgroup/cpu.max": "20000 100000"}, 1),
    ("2, no /proc", {"sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
    ("2, its own group", {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "200000 100000"}, 2),
    ("2, a group above", {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
    (
        "2, the strictest counts",
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/cpu.max": "900000 100000",
            "sys/fs/cgroup/a/cpu.max": "400000 100000",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        },
        4,
    ),
    (
        "1, one",
        V1 | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
        1,
    ),
    (
        "1, another period",
        V1
        | {
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000",
        },
        2,
    ),
    (
        "1, unlimited",
        V1 | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
        16,
    ),
    (
        "1, a container that sees the host's path",
        {
            "proc/self/cgroup": "3:cpu:/docker/0f3",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        3,
    ),
    (
        "1, a group of its own",
        {
            "proc/self/cgroup": "3:cpu:/service",
            "sys/fs/cgroup/cpu/service/cpu.cfs_quota_us": "100000",
            "sys/fs/cgroup/cpu/service/cpu.cfs_period_us": "100000",
        },
        1,
    ),
    (
        "both, version 1 has the processors",
        {
            "proc/self/cgroup": "2:cpuacct,cpu:/\n0::/",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
        1,
    ),
    ("of words", V2 | {"sys/fs/cgroup/cpu.max": "lots"}, 16),
    ("cgroup of words", {"proc/self/cgroup": "what", "sys/fs/cgroup/cpu.max": "100000 100000"}, 16),
    ("another resource's quota", {"proc/self/cgroup": "4:memory:/", "sys/fs/cgroup/memory/cpu.max": "1 1"}, 16),
]


@pytest.fixture(autouse=True)
def _sixteen_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(("files", "wanted"), [pytest.param(f, w, id=name) for name, f, w in QUOTAS])
def test_threads_are_the_affinitys_capped_by_every_cgroup(tmp_path: Path, files: dict[str, str], wanted: int) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert usable_threads(tmp_path) == wanted


@pytest.mark.parametrize(("text", "wanted"), [("1", 1), (" 3 ", 3), ("64", 64), ("5,2", 5), ("", 16), (" ", 16)])
def test_omp_num_threads_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, wanted: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert usable_threads(tmp_path) == wanted


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ",2", "²"])
def test_an_omp_num_threads_that_is_not_a_count_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(OptionUnsupported, match=r"OMP_NUM_THREADS='.*' must be a positive integer"):
        usable_threads(tmp_path)
