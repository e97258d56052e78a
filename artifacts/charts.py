"""The report's charts, as SVG elements to inline in its page. `report.html` imports this file when it is asked for.

Charts are painted in stand-in colours that become the page's CSS variables, so that they follow its theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from voicehub_aot.artifacts.quality import Judged, QualityReport
from voicehub_aot.artifacts.report import Finding, Size, Timing
from voicehub_aot.spec.bucket import label

MOST_BARS = 14
SERIES = ("s0", "s1", "s2", "s3", "s4", "s5")
PAINT = {name: f"#fed{index:03x}" for index, name in enumerate(("ink", "muted", "line", "accent", "bad", *SERIES))}
STYLE: dict[Any, Any] = {  # matplotlib types the keys one by one
    "svg.fonttype": "none",
    "svg.hashsalt": "voicehub-aot",  # ids are then the same in every rendering
    "text.parse_math": False,
    "font.size": 9.0,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": PAINT["line"],
    "axes.labelcolor": PAINT["muted"],
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": PAINT["ink"],
    "xtick.color": PAINT["muted"],
    "ytick.color": PAINT["muted"],
    "grid.color": PAINT["line"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.2,
}


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an element to inline; its ids get the prefix `name`, for several figures share a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for variable, paint in PAINT.items():
        text = text.replace(paint, f"var(--{variable})")
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


def _series(index: int) -> str:
    return PAINT[SERIES[index % len(SERIES)]]


def _legend(figure: Figure, axes: Axes, loc: Literal["outside lower center", "outside upper left"]) -> None:
    """One entry per name, however many lines bear it."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(list(unique.values()), list(unique), loc=loc, ncols=4)


@rc_context(STYLE)
def errors(findings: Iterable[Finding]) -> list[str]:
    """Error against step: one chart per program, one colour per bucket; failures stand out."""
    panels: dict[str, list[Finding]] = {}
    for finding in findings:
        panels.setdefault(
            f"{finding.program or finding.check}, {'guided' if finding.guided else 'unguided'}", []
        ).append(finding)
    return [_errors(title, panel, f"error{index}") for index, (title, panel) in enumerate(panels.items())]


def _errors(title: str, findings: list[Finding], name: str) -> str:
    figure = _figure(5.4, 3.3)
    axes = figure.add_subplot(title=title, xlabel="step, from 0", ylabel="max error")
    buckets = list(dict.fromkeys(label(finding.bucket) for finding in findings))
    for finding in sorted(findings, key=lambda finding: not finding.passed):  # failures last: drawn on top
        bucket = label(finding.bucket)
        points = [(i, e) for i, e in enumerate(finding.errors_by_step) if 0 < e < float("inf")]
        color = _series(buckets.index(bucket)) if finding.passed else PAINT["bad"]
        if points:
            text = bucket if finding.passed else f"{bucket} failed"
            axes.plot(*zip(*points, strict=True), color=color, label=text, marker="o", markersize=2)
        if points and finding.first_bad_step is not None:
            axes.axvline(finding.first_bad_step, color=color, linestyle=":", linewidth=1)
    if axes.lines:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-"))
        axes.minorticks_off()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
        _legend(figure, axes, "outside lower center")
    else:
        axes.text(0.5, 0.5, "identical at every step", ha="center", transform=axes.transAxes)
        axes.set(xticks=(), yticks=())
    return _svg(figure, name, "error against step")


