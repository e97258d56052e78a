import re
from importlib import metadata

import pytest

import voicehub_aot
from voicehub_aot import adapters, errors
from voicehub_aot.runtime import load, runtime


def test_the_package_exports_these_names_and_no_others():
    assert sorted(voicehub_aot.__all__) == ["AotError", "Runtime", "__version__", "inventory", "load"]


def test_the_exports_are_the_real_things():
    assert voicehub_aot.AotError is errors.AotError
    assert voicehub_aot.Runtime is runtime.Runtime
    assert voicehub_aot.inventory is adapters.inventory
    assert voicehub_aot.load is load.load


def test_star_import_gives_every_export():
    names = {}
    exec("from voicehub_aot import *", names)

    assert set(voicehub_aot.__all__) <= set(names)


def test_the_version_is_the_installed_one():
    assert voicehub_aot.__version__ == metadata.version("voicehub-aot")
    assert re.fullmatch(r"\d+\.\d+\.\d+", voicehub_aot.__version__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'compile'"):
        voicehub_aot.compile  # noqa: B018  (reading it is the test)
