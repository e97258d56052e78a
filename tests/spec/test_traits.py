"""Traits: what contradicts itself cannot be declared, and every model declares something."""

from types import SimpleNamespace

import pytest
import recorded
from pydantic import ValidationError

import voicehub_aot
from voicehub_aot import adapters
from voicehub_aot.adapters._excluded import EXCLUDED
from voicehub_aot.compiler.models import program, resolve
from voicehub_aot.errors import BuildError, ContradictoryTraits, UnknownModel
from voicehub_aot.spec.traits import BUILT, FORMULATIONS_BY_SOLVER, GUIDED, KNOWN, VELOCITY, VERIFIED, Support, Traits

FLOW = {
    "formulation": "rectified-flow",
    "operations": ("denoiser", "classifier-free-guidance", "euler-solver"),
    "techniques": ("schedule", "guidance", "prediction-cache", "stork2"),
    "attention": ("native", "sdpa", "flash_attention_4"),
    "kernels": ("native", "torch", "auto", "triton", "cuda_extension"),
    "dtypes": ("float32", "bfloat16"),
    "passes": ("compile", "attention-backend", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
    "surfaces": ("model.forward",),
}

SOLVER_NAMES = {"euler": "euler-solver", "adpm2": "adpm2-solver", "dpm_solver_2m": "dpm-solver-plus-plus"}
# What VoiceHub's inventory records for the models of this package.
RECORDED = {
    "f5tts": (
        "conditional-flow-matching",
        ("denoiser", "classifier-free-guidance", "euler-solver", "midpoint-solver"),
        ("schedule", "guidance", "prediction-cache", "stork2"),
        ("compile", "attention-backend", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
    ),
    "supertonic": (
        "flow-matching",
        ("denoiser", "iterative-estimator"),
        ("discrete-step-count",),
        ("compile", "diffusion-cache", "diffusion-sampling"),
    ),
}


def traits(**changes):
    return Traits(**{**FLOW, **changes})


def test_traits_are_values():
    assert traits() == traits()
    assert len({traits(), traits(), traits(surfaces=())}) == 2
    with pytest.raises(ValidationError, match="frozen"):
        traits().formulation = "flow-matching"


def test_traits_survive_json():
    assert Traits.model_validate_json(traits().model_dump_json()) == traits()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"formulation": "flow"}, "formulation 'flow' not known; known are conditional-flow-matching"),
        ({"operations": ("denoiser", "classifier-free-guidance", "euler")}, "operations 'euler' not known"),
        ({"techniques": ("schedule", "teacache")}, "techniques 'teacache' not known"),
        ({"attention": ("native", "sdpa", "fa4")}, "attention 'fa4' not known"),
        ({"kernels": ("native", "torch", "cuda")}, "kernels 'cuda' not known"),
        ({"dtypes": ("float32", "float64")}, "dtypes 'float64' not known"),
        ({"passes": (*FLOW["passes"], "quantize")}, "passes 'quantize' not known"),
        *(
            ({field: (*FLOW[field], FLOW[field][0])}, f"{field} names {FLOW[field][0]!r} more than once")
            for field in ("operations", "techniques", "attention", "kernels", "dtypes", "passes", "surfaces")
        ),
    ],
)
def test_unknown_and_repeated_names_are_refused(changes, words):
    with pytest.raises(ContradictoryTraits, match=words):
        traits(**changes)


def without(field, *names):
    return {field: tuple(name for name in FLOW[field] if name not in names)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (without("operations", "euler-solver"), "operations need one of euler-solver, "),
        (without("operations", "denoiser"), "operations need 'denoiser'"),
        ({"operations": (*FLOW["operations"], "adpm2-solver")}, r"\['adpm2-solver'\] do not solve this formulation"),
        ({"formulation": "style-diffusion"}, r"\['euler-solver'\] do not solve this formulation"),
        ({"dtypes": ()}, "dtypes are empty"),
        ({"techniques": ()}, "the pass 'diffusion-sampling' and at least one technique go together"),
        (without("passes", "diffusion-sampling"), "the pass 'diffusion-sampling' and at least one technique"),
        ({"techniques": ("discrete-step-count",)}, "'discrete-step-count' and the operation 'iterative-estimator'"),
        (
            {"operations": (*FLOW["operations"], "iterative-estimator")},
            "'discrete-step-count' and the operation 'iterative-estimator'",
        ),
        (
            {
                "operations": ("denoiser", "classifier-free-guidance", "iterative-estimator"),
                "techniques": ("schedule", "discrete-step-count"),
            },
            "'schedule' and 'discrete-step-count' exclude each other",
        ),
        (without("operations", "classifier-free-guidance"), "'guidance' needs operation 'classifier-free-guidance'"),
        (without("techniques", "schedule"), "'stork2' needs a velocity on a schedule"),
        (without("attention", "native"), "attention needs 'native'"),
        (without("attention", "sdpa"), "attention 'sdpa' and one of the passes"),
        (without("attention", "flash_attention_4"), "'flash_attention_4' and the pass 'attention-backend' go together"),
        (without("passes", "attention-backend"), "'flash_attention_4' and the pass 'attention-backend' go together"),
        ({"dtypes": ("float32",)}, "'flash_attention_4' needs a 16-bit dtype"),
        (without("kernels", "torch"), "kernels need 'native' and 'torch'"),
        ({"kernels": ("native", "torch")}, "the pass 'custom-kernels' go together"),
        (without("passes", "custom-kernels"), "the pass 'custom-kernels' go together"),
        (without("passes", "compile"), "surfaces need the pass 'compile'"),
    ],
)
def test_contradictions_are_refused(changes, words):
    with pytest.raises(ContradictoryTraits, match=words):
        traits(**changes)


