"""The command `normstudy`.

Whatever a command needs is imported within it: `normstudy --help` answers at once.
"""

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from service import cli_studies
from service.cli_studies import make_console

FAILED, USAGE, UNREACHABLE = 1, 2, 3

EXIT_CODES = (
    "Exit codes: 0 done; 1 the study failed or its verdict cannot be had; 2 wrong usage or an invalid "
    "study; 3 the service cannot be reached; 130 interrupted."
)

app = typer.Typer(
    help="Runs experiments, not just trials: normaliser × batch size × learning rate × seed studies on Ray, "
    "tracked in MLflow, answered with a verdict.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

STACK = "The embedded stack"

DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder that keeps studies, databases and logs; else NORMSTUDY_HOME, else ~/.local/share/normstudy.",
        show_default=False,
        file_okay=False,
    ),
]


def main(arguments: list[str] | None = None) -> None:
    """Run a command line and exit; errors become a message and an exit code, never a traceback."""
    try:
        app(arguments, prog_name="normstudy")
    except Exception as error:
        if os.environ.get("NORMSTUDY_DEBUG"):
            raise
        sys.exit(_explain(error))


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=lambda v: _version(v)),
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel=STACK)
def up(
    data_dir: DataDir = None,
    data_root: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder that studies may read data from; may be repeated. Default: DATA_DIR/data.",
            callback=lambda folders: _readable_folders(folders),
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the service, instead of 8080 or the next free one.")] = None,
    ray_port: Annotated[int | None, typer.Option(help="Port of Ray's dashboard, instead of 8265 or the next.")] = None,
    mlflow_port: Annotated[int | None, typer.Option(help="Port of MLflow, instead of 5000 or the next.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Cores for studies; by default all.")] = None,
) -> None:
    """Start Ray, MLflow and the service on this machine, until Ctrl-C.

    Every port is on loopback. Studies stay in the data folder and are there again at the next start.
    """
    from rich.text import Text

    from service.places import default_data_dir
    from service.stack import Interrupted, Stack, interruptible
    from service.startup import start_visibly

    console = make_console()
    stack = Stack(
        data_dir or default_data_dir(),
        api_port=port,
        ray_port=ray_port,
        mlflow_port=mlflow_port,
        data_roots=data_root or [],
        cpus=cpus,
    )
    with interruptible():
        try:
            start_visibly(stack, console)
            assert stack.state is not None
            console.print(Text(f"\nReady. The API's documentation: {stack.state.api}/docs"))
            other = "" if stack.folder.root == default_data_dir() else f" --url {stack.state.api}"
            console.print(
                Text(f"In another terminal: normstudy submit batch-size-digits --watch{other}"), soft_wrap=True
            )
            console.print(Text("Ctrl-C stops it; studies stay.", "dim"))
            stack.supervise()
        except Interrupted:
            pass  # the usual way to end it
        finally:
            stack.stop()


@app.command(rich_help_panel=STACK)
def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running until Ctrl-C, to look around.")
    ] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the demo; by default `demo` in the default data folder.",
            show_default=False,
            file_okay=False,
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="The preset to run; `normstudy presets` lists them.")
    ] = "batch-size-digits",
) -> None:
    """Start a stack of its own, run a preset on it, show the verdict, and stop everything.

    The study and its report stay in the demo's folder. A stack that is already up is not disturbed.
    """
    from service.demo import run_demo
    from service.places import demo_data_dir
    from trials.spec import nearest, preset_names

    if preset not in preset_names():
        guess = nearest(preset, preset_names())
        hint = f"did you mean {guess!r}?" if guess else f"there are: {', '.join(preset_names())}"
        raise typer.BadParameter(f"no preset is called {preset!r}; {hint}", param_hint="--preset")
    raise typer.Exit(run_demo(make_console(), data_dir or demo_data_dir(), preset, keep=keep))


@app.command(rich_help_panel=STACK)
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; this machine's only.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
) -> None:
    """Run only the service, for a Ray cluster and an MLflow server that run elsewhere.

    Everything else is set by NORMSTUDY_… variables; `service/settings.py` has them all.
    """
    from service.places import default_data_dir

    os.environ.setdefault("NORMSTUDY_DATA_DIR", str(default_data_dir()))
    for name, value in [("NORMSTUDY_HOST", host), ("NORMSTUDY_PORT", port)]:
        if value is not None:
            os.environ[name] = str(value)
    from service.serve import main as run

    raise typer.Exit(run())


app.add_typer(cli_studies.commands)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"normstudy {metadata.version('normstudy')}")
        raise typer.Exit


def _readable_folders(folders: list[Path] | None) -> list[Path] | None:
    """Refuse a folder that no study could read from, before anything is started."""
    for given in folders or []:
        folder = given.expanduser()
        if not folder.exists():
            raise typer.BadParameter(f"there is no folder {str(given)!r}")
        if not folder.is_dir():
            raise typer.BadParameter(f"{str(given)!r} is not a folder")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise typer.BadParameter(f"the folder {str(given)!r} cannot be read")
    return folders


def _explain(error: Exception) -> int:
    """Tell the user about an error, on standard error.

    Returns:
        The exit code that it means.
    """
    from rich.padding import Padding
    from rich.text import Text

    from service.client import (
        ClientError,
        InvalidStudy,
        NoServiceKnown,
        NotFound,
        Refused,
        ServiceFault,
        ServiceUnreachable,
        UnclearStudy,
    )
    from service.stack import PartFailed, StackError

    console = make_console(error=True)
    console.print(Text.assemble(("Error: ", "bold red"), _message(error)), soft_wrap=True)
    if isinstance(error, PartFailed) and error.tail:
        console.print(Text("its last lines:", "dim"))
        console.print(Padding(Text(error.tail, "dim"), (0, 0, 0, 2)), soft_wrap=True)
    if isinstance(error, NoServiceKnown | ServiceUnreachable | ServiceFault):
        return UNREACHABLE
    if isinstance(error, InvalidStudy | NotFound | UnclearStudy):
        return USAGE
    if isinstance(error, Refused | ClientError | StackError):
        return FAILED
    console.print(Text("This is a fault of Normstudy's own; NORMSTUDY_DEBUG=1 shows where.", "dim"))
    return FAILED


def _message(error: Exception) -> str:
    from service.client import ClientError
    from service.stack import StackError

    if isinstance(error, ClientError | StackError):
        return str(error)
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
