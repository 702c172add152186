"""The pictures of rankings and of peaks over width; as `analysis.figures`."""

from collections.abc import Sequence

import altair as alt

from analysis.figures import TEXT, accuracy_domain, arm_scale, inline, svg
from analysis.result import CurvePoint, PeakArm, RankingResult


def ranking(found: RankingResult, width: int) -> str:
    """Mean test accuracy of every arm with its interval, in the claimed order; a line between tiers."""
    tier_of = {arm: tier for tier, arms in enumerate(found.tiers) for arm in arms}
    arms = [arm.normaliser for arm in found.arms]
    rows = [
        {
            "arm": arm.normaliser,
            "mean": None if arm.mean is None else arm.mean * 100,
            "low": arm.interval[0] * 100 if arm.interval else None,
            "high": arm.interval[1] * 100 if arm.interval else None,
            "starts": i > 0 and tier_of[arm.normaliser] != tier_of[found.arms[i - 1].normaliser],
        }
        for i, arm in enumerate(found.arms)
    ]
    y = alt.Y("arm:N", sort=arms, title=None, scale=alt.Scale(padding=0))
    y = y.axis(ticks=False, domain=False, labelOverlap=False)
    base = alt.Chart(inline(rows)).encode(y=y)
    title = ["Test accuracy (%)", "at the best learning rates"]
    x = alt.X("mean:Q", title=title if width < 400 else " ".join(title), scale=alt.Scale(zero=False, padding=14))
    x = x.axis(tickCount=max(4, width // 80))
    colour = arm_scale("color", arms)
    step = 30
    layers = alt.layer(
        base.transform_filter("datum.starts")
        .mark_rule(color=TEXT, opacity=0.45, strokeDash=[4, 3], yOffset=-step / 2)
        .encode(x=alt.value(0), x2=alt.value(width)),
        base.mark_rule(strokeWidth=3, strokeCap="round").encode(x="low:Q", x2="high:Q", color=colour),
        base.mark_point(filled=True, size=90, opacity=1).encode(x=x, color=colour, shape=arm_scale("shape", arms)),
    )
    chart = layers.properties(width=width, height=alt.Step(step))
    return svg(chart, "Mean test accuracy of each normaliser at its best learning rates, with intervals")


def widths(found: Sequence[PeakArm], width: int, height: int) -> str:
    """Mean test accuracy against width (log scale) with interval bands; a ring at each arm's highest."""
    arms = [arm.normaliser for arm in found]
    curves = [[CurvePoint(p.width, p.mean, p.interval, p.n) for p in arm.curve] for arm in found]
    domain = accuracy_domain(curves)
    rows = [
        {
            "arm": arm.normaliser,
            "width": point.width,
            "mean": point.mean * 100,
            "low": max(point.interval[0] * 100, domain[0]) if point.interval else None,
            "high": min(point.interval[1] * 100, domain[1]) if point.interval else None,
            "peak": point.width == arm.peak,
        }
        for arm in found
        for point in arm.curve
        if point.mean is not None
    ]
    levels = sorted({point.width for arm in found for point in arm.curve})
    x = alt.X(
        "width:Q",
        title="Width (units, log scale)",
        scale=alt.Scale(type="log", base=2, domain=[levels[0], levels[-1]], nice=False, padding=10),
        axis=alt.Axis(values=levels, format="d", labelOverlap="greedy", grid=False),
    )
    scale, title = alt.Scale(domain=list(domain), nice=False), "Test accuracy (%)"
    y = alt.Y("mean:Q", title=title, scale=scale)
    colour = arm_scale("color", arms)
    base = alt.Chart(inline(rows)).encode(x=x, color=colour)
    layers = alt.layer(
        base.mark_area(opacity=0.16).encode(y=alt.Y("low:Q", title=title, scale=scale), y2="high:Q"),
        base.mark_line(strokeWidth=2).encode(y=y),
        base.mark_point(filled=True, size=44, opacity=1).encode(y=y, shape=arm_scale("shape", arms)),
        base.transform_filter("datum.peak")
        .mark_point(filled=False, size=260, strokeWidth=2, opacity=1, shape="circle")
        .encode(y=y),
    )
    label = "Mean test accuracy against width for each named normaliser, at its best learning rates"
    return svg(layers.properties(width=width, height=height), label)