@pytest.mark.parametrize(
    ("formulation", "solver"),
    [("style-diffusion", "adpm2-solver"), ("denoising-diffusion", "dpm-solver-plus-plus")],
)
def test_stork2_needs_a_velocity(formulation, solver):
    changes = {"formulation": formulation, "operations": ("denoiser", "classifier-free-guidance", solver)}
    traits(**changes, **without("techniques", "stork2"))
    with pytest.raises(ContradictoryTraits, match="'stork2' needs a velocity"):
        traits(**changes)


@pytest.mark.parametrize("changes", [{"formulation": 1}, {"operations": "denoiser"}, {"passes": None}, {"solver": "x"}])
def test_what_has_no_such_form_is_the_same_error(changes):
    with pytest.raises(ContradictoryTraits, match=f"malformed: {next(iter(changes))}.*wanted formulation, operations"):
        traits(**changes)
    assert issubclass(ContradictoryTraits, BuildError)


def test_everything_wrong_is_in_one_error():
    with pytest.raises(ContradictoryTraits) as caught:
        traits(dtypes=("float32",), passes=("compile", "attention-backend", "custom-kernels"))
    assert "16-bit" in str(caught.value)
    assert "diffusion-sampling" in str(caught.value)


def test_the_vocabularies_cover_every_field_that_has_one():
    assert set(KNOWN) == set(Traits.model_fields) - {"surfaces"}
    assert set(VELOCITY) < set(KNOWN["formulation"])
    assert set(FORMULATIONS_BY_SOLVER) < set(KNOWN["operations"])


# --- inventory


def test_every_model_is_in_the_inventory():
    inventory = voicehub_aot.inventory()
    assert sorted(inventory) == adapters.names()
    assert all(isinstance(item, Traits) for item in inventory.values())


@pytest.mark.parametrize("model", RECORDED)
def test_the_inventory_is_voicehubs(model):
    found = voicehub_aot.inventory()[model]
    assert (found.formulation, found.operations, found.techniques, found.passes) == RECORDED[model]


def test_an_adapter_that_declares_nothing_is_named(monkeypatch):
    silent = SimpleNamespace(NAME="supertonic", ALIASES=())
    real = adapters.load
    monkeypatch.setattr(adapters, "load", lambda name: silent if name == "supertonic" else real(name))
    with pytest.raises(ContradictoryTraits, match=r"supertonic \(voicehub_aot\.adapters\.supertonic\): wanted TRAITS"):
        adapters.inventory()


@pytest.mark.parametrize("model", EXCLUDED)
def test_a_model_without_a_denoiser_is_refused_with_its_reason(model):
    assert model not in adapters.names()
    with pytest.raises(UnknownModel) as caught:
        adapters.load(model)
    assert EXCLUDED[model] in str(caught.value)


# --- admitted, built, verified


def test_an_item_is_admitted_built_and_verified_apart():
    f5 = voicehub_aot.inventory()["f5tts"].support
    assert f5["techniques"]["schedule"] == Support(admitted=True, built=True, verified=VERIFIED)
    assert f5["techniques"]["stork2"] == Support(admitted=True, built=False, verified=())
    assert {name for name, item in f5["dtypes"].items() if item.built} == {"float32"}


def test_what_is_built_is_known():
    assert all(set(names) <= set(KNOWN[kind]) for kind, names in BUILT.items())


@pytest.mark.parametrize("model", RECORDED)
def test_what_is_called_verified_is_replayed_in_the_default_run(model):
    loops = [path for path in recorded.PATHS if path.parent.name == model and path.name.startswith("sampler_tiny")]
    replayed = [
        f"{engine} float32 tiny"
        for engine in ("eager", "aoti", "onnxruntime")
        if any(not recorded.slow(engine, path) for path in loops)
    ]
    assert tuple(replayed) == VERIFIED


# --- the region and its loop


@pytest.mark.parametrize("model", RECORDED)
def test_traits_say_what_the_region_and_its_loop_are(model):
    adapter, traits = adapters.load(model), voicehub_aot.inventory()[model]
    built = resolve(model, "tiny", "synthetic")
    spec = built.region.spec

    inside = spec.call.returns == "next_state"  # the released estimator guides itself
    assert (spec.guidance is not None) == (GUIDED in traits.operations or inside)
    assert inside == ("iterative-estimator" in traits.operations)
    assert spec.call.parameters  # upstream's call, for `Runtime.denoiser`
    solver = SOLVER_NAMES[program(built, adapter.DEFAULT_STEPS[0]).solver]
    assert solver in traits.operations or (inside and solver == "euler-solver")
