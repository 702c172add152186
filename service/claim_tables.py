"""What the command line shows of rankings, peaks over width and geometry, and how it writes numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

MINUS = "−"


def claim_tables(hypothesis: Mapping[str, Any]) -> list[RenderableType]:
    """What was found for a claim that is not about slopes, per pair of arms or per arm; then an empty line."""
    rows: list[tuple[str, ...]]
    if found := hypothesis.get("ranking"):
        names = ("claimed", "found", "points", "interval", "p (Holm)", "seeds")
        rows = [
            (
                f"{pair['better']} > {pair['worse']}",
                pair["verdict"],
                points(pair["difference"]),
                interval(pair["interval"]),
                p_value(pair["p_holm"]),
                str(pair["n_seeds"]),
            )
            for pair in found["pairs"]
        ]
    elif found := hypothesis.get("width_peak"):
        names = ("normaliser", "found", "highest at", "from smallest", "to largest", "p (Holm)")
        rows = [
            (
                arm["normaliser"],
                arm["verdict"],
                "–" if arm["peak"] is None else str(arm["peak"]),
                points(arm["rise"]["difference"]),
                points(None if arm["fall"]["difference"] is None else -arm["fall"]["difference"]),
                p_value(arm["p_holm"]),
            )
            for arm in found["arms"]
        ]
    elif found := hypothesis.get("geometry"):
        names = ("normaliser", "found", "mean length", "deviation", "directions", "trials")
        rows = [
            (
                arm["normaliser"],
                arm["verdict"],
                *("–" if arm[k] is None else f"{arm[k]:.3f}" for k in ("norm_mean", "norm_sd", "directions")),
                str(arm["n_trials"]),
            )
            for arm in found["arms"]
        ]
    else:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(Text(row[0], "bold"), *(Text(cell) for cell in row[1:]))
    return [Text(f"Claim {hypothesis['index'] + 1}: {hypothesis['claim']}", "dim"), table, ""]


def points(value: float | None) -> str:
    """A slope in percentage points, signed: −0.0073 is "−0.73"; as the report writes it."""
    if value is None:
        return "–"
    text = f"{value * 100:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", MINUS)


def interval(bounds: Sequence[float] | None) -> str:
    return "–" if bounds is None else f"{points(bounds[0])} to {points(bounds[1])}"


def p_value(value: float | None) -> str:
    if value is None:
        return "–"
    return "<0.0001" if value < 0.00005 else f"{value:.4f}"
