"""What the terminal shows, from a real analysis and from studies in every state."""

import io
from typing import Any, cast

import pytest
from rich.console import Console, RenderableType

from service import rendering
from service.client_types import Study


def study(state: str = "RUNNING", done: int = 96, **changes: Any) -> Study:
    progress = {
        "trials_total": 720,
        "trials_done": done,
        "packs_total": 36,
        "packs_done": done // 20,
        "states": {"succeeded": done},
        "trials_per_second": 24.13,
        "seconds_left": 26.2,
    }
    values: dict[str, Any] = {
        "id": "s0123456789ab",
        "name": "a study [bold]",
        "description": "What it is for.",
        "state": state,
        "reason": None,
        "created_at": "2026-12-01T10:00:00Z",
        "started_at": "2026-12-01T10:00:05+00:00",
        "ended_at": "2026-12-01T10:03:25Z",
        "attempt": 1,
        "plan": {"trials": 720, "cells": 144, "packs": 36, "cost": {"samples": 1, "updates": 1, "core_seconds": 3700}},
        "progress": progress,
        "tracking": "current",
        "verdict": [{"hypothesis": 0, "verdict": "supported"}],
        "links": {
            "self": "/v1/studies/s0123456789ab",
            "report": "/r",
            "ray_job": "http://ray/#/j",
            "mlflow_experiment": "http://mlflow/#/experiments/1",
        },
    }
    return cast(Study, values | changes)


