"""The command line, against the real service: what it prints, where, and its exit codes."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from service.cli import main
from service.client import Client
from service.places import DataFolder, StackState, write_state
from service.settings import Settings
from tests.ports import free_port
from tests.service.conftest import Serve
from tests.service.fake_ray import FakeRay
from tests.service.helpers import finish_packs, plan_of, settings_for
from tests.studies import document
from trials.spec import parse_spec

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    client: httpx.Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    """Run a command line against a service whose Ray is away; exit code, standard output, standard error."""
    monkeypatch.setenv("NORMSTUDY_URL", str(client.base_url))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        code = ended.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    return run


def write(folder: Path, **changes: object) -> str:
    path = folder / "study.json"
    path.write_text(json.dumps(document(**changes)))
    return str(path)


def test_help_is_quick_and_light():
    code = (
        "from service.cli import main\ntry:\n    main(['--help'])\nfinally:\n    import sys; print(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"ray", "mlflow", "torch", "pandas", "pyarrow", "fastapi", "sqlalchemy", "numpy", "pydantic", "httpx"}
    assert not [name for name in heavy if f"'{name}'" in done.stdout]
    assert all(command in done.stdout for command in ("up", "demo", "submit", "watch", "export", "Exit codes"))


def test_version(run: Run):
    assert run("--version")[:2] == (0, "normstudy 0.1.0\n")


def test_submit_show_and_list(run: Run, tmp_path: Path):
    code, out, _ = run("submit", write(tmp_path, name="from a file"))
    assert code == 0
    study_id = out.split("(")[1].split(")")[0]
    assert "16 trials (8 cells)" in out
    assert "of training on one core" in out
    assert "/report" not in out
    service = f"service: {os.environ['NORMSTUDY_URL']} (NORMSTUDY_URL)\n"
    assert service in out
    code, out, _ = run("show", "from a file")
    assert code == 0
    assert study_id in out
    assert "queued" in out
    code, out, _ = run("ls", "from a")
    assert code == 0
    assert study_id in out
    assert "0/16" in out
    assert out.endswith(service)
    assert json.loads(run("show", study_id[:12], "--json")[1])["id"] == study_id
    assert [s["id"] for s in json.loads(run("ls", "from a file", "--json")[1])] == [study_id]
    assert run("ls", "--state", "completed")[1].startswith("No studies yet")


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_submits_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch, form: str):
    text = json.dumps(document(name=f"piped {form}"))
    if form == "yaml":
        text = f"# a comment, which JSON does not have\n{text}"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, out, _ = run("submit", "-", "--json")
    assert code == 0
    assert json.loads(out)["name"] == f"piped {form}"


def test_validates_a_preset(run: Run):
    code, out, _ = run("submit", "batch-size-digits", "--validate-only")
    assert code == 0
    assert "720 trials" in out
    assert "service: http://127.0.0.1:" in out
    assert json.loads(run("submit", "batch-size-digits", "--validate-only", "--json")[1])["plan"]["cells"] == 144


def test_an_invalid_study_is_wrong_usage(run: Run, tmp_path: Path):
    code, out, err = run("submit", write(tmp_path, **{"model.widht": 8}))
    assert (code, out) == (2, "")
    assert "/model/widht: unknown key 'widht'; did you mean 'width'?" in err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.yaml", "there is no file 'missing.yaml'"),
        ("batch-size-digit", "no preset of that name; did you mean 'batch-size-digits'?"),
        ("no such thing", "the presets are: batch-size"),
        (".", "cannot read '.'"),
        ("nul\0.yaml", "cannot read"),
        ("empty.yaml", "'empty.yaml' is empty"),
        ("-", "standard input is empty"),
    ],
)
def test_nothing_to_submit_is_seen_without_a_service(
    run: Run, source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "empty.yaml").write_text(" \n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.delenv("NORMSTUDY_URL")
    monkeypatch.setenv("NORMSTUDY_HOME", str(tmp_path / "home"))
    code, _, err = run("submit", source)
    assert code == 2
    assert message in plain(err)


def plain(error: str) -> str:
    """A message in a box, on one line."""
    return " ".join(error.replace("│", " ").split())


def test_what_the_service_remarks_on_a_document(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    warnings = [{"pointer": "/seeds", "detail": "two are few"}, {"pointer": "", "detail": "and so on"}]
    for name in ("submit", "validate"):
        real = getattr(Client, name)
        monkeypatch.setattr(Client, name, lambda *a, real=real, **k: {**real(*a, **k), "warnings": warnings})
    study = write(tmp_path, name="remarked on")
    for options in ([], ["--validate-only"]):
        code, out, _ = run("submit", study, *options)
        assert code == 0
        assert "\nnote: /seeds: two are few\nnote: and so on\n" in out


def test_a_format_that_is_none(run: Run):
    code, _, err = run("export", "x", "--format", "xlsx")
    assert code == 2
    assert "Invalid value for '--format' / '-f': 'xlsx' is neither csv nor parquet" in plain(err)


def test_folders_that_hold_no_data_are_refused_before_anything_starts(run: Run, tmp_path: Path):
    (tmp_path / "file").write_text("")
    home = tmp_path / "home"
    for root, message in [("file", "is not a folder"), ("missing", "there is no folder")]:
        code, out, err = run("up", "--data-dir", str(home), "--data-root", str(tmp_path), "--data-root", root)
        assert (code, out) == (2, "")
        assert message in plain(err)
    assert not home.exists()


def test_presets_can_be_listed_printed_and_submitted_again(run: Run, tmp_path: Path):
    assert "batch-size-digits" in run("presets")[1]
    code, text, _ = run("presets", "batch-size-digits")
    assert code == 0
    (tmp_path / "mine.yaml").write_text(text)
    assert run("submit", "mine.yaml", "--validate-only")[0] == 0
    code, _, err = run("presets", "batch-size-digit")
    assert code == 2
    assert "batch-size-digits" in err


def test_a_reference_that_fits_no_study_or_several(run: Run, tmp_path: Path):
    code, _, err = run("show", "nothing like it")
    assert code == 2
    assert "`normstudy ls` lists them" in err
    for _ in range(2):
        run("submit", write(tmp_path, name="twins"))
    code, _, err = run("cancel", "twins")
    assert code == 2
    assert "2 studies are named 'twins'" in err


def test_no_verdict_before_the_end(run: Run, tmp_path: Path):
    run("submit", write(tmp_path, name="not ended"))
    code, _, err = run("report", "not ended")
    assert code == 1
    assert "study 'not ended' (s" in err
    assert "is QUEUED" in err
    assert "its report is made once it has ended" in err
    assert "Not possible" not in err
    assert run("resume", "not ended")[0] == 1


@pytest.mark.parametrize("command", [["ls"], ["show", "x"], ["submit", "batch-size-digits"], ["presets"]])
def test_no_service(run: Run, command: list[str]):
    url = f"http://127.0.0.1:{free_port()}"
    code, out, err = run(*command, "--url", url)
    assert (code, out) == (3, "")
    assert f"no Normstudy service at {url}; start one with `normstudy up`" in " ".join(err.split())


def test_the_address_comes_from_a_stack_of_the_users_own_or_not_at_all(
    run: Run, monkeypatch: pytest.MonkeyPatch, client: httpx.Client, tmp_path: Path
):
    url = str(client.base_url)
    folder, demo = DataFolder(tmp_path / "home"), DataFolder(tmp_path / "home" / "demo")
    folder.create()
    demo.create()
    monkeypatch.setenv("NORMSTUDY_HOME", str(folder.root))
    monkeypatch.delenv("NORMSTUDY_URL")
    state = StackState.of_this_process("t", api=url, ray_dashboard="", mlflow="", ray_folder=tmp_path)
    gone = StackState(**{**state.__dict__, "pid_created": 1.0})  # the pid is another process's by now
    elsewhere = StackState(**{**state.__dict__, "api": f"http://127.0.0.1:{free_port()}"})

    write_state(folder, gone)
    code, out, err = run("ls")
    assert (code, out) == (3, "")
    assert f"no Normstudy service is running for this user (looked in {folder.root} and {demo.root});" in plain(err)
    write_state(demo, state)
    assert run("ls")[1].endswith(f"service: {url} (the stack of {demo.root})\n")
    write_state(folder, state)
    write_state(demo, elsewhere)
    assert run("ls")[1].endswith(f"service: {url} (the stack of {folder.root})\n")
    monkeypatch.setenv("NORMSTUDY_URL", elsewhere.api)
    code, _, err = run("ls")
    assert code == 3
    assert elsewhere.api in err
    assert run("ls", "--url", url.removeprefix("http://"))[1].endswith(f"service: {url} (--url)\n")
    assert json.loads(run("ls", "--url", url, "--json")[1]) is not None
    code, _, err = run("ls", "--url", "")
    assert code == 2
    assert "'--url': it is empty" in plain(err)


class Followed:
    """A study that is watched while a fake Ray ends its job as the test says."""

    def __init__(self, serve: Serve, ray: FakeRay, folder: Path):
        self.settings: Settings = settings_for(folder, ray_dashboard_url=ray.url)
        self.url, self.ray = str(serve(self.settings).base_url), ray

    def end_job(self, **how: object) -> None:
        def end() -> None:
            while not self.ray.submissions:
                time.sleep(0.01)
            self.ray.end(self.ray.last, **how)  # type: ignore[arg-type]

        threading.Thread(target=end, daemon=True).start()


@pytest.fixture
def followed(serve: Serve, ray: FakeRay, tmp_path: Path) -> Followed:
    return Followed(serve, ray, tmp_path / "data")


def test_watching_a_study_that_fails(run: Run, followed: Followed, tmp_path: Path):
    followed.end_job(exit_code=3, log="normstudy: fatal: unschedulable: 9 cores are asked")
    code, out, _ = run("submit", write(tmp_path, name="doomed"), "--watch", "--url", followed.url)
    assert code == 1
    assert "failed" in out
    assert "unschedulable: 9 cores are asked" in out
    assert "MLflow does not have all" not in out  # there is nothing that it could have
    assert "/report" not in out
    code, _, err = run("report", "doomed", "--url", followed.url)
    assert code == 1
    assert "is FAILED and was not analysed, so it has no report: unschedulable: 9 cores are asked" in plain(err)
    code, out, _ = run("watch", "doomed", "--json", "--url", followed.url)
    assert code == 1
    assert json.loads(out)["state"] == "FAILED"


def test_watching_waits_for_mlflow_a_while(
    run: Run, followed: Followed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """MLflow is away for good: the study is shown all the same."""
    monkeypatch.setattr("service.cli_studies.TRACKING_SECONDS", 0.3)
    with Client(followed.url) as client:
        study_id = client.submit(json.dumps(document(name="done")), "application/json")["id"]
    study = cast(Any, SimpleNamespace(id=study_id))
    finish_packs(followed.settings, study, plan_of(parse_spec(document(name="done"))).packs)
    followed.end_job()
    code, out, err = run("watch", "done", "--json", "--url", followed.url)
    assert code == 0
    seen = json.loads(out)
    assert (seen["state"], seen["tracking"]) == ("COMPLETED", "delayed")
    assert "waiting for MLflow to have the verdict and the report" in err
    assert run("report", "done", "-o", "-", "--url", followed.url)[0] == 0


def test_saves_the_table_of_a_cancelled_study(run: Run, followed: Followed, tmp_path: Path):
    with Client(followed.url) as client:
        study = client.submit(json.dumps(document(name="cut short")), "application/json")
        while not followed.ray.submissions:
            time.sleep(0.01)
        assert run("cancel", "cut short", "--url", followed.url)[0] == 0
        followed.ray.end(followed.ray.last, exit_code=None, status="STOPPED")
        client.wait(study["id"], pause=0.05)
    code, out, _ = run("export", "cut short", "--url", followed.url)
    assert (code, out) == (0, f"cut-short-{study['id']}.csv\n")
    assert (tmp_path / out.strip()).read_text().count("study_cancelled") == 16
    assert run("export", "cut short", "-f", "parquet", "-o", "table.parquet", "--url", followed.url)[0] == 0
    assert (tmp_path / "table.parquet").read_bytes()[:4] == b"PAR1"
    code, _, err = run("export", "cut short", "-o", "no/such/folder.csv", "--url", followed.url)
    assert code == 2
    assert "cannot write" in err


def test_an_error_of_our_own_is_told_without_a_traceback(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("service.client.Client.presets", lambda self: 1 / 0)
    code, out, err = run("presets")
    assert (code, out) == (1, "")
    assert "ZeroDivisionError" in err
    assert "NORMSTUDY_DEBUG=1" in err
