"""The pass that joins `prepare` with the time x request work of all evaluations."""

import pytest
import torch
import toy

from voicehub_aot.compiler.export import example_inputs, export_region
from voicehub_aot.compiler.passes import all_evaluations, proven
from voicehub_aot.compiler.split import split


@pytest.fixture(scope="module")
def stages():
    graph, symbols = export_region(toy.region())
    return split(graph, toy.SPEC, symbols)


def test_all_evaluations_run_as_one_batch(stages):
    given = example_inputs(toy.SPEC, {"B": 2, "frames": 7, "text": 3}, seed=1)
    tables = [stages.table({"time": torch.tensor([t])})["linear"] for t in (0.1, 0.4, 0.9)]

    after = all_evaluations.rewrite(stages, {})

    assert after.mixed is None
    together = after.prepare({**given, "linear": torch.stack(tables)})
    (mixed,) = stages.mixed.outputs
    assert {v.name for v in after.prepare.outputs if v.stacked} == {mixed.name}
    for number, table in enumerate(tables):
        one = {**given, **stages.prepare(given), "linear": table}
        torch.testing.assert_close(together[mixed.name][number], stages.mixed(one)[mixed.name])


def test_it_is_held_to_the_stages_before(stages):
    after = proven("all_evaluations", stages, all_evaluations.rewrite(stages, {}), {})

    assert list(after.deviations) == ["split", "all_evaluations"]
    assert after.deviations["all_evaluations"].worst <= after.deviations["all_evaluations"].allowed
    assert all_evaluations.rewrite(after, {}) is after  # nothing is left to do
