"""Write what `docs/results/` shows of a study that has ended: a table of its cells, its verdict, and figures.

    .venv/bin/python docs/result_page.py STUDY_FOLDER NAME     # writes docs/results/NAME/

STUDY_FOLDER is the study's folder in the service's storage (spec.json, analysis/results.parquet,
analysis/verdict.json). The page docs/results/NAME.md is written by people, from these numbers.
"""

import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from analysis import figures
from analysis.study import analyse
from trials.spec import parse_document, parse_spec

RESULTS = Path(__file__).with_name("results")
AXES = ["normaliser", "batch_size", "learning_rate"]


def main(study: Path, name: str) -> None:
    folder = RESULTS / name
    folder.mkdir(parents=True, exist_ok=True)
    table = pq.read_table(study / "analysis" / "results.parquet")
    spec = parse_spec(parse_document((study / "spec.json").read_bytes(), "json"))
    (folder / "verdict.json").write_bytes((study / "analysis" / "verdict.json").read_bytes())
    cells(table.to_pandas()).to_csv(folder / "cells.csv", index=False, float_format="%.5g")

    analysis = analyse(table, spec)
    arms = [arm.normaliser for arm in analysis.arms]
    label = "Mean test accuracy against batch size for each normaliser"
    series = [(arm.normaliser, arm.curve) for arm in analysis.arms]
    domain = figures.accuracy_domain([curve for _, curve in series])
    (folder / "accuracy.svg").write_text(figures.curves(series, arms, domain, 660, 340, label))
    (folder / "slopes.svg").write_text(figures.slopes(analysis, 620))
    rate_domain = figures.accuracy_domain([rate.curve for arm in analysis.arms for rate in arm.by_learning_rate])
    for i, rate in enumerate(analysis.arms[0].by_learning_rate):
        within = [(arm.normaliser, arm.by_learning_rate[i].curve) for arm in analysis.arms]
        text = figures.curves(within, arms, rate_domain, 440, 240, f"{label}, learning rate {rate.learning_rate:g}")
        (folder / f"accuracy-lr-{rate.learning_rate:g}.svg").write_text(text)


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per cell: seeds, diverged, mean and standard deviation over seeds; probes of the first map at the end."""
    for probe in ("divergence_mean", "alignment", "update_gain", "interference"):
        rows[probe] = [last[-1][0] if last is not None and len(last) else None for last in rows[f"probe_{probe}"]]
    rows["diverged"] = rows["state"] == "diverged"
    groups = rows.groupby(AXES, sort=True)
    return pd.DataFrame(
        {
            "seeds": groups["seed"].count(),
            "diverged": groups["diverged"].sum(),
            "test_accuracy_mean": groups["test_accuracy"].mean(),
            "test_accuracy_sd": groups["test_accuracy"].std(),
            "validation_accuracy_mean": groups["validation_accuracy"].mean(),
            "train_loss_mean": groups["train_loss"].mean(),
            **{
                f"first_map_{probe}": groups[probe].mean()
                for probe in ("divergence_mean", "alignment", "update_gain", "interference")
            },
        }
    ).reset_index()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
