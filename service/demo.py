"""`normstudy demo`: the whole product on one screen, from nothing running to a verdict."""

import contextlib
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from service.client import Client, ClientError, Conflict, is_tracking_late
from service.client_types import Study
from service.rendering import ProgressView, duration, links, outcome, waiting
from service.stack import Interrupted, Stack, interruptible
from service.startup import StackView, start_visibly

CANCEL_SECONDS = 2.0
"""Longest time for cancelling the study of a demo that is cut short."""

TRACKING_SECONDS = 30.0
"""Longest wait for MLflow to have all of the study before the stack, and MLflow with it, stops."""


def run_demo(console: Console, data_dir: Path, preset: str, *, keep: bool) -> int:
    """Start a stack of its own, run a preset on it, show the verdict, stop the stack.

    Args:
        data_dir: the demo's own folder, which keeps the study and its report.
        keep: leave the stack running until Ctrl-C, to look around.

    Returns:
        0 where the study completed with a verdict, else 1; after a signal 128 and its number, as a
        shell has it: then the stack is stopped, and an unfinished study was cancelled.

    Raises:
        StackError: the stack cannot run.
        ClientError: the service refuses the preset, or went away.
    """
    began = time.monotonic()
    with interruptible():
        stack = Stack(data_dir)
        try:
            view = start_visibly(stack, console)
            assert stack.state is not None
            with Client(stack.state.api) as client:
                code = _study(console, client, stack, view, preset)
            console.print(Text(f"\n{duration(time.monotonic() - began)} from start to verdict."))
            if keep:
                console.print(Text("Everything is still running, to look around; Ctrl-C stops it.", "dim"))
                with contextlib.suppress(Interrupted):  # the usual way to end it
                    stack.supervise()
            else:
                again = f"normstudy up --data-dir {shlex.quote(str(stack.folder.root))}"
                how = f"The study stays; its addresses close now, with the stack. To open them again: {again}"
                console.print(Text(how, "dim"), soft_wrap=True)
        except Interrupted as signalled:
            code = 128 + signalled.signum
        finally:
            stack.stop()
    return code


def _study(console: Console, client: Client, stack: Stack, view: StackView, preset: str) -> int:
    submitted = client.submit(client.preset(preset)["text"])
    with _cancelled_if_cut_short(client.url, submitted["id"], view):
        study = _followed(console, client, stack, submitted)
    if is_tracking_late(study):
        with waiting(console, "waiting for MLflow to have the verdict and the report"):
            study = client.wait_until_tracked(study, TRACKING_SECONDS, meanwhile=stack.tend)
    try:
        analysis = client.analysis(study["id"])
    except ClientError as error:
        analysis, why = None, str(error)
    else:
        why = ""
    console.print(outcome(study, analysis))
    report = stack.folder.studies / study["id"] / "analysis" / "report.html"
    more = [("report file", str(report))] if report.exists() else []
    console.print()
    console.print(links(study, client.url, more), soft_wrap=True)
    if analysis is None:
        console.print(Text(f"\nNo verdict: {why}", "red"))
    if study["state"] != "COMPLETED" or analysis is None:
        console.print(Text(f"logs: {stack.folder.logs}"), soft_wrap=True)
        return 1
    return 0


def _followed(console: Console, client: Client, stack: Stack, study: Study) -> Study:
    """Show a study until its end, and tend the stack."""
    trials = study["plan"]["trials"]
    console.print(Text.assemble("\nSubmitted ", (study["name"], "bold"), f" ({study['id']}): {trials} trials"))
    console.print(Text(f"{(study['description'] or '').strip()}\n", "dim"))
    with ProgressView(console) as progress:
        return client.wait(study["id"], each=progress, meanwhile=stack.tend, pause=0.5)


@contextlib.contextmanager
def _cancelled_if_cut_short(url: str, study_id: str, view: StackView) -> Iterator[None]:
    """Whatever ends this early: cancel the study, or the next demo would run it as well."""
    try:
        yield
    except BaseException:
        try:
            # Half the time for each request: one whose answer is lost is repeated.
            with Client(url, timeout=CANCEL_SECONDS / 2) as client:
                client.cancel(study_id)
            view.last_word = "stopped; the unfinished study was cancelled"
        except Conflict:
            pass  # its trials have all ended: nothing of it is left to run
        except ClientError:
            view.last_word = "stopped; the unfinished study could not be cancelled: it goes on at the next start"
        raise
