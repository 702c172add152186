"""What an operator may set: environment variables with the prefix `NORMSTUDY_`, all of them here."""

import ipaddress
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.places import default_data_dir


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Settings(BaseSettings):
    """Settings of the REST service. A list is written as JSON, or joined by `:` (folders) or `,` (hosts)."""

    model_config = SettingsConfigDict(env_prefix="NORMSTUDY_", frozen=True, extra="ignore")

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. Only this machine: there are no access tokens yet.",
    )
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="Names that a Host header may carry beside those of loopback (a tunnel's, a proxy's)."
    )
    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="Folder under which the defaults of the settings below lie.",
    )
    database_url: str = Field(
        default_factory=lambda data: f"sqlite:///{_absolute(data['data_dir'])}/normstudy.db",
        description="The service's database: `sqlite:///FILE` or `postgresql+psycopg://…`.",
    )
    storage: str = Field(
        default_factory=lambda data: str(_absolute(data["data_dir"]) / "studies"),
        description="Folder (path, or URI such as s3://bucket/studies) that holds one folder per study; "
        "the cluster's machines must see it at the same address.",
    )
    ray_dashboard_url: str = Field(
        default="http://127.0.0.1:8265", description="Address of the Ray dashboard, which serves the Jobs API."
    )
    ray_auth_token: SecretStr | None = Field(
        default=None, description="Token of a Ray cluster that asks for one (RAY_AUTH_MODE=token)."
    )
    mlflow_url: str = Field(default="http://127.0.0.1:5000", description="Address of the MLflow server.")
    data_roots: Annotated[tuple[Path, ...], NoDecode] = Field(
        default_factory=lambda data: (_absolute(data["data_dir"]) / "data",),
        description="Folders under which a study's `data.path` may lie.",
    )
    cache_dir: Path = Field(
        default_factory=lambda data: _absolute(data["data_dir"]) / "cache",
        description="Where downloaded data sets are kept, on each machine of the cluster.",
    )
    max_trials: int = Field(default=20_000, ge=1, description="Most trials a study may ask for.")
    max_running_studies: int = Field(
        default=8, ge=1, description="Studies whose job runs at one time; later ones wait their turn, oldest first."
    )
    max_body_bytes: int = Field(default=1_048_576, ge=1024, description="Largest request body.")
    poll_seconds: float = Field(default=0.5, gt=0, le=60, description="Pause between two looks at the running studies.")
    max_attempts: int = Field(
        default=3, ge=1, le=100, description="Attempts to run a study's job before the study is failed."
    )
    analysis_timeout_seconds: float = Field(
        default=900, gt=0, description="Longest time that one study's analysis may take."
    )
    driver_python: str = Field(
        default=sys.executable, description="Python that runs the study's driver, on the machine of Ray's head."
    )

    @field_validator("host")
    @classmethod
    def _only_this_machine(cls, host: str) -> str:
        if not is_loopback(host):
            raise ValueError(
                f"{host!r} can be reached from other machines, and this service has no access tokens yet; "
                "listen on 127.0.0.1 and let a tunnel (ssh -L) or an authenticating proxy lead to it"
            )
        return host

    @field_validator("data_roots", "allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any, info: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            import json

            return json.loads(value)
        separator = os.pathsep if info.field_name == "data_roots" else ","
        return [part.strip() for part in value.split(separator) if part.strip()]

    @field_validator("data_roots")
    @classmethod
    def _absolute_roots(cls, roots: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(_absolute(root) for root in roots)

    @field_validator("data_dir", "cache_dir")
    @classmethod
    def _absolute_folder(cls, folder: Path) -> Path:
        return _absolute(folder)

    @field_validator("storage")
    @classmethod
    def _address(cls, storage: str) -> str:
        return storage.rstrip("/") if "://" in storage else str(_absolute(Path(storage)))

    @field_validator("ray_dashboard_url", "mlflow_url")
    @classmethod
    def _url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not the address of a server; it starts with http:// or https://")
        return url.rstrip("/")

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, url: str) -> str:
        if not url.startswith(("sqlite:///", "postgresql+psycopg://")):
            raise ValueError("must start with sqlite:/// or postgresql+psycopg://")
        return url

    def study_root(self, study_id: str) -> str:
        """Address of a study's folder: the root of its ledger."""
        return f"{self.storage}/{study_id}"


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))
