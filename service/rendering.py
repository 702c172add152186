"""What the command line shows: one look for `demo`, `submit`, `watch`, `show` and `ls`."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any
from urllib.parse import urljoin

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from service.claim_tables import claim_tables, interval, p_value, points
from service.client import ENDED, is_tracking_late
from service.client_types import Fault, Plan, PresetItem, Study

PLAIN_PAUSE_SECONDS = 5.0
"""Least time between two progress lines where the output is not a terminal."""

PACKS_FOR_AN_ESTIMATE = 2
"""Before that many packs have ended, the time left would be a guess from the start-up alone."""

STATE_STYLES = {
    "QUEUED": "dim",
    "RUNNING": "cyan",
    "ANALYSING": "cyan",
    "CANCELLING": "yellow",
    "COMPLETED": "green",
    "FAILED": "red",
    "CANCELLED": "yellow",
}
"""States of planned trials that tell nothing of the question: a diverged one does."""

ARM_SIGNS = {"negative": "▼", "positive": "▲", "flat": "■", "undecided": "·"}
ANSWERS = {"supported": ("✓", "green"), "contradicted": ("✗", "red"), "undecided": ("?", "yellow")}


class ProgressView:
    """Follows a study: a bar on a terminal, else a line at most every few seconds.

    Use as a context manager; call with the study as often as it is looked at.
    """

    def __init__(self, console: Console):
        self._console = console
        self._last = ("", -1)
        self._last_phase = ""
        self._last_time = float("-inf")
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(style="cyan"),
                TextColumn("{task.description:<9}"),
                BarColumn(bar_width=28, complete_style="cyan", finished_style="green"),
                TextColumn("{task.completed:.0f}/{task.total:.0f} trials"),
                TextColumn("[dim]{task.fields[pace]}"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=1, pace="")

    def __enter__(self) -> "ProgressView":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, study: Study) -> None:
        progress = study["progress"]
        if self._bar is not None:
            self._bar.update(
                self._task,
                description=study["state"].lower(),
                completed=progress["trials_done"],
                total=max(1, progress["trials_total"]),
                pace=pace(study),
            )
            return
        now, here = time.monotonic(), (study["state"], progress["trials_done"])
        new_phase = (new := phase(study)) not in ("", self._last_phase)
        new_state = here[0] != self._last[0]
        if new_state or new_phase or (here != self._last and now - self._last_time >= PLAIN_PAUSE_SECONDS):
            self._last, self._last_time, self._last_phase = here, now, new
            self._console.print(Text(progress_line(study)))


def progress_line(study: Study) -> str:
    """running: 96 of 720 trials · 24.1 trials/s · 26 s left"""
    progress = study["progress"]
    parts = [f"{progress['trials_done']} of {progress['trials_total']} trials", pace(study)]
    return f"{study['state'].lower()}: " + " · ".join(part for part in parts if part)


def pace(study: Study) -> str:
    """24.1 trials/s · 26 s left; before that is known, what the study does or waits for."""
    progress = study["progress"]
    if words := phase(study):
        return words
    if study["state"] != "RUNNING":
        return ""
    if progress["trials_done"] == progress["trials_total"]:
        return "sending the last results to MLflow"
    parts: list[str] = []
    if progress["trials_per_second"] is not None:
        parts.append(f"{progress['trials_per_second']:.3g} trials/s")
    if progress["seconds_left"] is not None and progress["packs_done"] >= PACKS_FOR_AN_ESTIMATE:
        parts.append(f"{duration(progress['seconds_left'])} left")
    return " · ".join(parts) or (study["reason"] or "")


def phase(study: Study) -> str:
    """What a study does or waits for before its (present attempt's) first pack has ended, else empty."""
    progress = study["progress"]
    if study["state"] == "QUEUED":
        return study["reason"] or ""
    has_pace = progress["packs_done"] > 0 and progress["trials_per_second"] is not None
    if study["state"] != "RUNNING" or has_pace or progress["trials_done"] == progress["trials_total"]:
        return ""
    if study["reason"]:
        return study["reason"]
    if not study["links"].get("mlflow_experiment"):  # the first thing that the study's driver makes
        return "starting"
    return "training the next packs" if progress["packs_done"] else "training the first packs"


@contextlib.contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Within: say what is waited for, on a terminal only for as long as it takes."""
    if console.is_terminal:
        with console.status(Text(what, "dim"), spinner_style="cyan"):
            yield
    else:
        console.print(Text(what, "dim"))
        yield


def outcome(study: Study, analysis: Mapping[str, Any] | None) -> RenderableType:
    """How a study ended: its state and counts, the verdict per normaliser, the hypotheses' answers."""
    return Group("", headline(study), verdict(analysis) if analysis is not None else "")


def verdict(analysis: Mapping[str, Any]) -> RenderableType:
    """The verdict per normaliser, and the answer to each hypothesis."""
    lacking = analysis.get("provisional")
    warning = [Text(lacking, "bold yellow"), ""] if lacking else []
    slopes = [verdict_table(analysis), "", remarks(analysis), ""] if _has_slopes(analysis) else []
    claims = [part for h in analysis["hypotheses"] for part in claim_tables(h)]
    return Group("", *warning, *slopes, *claims, answers(analysis))


def _has_slopes(analysis: Mapping[str, Any]) -> bool:
    """Whether the study has two batch sizes or more."""
    return not all(len(arm.get("curve", ())) == 1 for arm in analysis["arms"])


def headline(study: Study) -> Text:
    """✓ batch-size-digits completed in 48 s · 720 trials: 712 succeeded, 8 diverged"""
    state = study["state"]
    sign = {"COMPLETED": "✓", "FAILED": "✗", "CANCELLED": "■"}.get(state, "·")
    text = Text.assemble((f"{sign} ", STATE_STYLES.get(state, "")), (study["name"], "bold"))
    text.append(f" {state.lower()}", STATE_STYLES.get(state, ""))
    taken = seconds_between(study["started_at"], study["ended_at"])
    if taken is not None and state in ENDED:
        text.append(f" {'in' if state == 'COMPLETED' else 'after'} {duration(taken)}")
    text.append(f" · {counts(study)}")
    if study["reason"]:
        text.append(f"\n  {study['reason']}", STATE_STYLES.get(state, ""))
    if is_tracking_late(study):
        text.append("\n  MLflow does not have all of it yet; it is sent as soon as MLflow takes it", "yellow")
    return text


def counts(study: Study) -> str:
    """720 trials: 712 succeeded, 8 diverged"""
    progress = study["progress"]
    states = {state: n for state, n in progress["states"].items() if n}
    if not states:
        return f"{progress['trials_done']} of {progress['trials_total']} trials"
    listed = ", ".join(f"{n} {state}" for state, n in sorted(states.items(), key=lambda item: -item[1]))
    return f"{progress['trials_total']} trials: {listed}"


def verdict_table(analysis: Mapping[str, Any]) -> Table:
    """Per normaliser: what happens to accuracy as batch size doubles, in percentage points."""
    arms: Sequence[Mapping[str, Any]] = analysis["arms"]
    levels = {f"{round((1 - arm.get('alpha', 0.05)) * 100, 4):g} %" for arm in arms}
    level = levels.pop() if len(levels) == 1 else "its"
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("normaliser", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("slope", justify="right", no_wrap=True)
    table.add_column(f"{level} interval", justify="right", no_wrap=True)
    table.add_column("p (Holm)", justify="right", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    for arm in arms:
        verdict = str(arm["verdict"])
        quiet = "dim" if verdict == "undecided" else ""
        mark = (" †" if arm["sensitive_to_diverged"] else "") + (" ‡" if _mixed(arm) else "")
        table.add_row(
            Text(arm["normaliser"], "bold"),
            Text(f"{ARM_SIGNS.get(verdict, '·')} {verdict}{mark}", quiet),
            points(arm["slope"]),
            interval(arm["interval"]),
            p_value(arm["p_holm"]),
            str(arm["n_trials"]),
        )
    return table


def remarks(analysis: Mapping[str, Any]) -> RenderableType:
    """What must stand under the table: the unit, what the marks mean, why arms are undecided."""
    lines = [Text("slope: percentage points of test accuracy per doubling of batch size", "dim")]
    if any(arm["sensitive_to_diverged"] for arm in analysis["arms"]):
        lines.append(Text("† another verdict where diverged trials are left out; see the report", "dim"))
    if any(_mixed(arm) for arm in analysis["arms"]):
        lines.append(Text("‡ accuracy falls at some learning rates and rises at others; see the report", "dim"))
    for arm in analysis["arms"]:
        if arm["verdict"] == "undecided" and arm["reason"]:
            lines.append(Text(f"{arm['normaliser']}: {arm['reason']}", "dim"))
    return Group(*lines)


def _mixed(arm: Mapping[str, Any]) -> bool:
    return bool(arm.get("mixed_over_learning_rates"))  # absent from verdicts of before it was reported


def answers(analysis: Mapping[str, Any]) -> RenderableType:
    """One line per hypothesis: its verdict, and the sentence that says why."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for hypothesis in analysis["hypotheses"]:
        sign, style = ANSWERS.get(hypothesis["verdict"], ("·", ""))
        grid.add_row(Text(sign, style), Text(hypothesis["sentence"]))
    blocks: list[RenderableType] = [grid if analysis["hypotheses"] else Text("The study states no hypothesis.", "dim")]
    if paper := analysis.get("paper"):
        text = Text.assemble(
            ("Paper, ", "dim"),
            (paper["row"], "dim"),
            (", as far as the hypotheses test it: ", "dim"),
            (paper["seen"], "bold"),
        )
        blocks.append(text.append(f". It reports: {paper['outcome']}", "dim"))
    return Group(*blocks)


def links(study: Study, url: str, more: Sequence[tuple[str, str]] = ()) -> Text:
    """Where to look further; a link that the service gives as a path is completed with its address.

    The report is among them only once there is one.

    To be printed with `soft_wrap=True`: an address that was broken over two lines cannot be opened.
    """
    wanted = [("report", "report"), ("study", "self"), ("Ray", "ray_job"), ("MLflow", "mlflow_experiment")]
    if study["state"] not in ENDED or study["verdict"] is None:
        wanted = wanted[1:]
    rows = [(label, urljoin(f"{url}/", link)) for label, key in wanted if (link := study["links"].get(key))]
    lines = [Text.assemble((f"{label:<13}", "dim"), place) for label, place in [*more, *rows]]
    return Text("\n").join(lines)


def notes(warnings: Sequence[Fault]) -> Text:
    """note: /seeds: two seeds give wide intervals (a line per remark of the service on a document)"""
    lines = [": ".join(part for part in ("note", w["pointer"], w["detail"]) if part) for w in warnings]
    return Text("\n").join(Text(line, "yellow") for line in lines)


def study_details(study: Study) -> RenderableType:
    """`normstudy show`, above the verdict."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("id", study["id"])
    grid.add_row("submitted", when(study["created_at"]))
    if study["started_at"]:
        again = f", attempt {study['attempt']}" if study["attempt"] > 1 else ""
        grid.add_row("started", f"{when(study['started_at'])}{again}")
    if study["ended_at"]:
        grid.add_row("ended", when(study["ended_at"]))
    grid.add_row("plan", plan_text(study["plan"]))
    if study["state"] not in ENDED:
        grid.add_row("progress", progress_line(study))
    grid.add_row("tracking", study["tracking"])
    blocks: list[RenderableType] = [headline(study)]
    if study["description"]:
        blocks.append(Padding(Text(study["description"].strip(), "dim"), (0, 0, 0, 2)))
    return Group(*blocks, "", grid)


def studies_table(studies: Sequence[Study]) -> RenderableType:
    """`normstudy ls`."""
    if not studies:
        return Text("No studies yet. `normstudy presets` lists some that are ready to run.", "dim")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name, justify in [("id", "left"), ("name", "left"), ("state", "left"), ("trials", "right"), ("age", "right")]:
        table.add_column(name, justify=justify, no_wrap=name != "name", overflow="fold")  # type: ignore[arg-type]
    table.add_column("hypotheses")
    for study in studies:
        progress = study["progress"]
        signs = Text()
        for verdict in study["verdict"] or []:
            sign, style = ANSWERS.get(verdict["verdict"], ("·", ""))
            signs.append(f"{sign} ", style)
        table.add_row(
            study["id"],
            Text(study["name"]),
            Text(study["state"].lower(), STATE_STYLES.get(study["state"], "")),
            f"{progress['trials_done']}/{progress['trials_total']}",
            age(study["created_at"]),
            signs,
        )
    return table


def presets_table(presets: Sequence[PresetItem]) -> RenderableType:
    """`normstudy presets`."""
    blocks: list[RenderableType] = []
    for preset in presets:
        title = Text.assemble((preset["name"], "bold"), (f"   {plan_text(preset['plan'])}", "dim"))
        blocks.append(Group(title, Padding(Text((preset["description"] or "").strip()), (0, 0, 1, 2))))
    return Group(*blocks, Text("Run one with `normstudy submit NAME --watch`.", "dim"))


def plan_text(plan: Plan) -> str:
    """720 trials (144 cells) in 36 packs, about 1 min of training on one core"""
    size = f"{plan['trials']:,} trials ({plan['cells']:,} cells) in {plan['packs']:,} packs"
    return f"{size}, about {duration(plan['cost']['core_seconds'])} of training on one core"


def duration(seconds: float) -> str:
    """0.4 s, 26 s, 3 min 20 s, 2 h 5 min"""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def seconds_between(start: str | None, end: str | None) -> float | None:
    if start is None or end is None:
        return None
    return max(0.0, (_moment(end) - _moment(start)).total_seconds())


def when(moment: str) -> str:
    """A time of the service in this machine's zone: 2026-12-01 14:03:22"""
    return _moment(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(moment: str) -> str:
    """now, 5 min, 3 h, 12 d"""
    seconds = (datetime.now(UTC) - _moment(moment)).total_seconds()
    for size, unit in [(86_400, "d"), (3_600, "h"), (60, "min")]:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return "now"


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
