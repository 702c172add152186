"""The self-contained HTML report: one file, no request to anywhere.

Its numbers are those of `StudyAnalysis.to_dict()`, formatted by `analysis.wording`.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import pyarrow as pa
from markupsafe import Markup

from analysis import wording
from analysis.result import StudyAnalysis
from analysis.table import read_outcomes
from trials.records import TrialState, channels_text
from trials.spec import StudySpec

MOST_RATE_PANELS = 24
"""Most learning rates drawn one by one; the report says how many it leaves out."""


def render_report(analysis: StudyAnalysis, table: pa.Table, spec: StudySpec, provenance: Mapping[str, Any]) -> str:
    """
    Args:
        analysis: what `analyse(table, spec)` returned.
        provenance: what else the reader should know of how the numbers came about (versions,
            host, times), printed as it is; values may be nested mappings or lists.
    """
    from analysis import claim_figures, figures  # altair, only where something is drawn

    arms = [arm.normaliser for arm in analysis.arms]
    has_slopes = len(spec.space.batch_size) > 1
    drawings = {}
    for h in analysis.hypotheses:
        if h.ranking:
            drawings[h.index] = tuple(claim_figures.ranking(h.ranking, width) for width in (560, 200))
        elif h.width_peak:
            sizes = (600, 320), (figures.PANEL_WIDTH - 20, 260)
            drawings[h.index] = tuple(claim_figures.widths(h.width_peak.arms, *size) for size in sizes)
    whole = [(arm.normaliser, arm.curve) for arm in analysis.arms]
    domain = figures.accuracy_domain([curve for _, curve in whole])
    rate_curves = [rate.curve for arm in analysis.arms for rate in arm.by_learning_rate]
    rate_domain = figures.accuracy_domain(rate_curves)
    rates = [rate.learning_rate for rate in analysis.arms[0].by_learning_rate]
    label = "Mean test accuracy against batch size for each normaliser"
    rate_panels = []
    for i, rate in enumerate(rates[:MOST_RATE_PANELS] if has_slopes else []):
        series = [(arm.normaliser, arm.by_learning_rate[i].curve) for arm in analysis.arms]
        title = "no learning rate recorded" if rate is None else f"learning rate {rate:g}"
        picture = figures.curves(series, arms, rate_domain, figures.PANEL_WIDTH, 190, f"{label}, {title}")
        rate_panels.append(figures.Panel(title.capitalize(), picture))
    slopes: dict[str, str] = {}
    if has_slopes:
        slopes = {
            "forest_wide": figures.slopes(analysis, 620),
            "forest_narrow": figures.slopes(analysis, 220),
            "curves_wide": figures.curves(whole, arms, domain, 660, 340, label),
            "curves_narrow": figures.curves(whole, arms, domain, figures.PANEL_WIDTH, 280, label),
        }
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            analysis=analysis.to_dict(),
            description=spec.description,
            trials_run=table.num_rows,
            drawings=drawings,
            has_slopes=has_slopes,
            **slopes,
            rate_panels=rate_panels,
            rates_hidden=max(0, len(rates) - MOST_RATE_PANELS),
            heat=figures.heat_maps(read_outcomes(table, spec)),
            ramp=", ".join(figures.VIRIDIS),
            colours=figures.colour_of(arms),
            shapes=figures.shape_of(arms),
            states=[str(state) for state in TrialState],
            facts=_facts(spec, provenance),
            spec_text=json.dumps(json.loads(spec.canonical_json()), indent=2, ensure_ascii=False),
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (
        *(wording.points, wording.points_interval, wording.band, wording.percent, wording.probability),
        *(wording.correlation, wording.level, wording.listed, wording.budget_text, wording.budget_caution),
    ):
        environment.filters[function.__name__] = function
    environment.filters["decimals"] = lambda value: "–" if value is None else f"{value:.3f}"
    environment.filters["negated"] = lambda value: None if value is None else -value
    environment.filters["drawing"] = _drawing
    environment.filters["rate_name"] = lambda rate: "–" if rate is None else f"{rate:g}"
    environment.globals.update(counted=wording.counted)
    return environment


def _drawing(svg: str, kind: str = "") -> Markup:
    """A picture of ours, to be put in as it is; `kind` is a further class: `wide` or `narrow` screens."""
    return Markup(svg.replace('class="marks"', f'class="{kind or "marks"}"', 1))  # noqa: S704 - drawn by vl-convert, which escapes texts


def _facts(spec: StudySpec, provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the study was, then what the caller knows of how it was run."""
    data = spec.data.dataset + (f" ({spec.data.path})" if spec.data.path else "")
    if spec.data.train_samples:
        data += f", {spec.data.train_samples} training samples"
    axes = spec.axes()
    is_cnn = spec.model.kind == "cnn"
    of_model = ("channels", "kernel", "stride", "pooling") if is_cnn else ("depth", "width")
    model = f"{spec.model.kind}, "
    model += ", ".join(
        f"{axis} {wording.listed([_level(level) for level in axes[axis]])}"
        for axis in (*of_model, "activation", "placement", "gain")
        if axis not in ("placement", "gain") or axes[axis] not in (["pre"], [False])
    )
    budget = spec.training.budget.model_dump(exclude_none=True)
    optimiser = wording.listed(axes["optimiser"])
    if axes["weight_decay"] != [0.0]:
        optimiser += f", weight decay {wording.listed([f'{decay:g}' for decay in axes['weight_decay']])}"
    seeds = spec.seed_list
    shown = wording.listed([str(s) for s in seeds]) if len(seeds) <= 12 else f"{len(seeds)}, {seeds[0]} … {seeds[-1]}"
    facts = [
        ("Spec hash", spec.content_hash()),
        ("Design", spec.design),
        ("Budget", f"by {next(iter(budget))}: {wording.budget_text(budget)} for every trial"),
        ("Data set", data),
        ("Model", model),
        ("Optimiser", f"{optimiser}; a last batch that is too small: {spec.training.last_batch}"),
        ("Batch sizes", wording.listed([str(b) for b in spec.space.batch_size])),
        ("Learning rates", wording.listed([f"{rate:g}" for rate in spec.space.learning_rate])),
        ("Seeds", shown),
    ]
    said = {name for name, _ in facts}
    return facts + [(name, text) for name, text in _flat(provenance) if name not in said]


def _level(level: Any) -> str:
    if isinstance(level, bool):
        return "yes" if level else "no"
    return channels_text(level) or "" if isinstance(level, list) else str(level)


def _flat(value: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{above} {key}".strip().replace("_", " ")
        if isinstance(item, Mapping):
            found += _flat(item, name)
        elif item is not None:
            text = wording.listed([str(part) for part in item]) if isinstance(item, list | tuple) else str(item)
            found.append((name[:1].upper() + name[1:], text))
    return found
