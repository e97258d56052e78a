import inspect

import pytest

from voicehub_aot import errors

# The tree that the module draws at its top: class, parent, exit code.
TREE = [
    ("AotError", Exception, 1),
    ("UsageError", errors.AotError, 2),
    ("UnknownModel", errors.UsageError, 2),
    ("InputMismatch", errors.UsageError, 2),
    ("NoBucketFits", errors.UsageError, 2),
    ("ProgramNotBuilt", errors.UsageError, 2),
    ("ProcessForked", errors.UsageError, 2),
    ("BuildError", errors.AotError, 1),
    ("CheckpointMismatch", errors.BuildError, 5),
    ("ExportFailed", errors.BuildError, 1),
    ("StageFailed", errors.BuildError, 1),
    ("CompileFailed", errors.BuildError, 1),
    ("ParityFailed", errors.BuildError, 3),
    ("ContradictoryTraits", errors.BuildError, 1),
    ("LoadError", errors.AotError, 5),
    ("ArtifactCorrupt", errors.LoadError, 5),
    ("VersionUnsupported", errors.LoadError, 5),
    ("TargetMismatch", errors.LoadError, 5),
    ("Unsupported", errors.AotError, 4),
    ("EngineUnavailable", errors.Unsupported, 4),
    ("OptionUnsupported", errors.Unsupported, 4),
    ("GateFailed", errors.AotError, 6),
    ("QualityRejected", errors.AotError, 7),
    ("NoBenefit", errors.AotError, 8),
    ("MissingDependency", errors.AotError, 4),
    ("InternalError", RuntimeError, 1),
]


@pytest.mark.parametrize(("name", "parent", "exit_code"), TREE)
def test_every_error_has_its_place_and_exit_code(name, parent, exit_code):
    error = getattr(errors, name)

    assert error.__bases__[0] is parent
    assert error("text").exit_code == exit_code


def test_no_error_is_missing_from_the_tree_or_the_drawing():
    defined = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}

    assert defined == {name for name, _, _ in TREE}
    assert all(name in errors.__doc__ for name in defined)


def test_every_error_says_what_it_means():
    assert all(getattr(errors, name).__doc__ for name, _, _ in TREE)


def test_a_missing_dependency_is_also_an_import_error():
    with pytest.raises(ImportError, match="extra"):
        raise errors.MissingDependency("extra")


def test_our_own_bugs_are_not_caught_with_the_tree():
    assert not issubclass(errors.InternalError, errors.AotError)
