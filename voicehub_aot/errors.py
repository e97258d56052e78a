"""Every error this package raises on purpose.

    AotError
      UsageError         UnknownModel, InputMismatch, NoBucketFits, ProgramNotBuilt, ProcessForked   exit 2
      BuildError         CheckpointMismatch (5), ExportFailed, StageFailed, CompileFailed (1), ParityFailed (3),
                         ContradictoryTraits (1)
      LoadError          ArtifactCorrupt, VersionUnsupported, TargetMismatch              exit 5
      Unsupported        EngineUnavailable, OptionUnsupported                             exit 4
      GateFailed         slower than the caller asked for                                 exit 6
      QualityRejected    speech is worse than the reference's, or is not its speech       exit 7
      NoBenefit          an approximation that saves nothing                              exit 8
      MissingDependency  (also ImportError)                                               exit 4
    InternalError        our own bug, outside the tree                                    exit 1

A message says where, what came, what is wanted and what to do next. `exit_code` is what the
command line returns.
"""

from __future__ import annotations

# A terminal obeys these; a name in a hostile file, or the text of another package's error, may hold them.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class AotError(Exception):
    """Root of everything a caller may want to catch. Control characters in its text are shown, not sent."""

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(arg.translate(_CONTROL) if isinstance(arg, str) else arg for arg in args))


class UsageError(AotError):
    """The caller asked for something that cannot be answered as asked."""

    exit_code = 2


class UnknownModel(UsageError):
    """No adapter, or no configuration of it, has this name."""


class InputMismatch(UsageError):
    """A tensor or scalar has the wrong rank, size, dtype, device or value."""


class NoBucketFits(UsageError):
    """A length lies outside the promised buckets."""


class ProgramNotBuilt(UsageError):
    """The artifact holds no program of this name, or none with this evaluation time."""


class ProcessForked(UsageError):
    """A runtime was used, or an artifact opened, in a fork of a process whose compute threads it would need."""


class BuildError(AotError):
    """`build` could not produce an artifact."""


class CheckpointMismatch(BuildError):
    """The checkpoint is unreadable, or its keys or shapes are not those of the model."""

    exit_code = 5


class ExportFailed(BuildError):
    """torch.export refused the region."""


class StageFailed(BuildError):
    """The stages do not compute what the region computes."""


class CompileFailed(BuildError):
    """A back end refused a stage, or produced code without what was asked for."""


class ParityFailed(BuildError):
    """An engine is further from the reference than its budget."""

    exit_code = 3


class ContradictoryTraits(BuildError):
    """An adapter declares no traits, unknown ones, or some that exclude each other."""


class LoadError(AotError):
    """An artifact cannot be opened here."""

    exit_code = 5


class ArtifactCorrupt(LoadError):
    """A file is missing, altered, or not what the manifest says."""


class VersionUnsupported(LoadError):
    """Built by another schema or another torch minor version."""


class TargetMismatch(LoadError):
    """Built for another processor or operating system."""


class Unsupported(AotError):
    """Known, but not possible for this model, engine or machine."""

    exit_code = 4


class EngineUnavailable(Unsupported):
    """The engine is unknown, not built, or cannot run here."""


class OptionUnsupported(Unsupported):
    """The option is known, but not for this model, engine or mode."""


class GateFailed(AotError):
    """An engine is slower than the caller's gate."""

    exit_code = 6


class QualityRejected(AotError):
    """The quality gate found the candidate worse than the reference."""

    exit_code = 7


class NoBenefit(AotError):
    """The quality gate found nothing wrong with an approximation, and nothing that it saves."""

    exit_code = 8


class MissingDependency(AotError, ImportError):
    """An optional package is absent; the text names the extra that installs it."""

    exit_code = 4


class InternalError(RuntimeError):
    """A broken invariant of ours: please report it."""

    exit_code = 1
