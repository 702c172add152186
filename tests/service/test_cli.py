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

import httpx
import pytest

from service.cli import main
from service.client import Client
from service.places import DataFolder, StackState, write_state
from service.settings import Settings
from tests.ports import free_port
from tests.service.conftest import Serve
from tests.service.fake_ray import FakeRay
from tests.service.helpers import settings_for
from tests.studies import document

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
    code, out, _ = run("show", "from a file")
    assert code == 0
    assert study_id in out
    assert "queued" in out
    code, out, _ = run("ls", "from a")
    assert code == 0
    assert study_id in out
    assert "0/16" in out
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
    assert json.loads(run("submit", "batch-size-digits", "--validate-only", "--json")[1])["plan"]["cells"] == 144


def test_an_invalid_study_is_wrong_usage(run: Run, tmp_path: Path):
    code, out, err = run("submit", write(tmp_path, **{"model.widht": 8}))
    assert (code, out) == (2, "")
    assert "/model/widht: unknown key 'widht'; did you mean 'width'?" in err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.yaml", "there is no file 'missing.yaml'"),
        ("batch-size-digit", "no preset of that name"),
        (".", "cannot read '.'"),
    ],
)
def test_nothing_to_submit(run: Run, source: str, message: str):
    code, _, err = run("submit", source)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())


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
    assert "QUEUED" in err
    assert run("resume", "not ended")[0] == 1


@pytest.mark.parametrize("command", [["ls"], ["show", "x"], ["submit", "batch-size-digits"], ["presets"]])
def test_no_service(run: Run, command: list[str]):
    url = f"http://127.0.0.1:{free_port()}"
    code, out, err = run(*command, "--url", url)
    assert (code, out) == (3, "")
    assert f"no Normstudy service at {url}; start one with `normstudy up`" in " ".join(err.split())


def test_address_from_the_running_stack(
    run: Run, monkeypatch: pytest.MonkeyPatch, client: httpx.Client, tmp_path: Path
):
    folder = DataFolder(tmp_path / "home")
    folder.create()
    monkeypatch.setenv("NORMSTUDY_HOME", str(folder.root))
    url = os.environ.pop("NORMSTUDY_URL")
    state = StackState.of_this_process("t", api=url, ray_dashboard="", mlflow="", ray_folder=tmp_path)
    write_state(folder, state)
    assert run("presets")[0] == 0
    gone = StackState(**{**state.__dict__, "pid_created": 1.0})  # the pid is another process's by now
    write_state(folder, gone)
    code, _, err = run("presets")
    assert code in {0, 3}  # 0 only where something of ours listens on the usual port of this machine
    assert code == 0 or "http://127.0.0.1:8080" in err


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
    code, out, _ = run("watch", "doomed", "--json", "--url", followed.url)
    assert code == 1
    assert json.loads(out)["state"] == "FAILED"


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
