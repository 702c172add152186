"""Shows an embedded stack as it starts: a line per part, then the addresses."""

import time

from rich.console import Console
from rich.status import Status
from rich.text import Text

from service.parts import Part
from service.rendering import duration
from service.stack import API_PORT, MLFLOW_PORT, RAY_PORT, Happening, Stack

USUAL_PORTS = {"ray": RAY_PORT, "mlflow": MLFLOW_PORT, "api": API_PORT}


class StackView:
    """Tells what happens to a stack's parts; give it as the stack's `tell`.

    `last_word` is what it says once the stack has stopped.
    """

    def __init__(self, console: Console):
        self.last_word = "stopped"
        self._console = console
        self._began: dict[str, float] = {}
        self._waiting: dict[str, str] = {}
        self._status: Status | None = None

    def __call__(self, happening: Happening, part: Part | None) -> None:
        if part is None:
            self._whole(happening)
        elif happening == "starting":
            self._began[part.key] = time.monotonic()
            self._waiting[part.key] = part.title
            self._spin(f"starting {' and '.join(self._waiting.values())}")
        elif happening == "ready" and part.key in self._waiting:
            self._waiting.pop(part.key)
            taken = duration(time.monotonic() - self._began[part.key])
            taken += "" if part.port == USUAL_PORTS[part.key] else f", port {USUAL_PORTS[part.key]} was not free"
            line = Text.assemble(("  ✓ ", "green"), f"{part.title:<10} {part.url}  ", (taken, "dim"))
            self._console.print(line)
            self._spin(f"starting {' and '.join(self._waiting.values())}" if self._waiting else None)
        elif happening == "died":
            self._console.print(Text(f"{part.title} has died; starting it again (its log: {part.log})", "yellow"))
        elif happening == "restarted":
            self._console.print(Text(f"{part.title} is back", "green"))

    def close(self) -> None:
        self._spin(None)

    def _whole(self, happening: Happening) -> None:
        if happening == "leftovers":
            self._console.print(Text("  ended what an earlier run on this folder had left behind", "dim"))
        elif happening == "stopping":
            self._console.print()
            self._spin("stopping")
        elif happening == "stopped" and self._status is not None:
            self._spin(None)
            self._console.print(Text(self.last_word, "dim"))

    def _spin(self, what: str | None) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if what is not None and (self._console.is_terminal or what == "stopping"):
            self._status = self._console.status(Text(what, "dim"), spinner_style="cyan")
            self._status.start()


def start_visibly(stack: Stack, console: Console) -> StackView:
    """Start a stack, showing it on the console; the addresses stand there when it is done.

    Returns:
        What shows the stack on, to its end.

    Raises:
        StackError: it cannot run.
    """
    console.print(Text.assemble(("Normstudy", "bold"), (f"  {stack.folder.root}", "dim")))
    view = StackView(console)
    stack.tell = view
    try:
        stack.start()
    finally:
        view.close()
    return view
