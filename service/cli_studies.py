"""The commands on studies: `normstudy submit`, `ls`, `show`, … through the REST service.

As in `service.cli`, whatever a command needs is imported within it.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from service.cli_input import Address
    from service.client import Client
    from service.client_types import Fault, Study

OK, FAILED, INTERRUPTED = 0, 1, 130

PANEL = "Studies"

commands = typer.Typer()

TRACKING_SECONDS = 5.0
"""Longest wait for MLflow to have all of a study that has ended."""

TRACKING_WAIT = "waiting for MLflow to have the verdict and the report"


def _not_empty(url: str | None) -> str | None:
    if url is not None and not url.strip():
        raise typer.BadParameter("it is empty")
    return url


def _known_format(form: str) -> str:
    if form not in ("csv", "parquet"):
        raise typer.BadParameter(f"{form!r} is neither csv nor parquet")
    return form


Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Address of the service; else NORMSTUDY_URL, else the stack that runs in the default data folder, "
        "else the demo's.",
        callback=_not_empty,
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
StudyReference = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study's id, the beginning of it, or a name that one study has.")
]


@commands.command(rich_help_panel=PANEL)
def submit(
    source: Annotated[
        str, typer.Argument(metavar="FILE|PRESET", help="YAML or JSON file, `-` for standard input, or a preset.")
    ],
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow the study to its end and show the verdict.")
    ] = False,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Check it and tell its size; start nothing.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit a study."""
    from rich.text import Text

    from service.cli_input import read_document
    from service.rendering import links, plan_text

    console = make_console()
    document, media = read_document(source)
    with _client(url) as (client, address):
        if validate_only:
            checked = client.validate(document, media)
            if as_json:
                _print_json(checked)
                return
            console.print(Text.assemble(("✓ ", "green"), f"valid: {plan_text(checked['plan'])}"))
            _remark(console, checked.get("warnings"))
            _say_service(console, address)
            return
        study = client.submit(document, media)
        if as_json and not watch:
            _print_json(study)
            return
        if not as_json:
            console.print(Text.assemble("Submitted ", (study["name"], "bold"), f" ({study['id']})"))
            console.print(plan_text(study["plan"]))
            _remark(console, study.get("warnings"))
            _say_service(console, address)
        if watch:
            raise typer.Exit(_follow(console, client, study, as_json=as_json))
        console.print(links(study, client.url), soft_wrap=True)
        console.print(Text(f"Follow it with: normstudy watch {study['id']}", "dim"))


@commands.command("ls", rich_help_panel=PANEL)
def list_studies(
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Only studies whose name contains this.")] = None,
    state: Annotated[str | None, typer.Option(help="Only studies in this state, for example running.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most studies to list, newest first.")] = 50,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List studies, newest first."""
    from itertools import islice

    from service.rendering import studies_table

    with _client(url) as (client, address):
        everything = client.studies(state=state.upper() if state else None, text=text, page_size=min(limit, 100))
        studies = list(islice(everything, limit))
    if as_json:
        _print_json(studies)
    else:
        console = make_console()
        console.print(studies_table(studies))
        _say_service(console, address)


@commands.command(rich_help_panel=PANEL)
def show(study: StudyReference, url: Url = None, as_json: AsJson = False) -> None:
    """Show one study: its state, and its verdict once there is one."""
    from service.rendering import links, study_details, verdict

    with _client(url) as (client, _):
        found = client.find(study)
        analysis = _analysis(client, found)
        if as_json:
            _print_json({**found, "analysis": analysis})
            return
        console = make_console()
        console.print(study_details(found))
        console.print()
        console.print(links(found, client.url), soft_wrap=True)
        if analysis is not None:
            console.print(verdict(analysis))


@commands.command(rich_help_panel=PANEL)
def watch(study: StudyReference, url: Url = None, as_json: AsJson = False) -> None:
    """Follow a study to its end and show the verdict; Ctrl-C stops watching, not the study."""
    with _client(url) as (client, _):
        raise typer.Exit(_follow(make_console(), client, client.find(study), as_json=as_json))


@commands.command(rich_help_panel=PANEL)
def cancel(study: StudyReference, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel a study. Trials that are finished are kept; `resume` runs the rest."""
    with _client(url) as (client, _):
        _told(client.cancel(client.find(study)["id"]), as_json=as_json)


@commands.command(rich_help_panel=PANEL)
def resume(study: StudyReference, url: Url = None, as_json: AsJson = False) -> None:
    """Run what is missing of a failed or cancelled study."""
    with _client(url) as (client, _):
        _told(client.resume(client.find(study)["id"]), as_json=as_json)


@commands.command(rich_help_panel=PANEL)
def report(
    study: StudyReference,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write, `-` for standard output.", show_default="NAME-ID.html"),
    ] = None,
    url: Url = None,
) -> None:
    """Save a study's HTML report."""
    from service.client import NoAnalysis

    with _client(url) as (client, _):
        found = client.find(study)
        if found["verdict"] is None:
            raise NoAnalysis(found)
        _save(client.report(found["id"]), output, found, "html")