@rc_context(STYLE)
def latency(timings: Sequence[Timing]) -> str:
    """A line per bucket from eager's time to each engine's and, where known, what padding to that bucket costs."""
    names = list(dict.fromkeys(timing.label for timing in timings))
    engines = list(dict.fromkeys(timing.engine for timing in timings))
    wastes = {timing.label: timing.waste for timing in timings if timing.waste is not None}
    figure = _figure(9.4, 1.3 + 0.42 * len(names))
    widths = [4, 1] if wastes else [1]
    axes, *beside = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    for timing in timings:
        y, color = names.index(timing.label), _series(engines.index(timing.engine))
        axes.plot([timing.eager_ms, timing.engine_ms], [y, y], color=PAINT["line"], linewidth=3, zorder=1)
        axes.plot(timing.eager_ms, y, "o", color=PAINT["muted"], markersize=6, label="eager")
        axes.plot(timing.engine_ms, y, "o", color=color, markersize=8, label=timing.engine)
        axes.annotate(
            f"{timing.speedup:.2f}x",
            (timing.engine_ms, y),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=PAINT["ink" if timing.speedup >= 1 else "bad"],
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.grid(axis="x")
    axes.set(xlabel="milliseconds a call", yticks=range(len(names)), yticklabels=names)
    axes.set_ylim(len(names) - 0.5, -0.7)
    _legend(figure, axes, "outside upper left")
    for other in beside:
        bars = other.barh([names.index(name) for name in wastes], list(wastes.values()), height=0.4)
        _finish_bars(other, bars, [f"{waste:.0%}" for waste in wastes.values()])
        other.set_xlabel("padding / useful work")
    return _svg(figure, "latency", "latency of engine and eager by bucket")


@rc_context(STYLE)
def sizes(parts: Sequence[Size]) -> str:
    """Largest on top; the smallest of many are one bar."""
    ordered = sorted(parts, key=lambda part: part.bytes)
    rest, shown = ordered[:-MOST_BARS], ordered[-MOST_BARS:]
    if rest:
        shown = [Size(name=f"{len(rest)} smaller ones", bytes=sum(part.bytes for part in rest)), *shown]
    figure = _figure(9.4, 0.6 + 0.3 * len(shown))
    axes = figure.add_subplot()
    bars = axes.barh([part.name for part in shown], [part.bytes for part in shown], height=0.6)
    _finish_bars(axes, bars, [_bytes(part.bytes) for part in shown])
    return _svg(figure, "sizes", "size of the artifact's parts")


@rc_context(STYLE)
def latent(times: Sequence[float], errors: Sequence[float], judged: Judged) -> str:
    """The latent error after each step, against what another seed changes and the bound of the last step."""
    figure = _figure(5.4, 3.3)
    axes = figure.add_subplot(title="latent error by step", xlabel="time of the schedule", ylabel="relative L2")
    points = [(time, error) for time, error in zip(times, errors, strict=True) if isfinite(error)]
    axes.plot(
        [time for time, _ in points], [error for _, error in points], color=_series(0), marker="o", markersize=3,
        label="candidate, from the reference",
    )  # fmt: skip
    band = [value for value in judged.band.values() if isfinite(value)]
    if band:
        axes.axhspan(min(band), max(band), color=PAINT["accent"], alpha=0.4, label="A/A band")
    _bound(axes, judged, PAINT["bad"])
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    _legend(figure, axes, "outside lower center")
    return _svg(figure, "latent", "latent error against step")


@rc_context(STYLE)
def trade(report: QualityReport) -> str:
    """What time buys: both sides' real-time factor against each word error rate; "" where none was scored."""
    rates = [item for item in report.measures if item.name.endswith("_wer")]
    if not rates:
        return ""
    figure = _figure(5.4, 3.3)
    axes = figure.add_subplot(title="time against words", xlabel="real-time factor, p50", ylabel="word error rate")
    for index, rate in enumerate(rates):
        own = list(rate.band.values())
        axes.plot([report.reference.rtf_p50] * len(own), own, "o", color=PAINT["muted"], label="reference, by seed")
        if isfinite(rate.value):
            axes.plot(
                report.candidate.rtf_p50, rate.value, "o", color=_series(index), markersize=8,
                label=f"candidate, {rate.name}",
            )  # fmt: skip
        _bound(axes, rate, _series(index))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    axes.grid(axis="y")
    _legend(figure, axes, "outside lower center")
    return _svg(figure, "trade", "real-time factor against word error rate")


def _bound(axes: Axes, judged: Judged, color: str) -> None:
    if isfinite(judged.bound):
        axes.axhline(judged.bound, color=color, linestyle=":", label=f"bound, {judged.name}")


def _finish_bars(axes: Axes, bars: BarContainer, texts: list[str]) -> None:
    for bar in bars:
        bar.set_facecolor(PAINT["accent"])
    axes.bar_label(bars, texts, padding=4, fontsize=8)
    axes.set_xticks(())
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    axes.tick_params(left=False)
    axes.spines["bottom"].set_visible(False)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
