"""The recorded reference cases as test parameters. A file an engine, so that workers share the compiling."""

import json
import os
from pathlib import Path

import pytest

from voicehub_aot.compiler.replay import replay
from voicehub_aot.spec.golden import find_cases

GOLDEN = Path(os.environ.get("VOICEHUB_AOT_GOLDEN", Path(__file__).with_name("golden")))
PATHS = find_cases(GOLDEN)


def graph_of(path):
    """Cases of one configuration have one graph, whose engine is made once in the default run."""
    case = json.loads((path / "case.json").read_text())
    return case["model_type"], json.dumps(case["config"], sort_keys=True)


ONCE = {graph_of(path): path for path in PATHS}  # the last of each graph: a whole loop, if there is one


def cases_for(engine):
    """Every case. Slow are those of released size, and on engines all but one a graph; AOTInductor, whose compiling
    takes a minute, is left the graphs that have a whole loop."""
    return [
        pytest.param(path, id=f"{path.parent.name}-{path.name}", marks=[pytest.mark.slow] if slow(engine, path) else [])
        for path in PATHS
    ]


def slow(engine, path):
    again = engine != "eager" and ONCE[graph_of(path)] != path
    return "real" in path.name or again or (engine == "aoti" and "sampler" not in path.name)


def check(engine, path, weights_mode="shared"):
    """Every output that was recorded is inside its tolerance."""
    outcomes = replay(path, engine, weights_mode)

    recorded = json.loads((path / "case.json").read_text())["outputs"]
    assert {o.output for o in outcomes} == set(recorded)
    assert [o for o in outcomes if not o.passed] == []
