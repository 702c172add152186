"""Settings: from the environment, checked, documented."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from service.settings import Settings, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "LOCALHOST"])
def test_loopback_is_accepted(host: str):
    assert Settings(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "", "localhost.example.org"])
def test_anything_wider_is_refused_with_the_reason(host: str):
    assert not is_loopback(host)
    with pytest.raises(ValidationError, match="no access tokens yet"):
        Settings(host=host)


def test_defaults_lie_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NORMSTUDY_DATA_DIR", "here")
    settings = Settings()
    assert settings.database_url == f"sqlite:///{tmp_path}/here/normstudy.db"
    assert settings.storage == f"{tmp_path}/here/studies"
    assert settings.data_roots == (tmp_path / "here" / "data",)
    assert settings.cache_dir == tmp_path / "here" / "cache"
    assert settings.study_root("s1") == f"{tmp_path}/here/studies/s1"


def test_lists_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NORMSTUDY_DATA_ROOTS", "/a:/b c")
    monkeypatch.setenv("NORMSTUDY_ALLOWED_HOSTS", "a.example, b.example")
    settings = Settings()
    assert settings.data_roots == (Path("/a"), Path("/b c"))
    assert settings.allowed_hosts == ("a.example", "b.example")
    monkeypatch.setenv("NORMSTUDY_DATA_ROOTS", '["/a:b"]')
    assert Settings().data_roots == (Path("/a:b"),)


def test_storage_may_be_a_uri(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NORMSTUDY_STORAGE", "s3://bucket/studies/")
    assert Settings().study_root("s1") == "s3://bucket/studies/s1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("poll_seconds", 0),
        ("database_url", "mysql://x"),
        ("mlflow_url", "127.0.0.1:5000"),
        ("max_trials", 0),
        ("max_attempts", 0),
        ("data_roots", '["/a'),
    ],
)
def test_nonsense_is_refused(name: str, value: object):
    with pytest.raises(ValidationError, match=name):
        Settings(**{name: value})  # pyright: ignore[reportArgumentType]


def test_every_setting_is_described():
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []
