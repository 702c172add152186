"""The report's figures: Vega-Lite by altair, rendered to inline SVG by vl-convert, offline.

Each panel is a small picture of its own, so that a page lays them out side by side or, on a narrow
screen, one below the other at full size. Text and axes take the page's text colour (light or dark);
arms have a colour and a shape each: the first six Okabe & Ito's colour-blind-safe colours, the others
such that colour and shape together tell any two arms apart.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import altair as alt
import numpy as np
import vl_convert

from analysis.result import CurvePoint, StudyAnalysis, rounded
from analysis.table import Outcomes
from trials.spec import Normaliser

COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),  # Okabe & Ito
    *("#7A5FC4", "#8C8C8C", "#9A6324", "#B5BD00", "#B0244F", "#00A6A6"),
)
SHAPES = (
    *("circle", "square", "triangle-up", "diamond", "cross", "triangle-down"),
    "M-1 0L0.9 -1V1Z",  # SVG paths of points in -1 … 1: a triangle to the left
    "M1 0L-0.9 -1V1Z",  # and to the right
    "M-1 -0.6L-0.6 -1L0 -0.4L0.6 -1L1 -0.6L0.4 0L1 0.6L0.6 1L0 0.4L-0.6 1L-1 0.6L-0.4 0Z",  # ×
    "M0 -1.3L0.32 -0.32L1.3 0L0.32 0.32L0 1.3L-0.32 0.32L-1.3 0L-0.32 -0.32Z",  # a star
    "M-1 -1L1 1V-1L-1 1Z",  # a bow tie
    "M-1.2 -0.45H1.2V0.45H-1.2Z",  # a bar
)
_NORMALISERS = get_args(Normaliser)
VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")

PANEL_WIDTH = 300
"""Width of a small panel's plot, in CSS pixels; with its axes it fits a 400-pixel screen."""

TEXT = "currentColor"
_CONFIG: dict[str, Any] = {
    "font": "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif",
    "background": "transparent",
    "view": {"stroke": None},
    "padding": {"left": 12, "top": 6, "right": 12, "bottom": 6},  # a browser's font may be wider than the one measured
    "axis": {
        "labelColor": TEXT,
        "titleColor": TEXT,
        "domainColor": TEXT,
        "tickColor": TEXT,
        "gridColor": TEXT,
        "gridOpacity": 0.12,
        "domainOpacity": 0.5,
        "tickOpacity": 0.5,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelPadding": 4,
    },
}


@dataclass(frozen=True)
class Panel:
    """One picture and its heading."""

    title: str
    svg: str


def colour_of(arms: Sequence[str]) -> dict[str, str]:
    """A normaliser has the same colour in every study, whatever others are beside it."""
    return {arm: COLOURS[_NORMALISERS.index(arm)] for arm in arms}


def shape_of(arms: Sequence[str]) -> dict[str, str]:
    """As `colour_of`."""
    return {arm: SHAPES[_NORMALISERS.index(arm)] for arm in arms}


def slopes(analysis: StudyAnalysis, width: int) -> str:
    """Slope per doubling of every arm with its interval, over the arm's zone of flatness."""
    arms = [arm.normaliser for arm in analysis.arms]
    rows = [
        {
            "arm": arm.normaliser,
            "slope": None if arm.slope is None else arm.slope * 100,
            "low": arm.interval[0] * 100 if arm.interval else None,
            "high": arm.interval[1] * 100 if arm.interval else None,
            "zone_low": -arm.smallest_slope * 100,
            "zone_high": arm.smallest_slope * 100,
        }
        for arm in analysis.arms
    ]
    y = alt.Y("arm:N", sort=arms, title=None, scale=alt.Scale(padding=0), axis=alt.Axis(ticks=False, domain=False))
    base = alt.Chart(inline(rows)).encode(y=y)
    title = ["Change in test accuracy", "(percentage points per", "doubling of batch size)"]
    x = alt.X(
        "slope:Q",
        title=title if width < 400 else " ".join(title),
        scale=alt.Scale(padding=14),
        axis=alt.Axis(tickCount=max(4, width // 80)),
    )
    colour = arm_scale("color", arms)
    layers = alt.layer(
        base.mark_bar(opacity=0.13, color=TEXT, height=alt.RelativeBandSize(1.0)).encode(
            x="zone_low:Q", x2="zone_high:Q"
        ),
        base.mark_rule(color=TEXT, opacity=0.6).encode(x=alt.datum(0)),
        base.mark_rule(strokeWidth=3, strokeCap="round").encode(x="low:Q", x2="high:Q", color=colour),
        base.mark_point(filled=True, size=90, opacity=1).encode(x=x, color=colour, shape=arm_scale("shape", arms)),
    )
    chart = layers.properties(width=width, height=alt.Step(30))
    return svg(chart, "Slope of test accuracy per doubling of batch size, with intervals, for each normaliser")


def curves(
    series: Sequence[tuple[str, Sequence[CurvePoint]]],
    arms: Sequence[str],
    domain: tuple[float, float],
    width: int,
    height: int,
    label: str,
) -> str:
    """Mean test accuracy against batch size for several arms, with interval bands.

    Args:
        series: pairs (arm, curve).
        arms: all arms of the study, which fix colours and shapes.
        domain: limits of the accuracy axis, in percent, shared by panels that are to be compared.
    """
    rows = [
        {
            "arm": arm,
            "batch": point.batch_size,
            "mean": point.mean * 100,
            "low": max(point.interval[0] * 100, domain[0]) if point.interval else None,
            "high": min(point.interval[1] * 100, domain[1]) if point.interval else None,
        }
        for arm, curve in series
        for point in curve
        if point.mean is not None
    ]
    levels = sorted({point.batch_size for _, curve in series for point in curve})
    ends = [levels[0], levels[-1]] if len(levels) > 1 else [levels[0] / 2, levels[0] * 2]
    x = alt.X(
        "batch:Q",
        title="Batch size (samples, log scale)",
        scale=alt.Scale(type="log", base=2, domain=ends, nice=False, padding=10),
        axis=alt.Axis(values=levels, format="d", labelOverlap="greedy", grid=False),
    )
    scale = alt.Scale(domain=list(domain), nice=False)
    title = "Test accuracy (%)"
    y = alt.Y("mean:Q", title=title, scale=scale)
    base = alt.Chart(inline(rows)).encode(x=x, color=arm_scale("color", arms))
    layers = alt.layer(
        base.mark_area(opacity=0.16).encode(y=alt.Y("low:Q", title=title, scale=scale), y2="high:Q"),
        base.mark_line(strokeWidth=2).encode(y=y),
        base.mark_point(filled=True, size=44, opacity=1).encode(y=y, shape=arm_scale("shape", arms)),
    )
    return svg(layers.properties(width=width, height=height), label)


def accuracy_domain(curves: Sequence[Sequence[CurvePoint]]) -> tuple[float, float]:
    """Limits in percent that hold every mean, and intervals as far as a sixth of the means' range beyond them.

    Wider intervals (two seeds, diverged trials) are cut at the edge, so that they do not flatten the means.
    """
    means = [p.mean for curve in curves for p in curve if p.mean is not None]
    if not means:
        return 0.0, 100.0
    ends = [end for curve in curves for p in curve if p.interval for end in p.interval]
    spread = max(max(means) - min(means), 0.02)
    low = max(min(means + ends), min(means) - spread / 6) - 0.04 * spread
    high = min(max(means + ends), max(means) + spread / 6) + 0.04 * spread
    return 100 * max(0.0, low), 100 * min(1.0, high)


@dataclass(frozen=True)
class HeatMaps:
    """One panel per arm, on the common colour scale `low` … `high` (accuracies).

    The scale spans the cells without diverged trials, where there are such: trials at chance would
    take all of it. Cells below it have its lowest colour.
    """

    panels: tuple[Panel, ...]
    low: float
    high: float
    any_diverged: bool


def heat_maps(outcomes: Outcomes) -> HeatMaps | None:
    """Mean test accuracy over seeds (and other axes) per learning rate × batch size; diverged at chance.

    None where no trial has an outcome.
    """
    rates = list(dict.fromkeys(s.learning_rate for s in outcomes.strata))
    values, diverged = outcomes.under("chance"), np.isfinite(outcomes.at_chance)
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in outcomes.arms}
    for a, arm in enumerate(outcomes.arms):
        for rate in rates:
            strata = [i for i, s in enumerate(outcomes.strata) if s.learning_rate == rate]
            for b, batch_size in enumerate(outcomes.levels):
                cell = values[a, strata, :, b]
                if np.isfinite(cell).any():
                    mean = rounded(cell[np.isfinite(cell)].mean()) or 0.0
                    lost = bool(diverged[a, strata, :, b].any())
                    rows[arm].append({"rate": _rate(rate), "batch": batch_size, "mean": mean * 100, "diverged": lost})
    means = [row["mean"] for cells in rows.values() for row in cells]
    if not means:
        return None
    clean = [row["mean"] for cells in rows.values() for row in cells if not row["diverged"]]
    low, high = min(clean or means), max(means)
    order = [_rate(rate) for rate in reversed(rates)]
    panels = [
        Panel(arm, _heat_map(arm, cells, order, outcomes.levels, low, high)) for arm, cells in rows.items() if cells
    ]
    return HeatMaps(tuple(panels), low / 100, high / 100, any_diverged=len(clean) < len(means))


def _heat_map(
    arm: str, rows: list[dict[str, Any]], rates: list[str], levels: Sequence[int], low: float, high: float
) -> str:
    best = max(rows, key=lambda row: row["mean"])
    span = (high - low) or 1.0
    rows = [
        row | {"text": "#000" if (row["mean"] - low) / span > 0.55 else "#fff", "best": row is best} for row in rows
    ]
    scale = alt.Scale(domain=[low, high] if high > low else [low - 1, high + 1], range=list(VIRIDIS), clamp=True)
    x = alt.X("batch:O", sort=list(levels), title="Batch size (samples)", scale=alt.Scale(domain=list(levels)))
    x = x.axis(labelAngle=0, labelOverlap="greedy", ticks=False, domain=False)
    y = alt.Y("rate:N", sort=rates, title="Learning rate", scale=alt.Scale(domain=rates))
    y = y.axis(ticks=False, domain=False)
    base = alt.Chart(inline(rows)).encode(x=x, y=y)
    layers: list[alt.Chart] = [
        base.mark_rect(cornerRadius=2, stroke=None).encode(color=alt.Color("mean:Q", scale=scale, legend=None))
    ]
    if len(levels) <= 8:
        text = base.mark_text(fontSize=11).encode(
            text=alt.Text("mean:Q", format=".1f"), color=alt.Color("text:N", scale=None, legend=None)
        )
        layers.append(text)
    if any(row["diverged"] for row in rows):
        mark = base.transform_filter("datum.diverged").mark_point(
            shape="cross",
            angle=45,
            size=36,
            filled=True,
            opacity=1,
            xOffset=PANEL_WIDTH / len(levels) / 2 - 7,
            yOffset=-10,
        )
        layers.append(mark.encode(color=alt.Color("text:N", scale=None, legend=None)))
    ring = base.transform_filter("datum.best").mark_rect(filled=False, stroke=TEXT, strokeWidth=2.5, cornerRadius=2)
    chart = alt.layer(*layers, ring).resolve_scale(color="independent")
    chart = chart.properties(width=PANEL_WIDTH, height=alt.Step(34 if len(rates) <= 12 else 16))
    return svg(chart, f"Mean test accuracy of {arm} per learning rate and batch size")


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:g}"


def arm_scale(channel: str, arms: Sequence[str]) -> Any:
    """Colour or shape by arm: the same in every figure; the page has the legend."""
    if channel == "color":
        return alt.Color("arm:N", scale=alt.Scale(domain=list(arms), range=list(colour_of(arms).values())), legend=None)
    return alt.Shape("arm:N", scale=alt.Scale(domain=list(arms), range=list(shape_of(arms).values())), legend=None)


def inline(rows: list[dict[str, Any]]) -> Any:
    """The rows, within the picture."""
    return alt.InlineData(values=rows)


def svg(chart: Any, label: str) -> str:
    """The chart drawn; `label` is read to who cannot see it."""
    spec = chart.to_dict()
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    text = vl_convert.vegalite_to_svg(spec, vl_version=version, config=_CONFIG, allowed_base_urls=[])
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)  # implied within HTML
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', text, count=1)
