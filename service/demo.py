"""`normstudy demo`: the whole product on one screen, from nothing running to a verdict."""

import contextlib
import shlex
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from service.client import Client, ClientError
from service.rendering import ProgressView, duration, links, outcome
from service.stack import Interrupted, Stack, interruptible
from service.startup import start_visibly


def run_demo(console: Console, data_dir: Path, preset: str, *, keep: bool) -> int:
    """Start a stack of its own, run a preset on it, show the verdict, stop the stack.

    Args:
        data_dir: the demo's own folder, which keeps the study and its report.
        keep: leave the stack running until Ctrl-C, to look around.

    Returns:
        0 where the study completed with a verdict, else 1.

    Raises:
        StackError: the stack cannot run.
        ClientError: the service refuses the preset, or went away.
        Interrupted: by a signal; the stack is stopped.
    """
    began = time.monotonic()
    with interruptible():
        stack = Stack(data_dir)
        try:
            start_visibly(stack, console)
            assert stack.state is not None
            with Client(stack.state.api) as client:
                code = _study(console, client, stack, preset)
            console.print(Text(f"\n{duration(time.monotonic() - began)} from start to verdict."))
            if keep:
                console.print(Text("Everything is still running, to look around; Ctrl-C stops it.", "dim"))
                with contextlib.suppress(Interrupted):  # the usual way to end it
                    stack.supervise()
            else:
                again = f"normstudy up --data-dir {shlex.quote(str(stack.folder.root))}"
                console.print(Text(f"The study stays; this opens it again: {again}", "dim"), soft_wrap=True)
        finally:
            stack.stop()
    return code


def _study(console: Console, client: Client, stack: Stack, preset: str) -> int:
    study = client.submit(client.preset(preset)["text"])
    trials = study["plan"]["trials"]
    console.print(Text.assemble("\nSubmitted ", (study["name"], "bold"), f" ({study['id']}): {trials} trials"))
    console.print(Text(f"{(study['description'] or '').strip()}\n", "dim"))

    with ProgressView(console) as view:
        study = client.wait(study["id"], each=view, meanwhile=stack.tend, pause=0.5)
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
