"""The driver's exit status and what it does where nothing is to be trained; the rest is in `tests/e2e`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mlflow_server import MlflowServer, mlflow_server
from tests.studies import plan, spec
from tests.trials.test_catalogue import write_images
from tests.trials.test_ledger import results_of
from tests.trials.test_tracking import PROVENANCE, runs
from trials.ledger import Ledger
from trials.spec import StudySpec


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


def drive(folder: Path, study: StudySpec, mlflow_url: str, *more: str) -> subprocess.CompletedProcess[str]:
    ledger = Ledger(str(folder))
    ledger.write_file("spec.json", study.canonical_json().encode())
    command = [sys.executable, "-m", "trials.driver", "--study-dir", str(folder), "--study-id", folder.name]
    command += ["--attempt", "1", "--mlflow-url", mlflow_url, "--cache-dir", str(folder / "cache"), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_nothing_missing_needs_no_cluster(tmp_path: Path, mlflow: MlflowServer):
    ledger = Ledger(str(tmp_path / "whole"))
    for pack in plan().packs:
        ledger.append(pack, results_of(pack), PROVENANCE)
    ended = drive(tmp_path / "whole", spec(), mlflow.url, "--ray-address", "127.0.0.1:1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    account = json.loads(ledger.read_file("attempts/1.json"))
    assert (account["packs_run"], account["trials_tracked"]) == (0, plan().trials)
    assert account["tracking_is_current"] is True


def test_only_tracking_sends_what_is_there_and_trains_nothing(tmp_path: Path, mlflow: MlflowServer):
    ledger, first = Ledger(str(tmp_path / "half")), plan().packs[0]
    ledger.append(first, results_of(first), PROVENANCE)
    ended = drive(tmp_path / "half", spec(), mlflow.url, "--only-tracking", "--ray-address", "127.0.0.1:1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ledger.finished() == ledger.tracked() == {first.key}
    assert len(runs(mlflow.url, "half", "trial")) == len(first.trials)


def test_data_that_has_gone_is_fatal_with_the_reason(tmp_path: Path):
    root = tmp_path / "root"
    write_images(root / "images")
    study = spec(**{"data": {"dataset": "parquet", "path": "gone"}, "space.batch_size": [4, 8]})
    ended = drive(tmp_path / "fatal", study, "http://127.0.0.1:1", "--data-root", str(root))
    assert ended.returncode == 3
    assert ended.stdout.splitlines()[-1].startswith("normstudy: fatal: /data/path: no folder 'gone'")


def test_damaged_images_are_fatal_with_the_reason(tmp_path: Path):
    import pyarrow.parquet as pq

    folder = write_images(tmp_path / "root" / "images")
    table = pq.read_table(folder / "train-00000-of-00001.parquet")
    rows = table.to_pylist()
    rows[3]["image"]["bytes"] = b"not an image"
    pq.write_table(table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    study = spec(**{"data": {"dataset": "parquet", "path": "images"}, "space.batch_size": [4, 8]})
    ended = drive(tmp_path / "damaged", study, "http://127.0.0.1:1", "--data-root", str(tmp_path / "root"))
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert "normstudy: fatal:" in ended.stdout.splitlines()[-1]


def test_data_that_has_changed_is_fatal_with_the_reason(tmp_path: Path):
    ledger = Ledger(str(tmp_path / "changed"))
    ledger.write_file("data.json", b'{"checksum": "0123456789abcdef0123"}')
    ended = drive(tmp_path / "changed", spec(), "http://127.0.0.1:1")
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert "the data set has changed since this study began" in ended.stdout.splitlines()[-1]
    assert ledger.finished() == set()
