"""The packages to install, found by listing: pyproject.toml cannot map a folder and list what lies below it."""

from setuptools import find_packages, setup

BESIDE = ("adapters", "kernels", "artifacts")  # folders beside voicehub_aot that install inside it

setup(
    packages=[
        *find_packages(include=["voicehub_aot", "voicehub_aot.*"]),
        *(f"voicehub_aot.{name}" for name in find_packages(include=[p for b in BESIDE for p in (b, f"{b}.*")])),
    ]
)