def shown(what: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return cast(io.StringIO, console.file).getvalue()


ARM = {
    "normaliser": "affine_like",
    "verdict": "negative",
    "slope": -0.00734,
    "interval": [-0.0081, -0.0064],
    "alpha": 0.05,
    "p_holm": 0.0006,
    "n_trials": 120,
    "reason": "",
    "sensitive_to_diverged": False,
}
UNKNOWN = {
    "normaliser": "batch_norm",
    "verdict": "undecided",
    "slope": None,
    "interval": None,
    "alpha": 0.05,
    "p_holm": None,
    "n_trials": 24,
    "reason": "one seed: no interval can be computed",
    "sensitive_to_diverged": True,
}


@pytest.mark.parametrize("width", [80, 120])
def test_the_verdict_is_whole_on_a_narrow_terminal(width: int):
    analysis = {"arms": [ARM, UNKNOWN], "hypotheses": [{"verdict": "supported", "sentence": "Supported: it falls."}]}
    text = shown(rendering.verdict(analysis), width)
    assert "affine_like   ▼ negative" in text
    assert "−0.73   −0.81 to −0.64     0.0006   120" in text
    assert "95 % interval" in text
    assert "batch_norm: one seed: no interval can be computed" in text
    assert "† another verdict" in text
    assert "✓ Supported: it falls." in text
    assert "…" not in text


def test_arms_that_differ_between_learning_rates_are_marked():
    mixed = ARM | {"normaliser": "none", "verdict": "positive", "mixed_over_learning_rates": True}
    both = mixed | {"normaliser": "rms_norm", "sensitive_to_diverged": True}
    text = shown(rendering.verdict({"arms": [ARM, mixed, both], "hypotheses": []}), 80)
    assert "▲ positive ‡" in text
    assert "▲ positive † ‡" in text
    assert "▼ negative ‡" not in text
    assert text.count("‡ accuracy falls at some learning rates and rises at others; see the report") == 1
    assert "‡" not in shown(rendering.verdict({"arms": [ARM, UNKNOWN], "hypotheses": []}), 80)


@pytest.mark.parametrize(
    ("state", "done", "line"),
    [
        ("RUNNING", 96, "running: 96 of 720 trials · 24.1 trials/s · 26 s left"),
        ("RUNNING", 720, "running: 720 of 720 trials · sending the last results to MLflow"),
        ("QUEUED", 0, "queued: 0 of 720 trials"),
        ("RUNNING", 0, "running: 0 of 720 trials · training the first packs"),
        ("RUNNING", 20, "running: 20 of 720 trials · 24.1 trials/s"),
        ("RUNNING", 40, "running: 40 of 720 trials · 24.1 trials/s · 26 s left"),
    ],
)
def test_progress_line(state: str, done: int, line: str):
    assert rendering.progress_line(study(state, done)) == line


def test_what_is_said_before_there_is_a_pace():
    links = {"mlflow_experiment": None}
    assert rendering.pace(study(done=0, links=links)) == "starting"
    assert rendering.pace(study(done=0, links=links, reason="Ray is starting the job.")) == "Ray is starting the job."
    assert rendering.pace(study("QUEUED", 0, reason="waiting for its turn")) == "waiting for its turn"
    resumed = study(done=100)
    resumed["progress"]["trials_per_second"] = resumed["progress"]["seconds_left"] = None
    assert rendering.pace(resumed) == "training the next packs"
    assert rendering.pace(study("CANCELLING", 0)) == ""


def test_each_phase_gets_its_line():
    console = Console(file=io.StringIO(), width=100)
    with rendering.ProgressView(console) as view:
        for reason, links in [("Ray is starting the job.", {}), (None, {}), (None, {}), (None, study()["links"])]:
            view(study(done=0, reason=reason, links=links))
        view(study(done=20))
    lines = cast(io.StringIO, console.file).getvalue().splitlines()
    assert [line.split(" · ")[1] for line in lines] == [
        "Ray is starting the job.",
        "starting",
        "training the first packs",
    ]


def test_no_terminal_gets_few_lines():
    console = Console(file=io.StringIO(), width=100)
    with rendering.ProgressView(console) as view:
        for done in range(0, 700, 10):
            view(study(done=done))
        view(study("ANALYSING", 720))
        view(study("ANALYSING", 720))
    lines = cast(io.StringIO, console.file).getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["running", "analysing"]


def test_a_terminal_gets_a_bar_that_goes_away():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with rendering.ProgressView(console) as view:
        view(study())
    assert "96/720 trials" in cast(io.StringIO, console.file).getvalue()


def test_how_it_ended():
    assert "✓ a study [bold] completed in 3 min 20 s · 720 trials: 96 succeeded" in shown(
        rendering.headline(study("COMPLETED"))
    )
    failed = shown(
        rendering.headline(study("FAILED", reason="unschedulable: 9 cores asked, 2 there", tracking="delayed"))
    )
    assert "✗ a study [bold] failed after 3 min 20 s" in failed
    assert "unschedulable: 9 cores asked, 2 there" in failed
    assert "MLflow does not have all of it yet" in failed
    assert "MLflow" not in shown(rendering.headline(study("FAILED", 0, tracking="delayed")))


def test_links_are_whole_addresses():
    text = shown(rendering.links(study(), "http://127.0.0.1:8080"))
    assert "http://127.0.0.1:8080/v1/studies/s0123456789ab" in text
    assert "http://ray/#/j" in text
    assert "http://mlflow/#/experiments/1" in text
    assert "MLflow" not in shown(rendering.links(study(links={"mlflow_experiment": None}), "http://127.0.0.1:8080"))


def test_the_report_is_listed_once_there_is_one():
    def listed(*arguments: Any, **changes: Any) -> bool:
        return "http://127.0.0.1:8080/r\n" in shown(
            rendering.links(study(*arguments, **changes), "http://127.0.0.1:8080")
        )

    assert listed("COMPLETED")
    assert listed("CANCELLED", verdict=[])  # analysed, and it states no hypothesis
    assert not listed("RUNNING")
    assert not listed("FAILED", verdict=None)


def test_a_verdict_on_part_of_the_plan_is_called_provisional():
    said = "Provisional: 30 of 72 planned trials have no result (30 cancelled)."
    analysis = {"arms": [ARM], "hypotheses": [], "provisional": said}
    assert shown(rendering.verdict(analysis), 80).splitlines()[1] == said
    assert "Provisional" not in shown(rendering.verdict({**analysis, "provisional": None}), 80)


def test_waiting_is_said_once_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=100)
    with rendering.waiting(console, "waiting for it"):
        pass
    assert cast(io.StringIO, console.file).getvalue() == "waiting for it\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10 s"), (59.7, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_duration(seconds: float, text: str):
    assert rendering.duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (-0.00004, "0.00"), (0.0123, "+1.23"), (-0.1, "−10.00")])
def test_points_are_written_as_in_the_report(value: float | None, text: str):
    from analysis.wording import points

    assert rendering.points(value) == points(value) == text
