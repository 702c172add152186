"""/healthz and /readyz: whether the service lives, and whether all that it stands on does."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from service.cluster import ClusterError
from service.library import check_storage
from service.problems import Unavailable, documented
from service.results import STORAGE_ERRORS
from service.services import Parts, Services, check_query
from service.store import StoreError
from trials.spec import Issue

router = APIRouter(tags=["health"], dependencies=[Depends(check_query)])


class Health(BaseModel):
    status: Literal["alive"] = "alive"


class Readiness(BaseModel):
    status: Literal["ready", "degraded"] = Field(description="`degraded`: MLflow is away; studies run all the same.")
    parts: dict[str, str] = Field(
        description="Each part, and `ok` or what is wrong with it.",
        examples=[{"database": "ok", "storage": "ok", "ray": "ok", "mlflow": "ok"}],
    )


@router.get("/healthz", response_model=Health, summary="Is the service alive?", responses=documented(422))
def healthz() -> Any:
    return Health()


@router.get("/readyz", response_model=Readiness, summary="Is every part there?", responses=documented(422, 503))
def readyz(parts: Parts) -> Any:
    """503 names the missing ones among database, storage and Ray in `errors`, by `/parts/<name>`."""
    checks = {"database": _database, "storage": _storage, "ray": _ray, "mlflow": _mlflow}
    with ThreadPoolExecutor(len(checks)) as pool:
        found = dict(zip(checks, pool.map(lambda check: check(parts), checks.values()), strict=True))
    missing = [Issue(f"/parts/{name}", said) for name, said in found.items() if said != "ok" and name != "mlflow"]
    if missing:
        raise Unavailable("; ".join(f"{i.pointer.rsplit('/', 1)[1]}: {i.detail}" for i in missing), missing)
    return Readiness(status="ready" if found["mlflow"] == "ok" else "degraded", parts=found)


def _database(parts: Services) -> str:
    try:
        parts.store.check()
    except StoreError as error:
        return str(error)
    return "ok"


def _storage(parts: Services) -> str:
    try:
        check_storage(parts.settings.storage)
    except (*STORAGE_ERRORS, ValueError) as error:  # the last: an address of no kind that pyarrow knows
        return f"{parts.settings.storage} cannot be written to: {error}"
    return "ok"


def _ray(parts: Services) -> str:
    try:
        parts.cluster.ping()
    except ClusterError as error:
        return str(error)
    return "ok"


def _mlflow(parts: Services) -> str:
    return "ok" if parts.tracking.is_alive() else f"MLflow at {parts.tracking.url} does not answer"