@commands.command(rich_help_panel=PANEL)
def export(
    study: StudyReference,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="csv: scalar columns; parquet: all, with curves.",
            metavar="csv|parquet",
            callback=_known_format,
        ),
    ] = "csv",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write, `-` for standard output.", show_default="NAME-ID.FORMAT"),
    ] = None,
    url: Url = None,
) -> None:
    """Save a study's results table, one row per trial."""
    with _client(url) as (client, _):
        found = client.find(study)
        _save(client.export(found["id"], cast(Literal["csv", "parquet"], form)), output, found, form)


@commands.command(rich_help_panel=PANEL)
def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this preset's YAML, to start from.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the studies that are ready to run, or print one."""
    from service.rendering import presets_table

    with _client(url) as (client, _):
        if name is not None:
            preset = client.preset(name)
            _print_json(preset) if as_json else typer.echo(preset["text"], nl=not preset["text"].endswith("\n"))
            return
        items = client.presets()
    _print_json(items) if as_json else make_console().print(presets_table(items))


def make_console(*, error: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=error, highlight=False)


@contextlib.contextmanager
def _client(url: str | None) -> "Iterator[tuple[Client, Address]]":
    """A client of the service that is meant, and how that was found out."""
    from service.cli_input import Address, find_service
    from service.client import Client

    address = find_service(url)
    with Client(address.url) as client:
        yield client, Address(client.url, address.source)


def _say_service(console: "Console", address: "Address") -> None:
    from rich.text import Text

    console.print(Text(f"service: {address}", "dim"), soft_wrap=True)


def _remark(console: "Console", warnings: "list[Fault] | None") -> None:
    """Show what the service remarks on a document; services of before it did remark nothing."""
    from service.rendering import notes

    if warnings:
        console.print(notes(warnings))


def _follow(console: "Console", client: "Client", study: "Study", *, as_json: bool) -> int:
    """Watch a study to its end; the exit code says whether there is a verdict."""
    from rich.text import Text

    from service.client import is_tracking_late
    from service.rendering import ProgressView, links, outcome, waiting

    shown = make_console(error=True) if as_json else console
    try:
        with ProgressView(shown) as view:
            ended = client.wait(study["id"], each=view)
    except KeyboardInterrupt:
        shown.print(Text(f"Not watching any more; the study goes on. Again: normstudy watch {study['id']}", "dim"))
        return INTERRUPTED
    if is_tracking_late(ended):
        # A Ctrl-C is for this wait only: the outcome is there to be shown.
        with waiting(shown, TRACKING_WAIT), contextlib.suppress(KeyboardInterrupt):
            ended = client.wait_until_tracked(ended, TRACKING_SECONDS)
    analysis = _analysis(client, ended)
    if as_json:
        _print_json({**ended, "analysis": analysis})
    else:
        console.print(outcome(ended, analysis))
        console.print()
        console.print(links(ended, client.url), soft_wrap=True)
    return OK if ended["state"] == "COMPLETED" and analysis is not None else FAILED


def _analysis(client: "Client", study: "Study") -> dict[str, Any] | None:
    """The verdict document, if there is one (yet)."""
    from service.client import ENDED, Conflict, NotFound

    if study["state"] not in ENDED:
        return None
    try:
        return client.analysis(study["id"])
    except (Conflict, NotFound):
        return None


def _told(study: "Study", *, as_json: bool) -> None:
    from service.rendering import headline

    _print_json(study) if as_json else make_console().print(headline(study))


def _save(content: bytes, output: Path | None, study: "Study", suffix: str) -> None:
    """Write a download to a file, or to standard output where `-` asks for it."""
    if output is not None and str(output) == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    target = output or Path(f"{study['name'].replace(' ', '-')}-{study['id']}.{suffix}")
    try:
        target.write_bytes(content)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {target}: {error.strerror}", param_hint="--output") from None
    typer.echo(str(target))


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
