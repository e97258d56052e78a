"""`voicehub-aot evaluate`: reads its options, opens both sides, shows the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from voicehub_aot.cli import console, reports
from voicehub_aot.cli.arguments import Artifact, Guidance, Json, Junit, Report, Threads, Verbose, parse_program
from voicehub_aot.errors import NoBenefit, QualityRejected, UsageError

if TYPE_CHECKING:
    from voicehub_aot.artifacts.quality import QualityReport
    from voicehub_aot.proof.quality.utterances import Utterance, UtteranceSet


def evaluate(
    artifact: Artifact,
    cases: Annotated[Path, typer.Option(help="The utterances: a cases.toml with its entry.")],
    program: Annotated[
        str | None, typer.Option(help="The candidate's program, by name or step count; default the first.")
    ] = None,
    guidance: Guidance = None,
    engine: Annotated[str | None, typer.Option(help="The candidate's engine; default the artifact's choice.")] = None,
    reference: Annotated[Path | None, typer.Option(help="The reference's artifact; default the candidate's.")] = None,
    reference_program: Annotated[str | None, typer.Option(help="Default the one with the most steps.")] = None,
    reference_guidance: Guidance = None,
    reference_engine: Annotated[str | None, typer.Option(help="Default the artifact's choice.")] = None,
    scorer: Annotated[list[str] | None, typer.Option(help="Repeated; default those installed.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only so many utterances, the first ones.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Of the noise, e.g. 0,1,2; default those of the set.")] = None,
    candidate_seeds: Annotated[
        str | None, typer.Option(help="Other seeds for the candidate: then the noise is not matched.")
    ] = None,
    bound: Annotated[list[str] | None, typer.Option(help="MEASURE=VALUE instead of the computed bound.")] = None,
    because: Annotated[str | None, typer.Option(help="With --bound: the reason, which the report records.")] = None,
    report: Report = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML report here; it plays the sounds.")] = None,
    junit: Junit = None,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Speech of ARTIFACT against a reference, with the same noise. Exit 7 if it is worse, 8 if it saves nothing."""
    from voicehub_aot.artifacts import quality
    from voicehub_aot.cli.requests import parse_guidance
    from voicehub_aot.proof.quality import evaluate as proof, verdict
    from voicehub_aot.proof.quality.scorers import open_scorers
    from voicehub_aot.proof.quality.side import open_side
    from voicehub_aot.proof.quality.utterances import load_entry, read_utterances

    console.set_up_logging(verbose)
    reports.check(artifact, junit, html, report)
    utterances = read_utterances(cases)
    entry = load_entry(utterances.entry, cases.absolute().parent)
    chosen = _seeds("--seeds", seeds) or utterances.seeds
    spoken = _limited(utterances, limit)
    scorers, not_scored = open_scorers(scorer or None, utterances)
    known = [measure.name for measure in proof.known_measures(scorers)]
    bounds = verdict.parse_bounds(bound or [], because, known)
    progress = console.ConsoleProgress()
    try:
        progress.stage(f"load {artifact}")
        candidate_side = open_side(
            artifact, entry, _seeds("--candidate-seeds", candidate_seeds) or chosen,
            program=parse_program(program), guidance=parse_guidance(guidance), engine=engine, threads=threads,
        )  # fmt: skip
        reference_side = open_side(
            reference or artifact, entry, chosen, program=parse_program(reference_program), most_steps=True,
            guidance=parse_guidance(reference_guidance), engine=reference_engine, threads=threads,
        )  # fmt: skip
        result = proof.evaluate(
            candidate_side, reference_side, spoken, scorers, bounds=bounds, because=because or "",
            not_scored=not_scored, name=cases.name, tell=progress.stage,
        )  # fmt: skip
    finally:
        progress.close()
    reports.write(
        {
            junit: partial(quality.junit, result.report),
            html: partial(quality.html, result.report, result.sounds),
            report: partial(quality.as_json, result.report),
        }
    )
    _show(result.report, as_json)


def _show(report: QualityReport, as_json: bool) -> None:
    """The report on stdout; raises the exit of its verdict."""
    from voicehub_aot.artifacts import quality
    from voicehub_aot.artifacts.report import number

    if as_json:
        console.show_json(json.loads(quality.as_json(report)))
    else:
        candidate, reference = report.candidate, report.reference
        title = f"{candidate.artifact} {candidate.program} against {reference.artifact} {reference.program}"
        console.show_table(title, ("measure", "candidate", "A/A band", "bound", ""), quality.summary(report))
        sides = (
            ("evaluations", *(str(side.evaluations) for side in (candidate, reference))),
            ("RTF p50", *(number(side.rtf_p50) for side in (candidate, reference))),
            ("RTF p95", *(number(side.rtf_p95) for side in (candidate, reference))),
        )
        console.show_table("", ("cost", "candidate", "reference"), sides)
        for name, reason in report.not_scored.items():
            console.say(f"not scored: {name}: {reason}")
        if not report.quality_validated:
            console.say("quality is not validated: the weights are synthetic, or no speech was scored")
        console.stdout().print(f"verdict: {report.verdict}; {'; '.join(report.reasons)}", markup=False, soft_wrap=True)
    text = f"{report.candidate.artifact} {report.candidate.program}: {'; '.join(report.reasons)}"
    if report.verdict == "rejected":
        raise console.after_result(QualityRejected(text))
    if report.verdict == "no benefit":
        raise console.after_result(NoBenefit(text))


def _seeds(flag: str, text: str | None) -> tuple[int, ...] | None:
    """Comma-separated seeds. Raises UsageError."""
    from voicehub_aot.proof.quality.utterances import check_seeds

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 19 for part in parts):
        raise UsageError(f"{flag} {text!r}: wanted integers from 0, e.g. 0,1,2")
    try:
        return check_seeds(tuple(int(part) for part in parts))
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}: {error}") from error


def _limited(utterances: UtteranceSet, limit: int | None) -> Sequence[Utterance]:
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: wanted 1 or more")
    return utterances.utterances[:limit]
