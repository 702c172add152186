"""The application: its parts put together, its routes, and its OpenAPI document."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi_offline import FastAPIOffline

from service import problems
from service.analysing import Analyser
from service.cluster import Cluster
from service.library import Library
from service.lifecycle import Reconciler
from service.middleware import BodyLimit, Gatekeeper
from service.migrate import open_store
from service.routes import health, presets, studies
from service.services import Services
from service.settings import Settings
from service.tracking import Tracking
from service.views import SPEC_SCHEMA, Views
from trials.spec import StudySpec


def create_app(settings: Settings, analyser: Analyser | None = None) -> FastAPI:
    """The service, ready to be served by any ASGI server in one process.

    Its database is opened (and brought to this release's schema) when it starts; its
    reconciler runs from then until it ends.

    Args:
        analyser: in place of the one that runs `analysis`.

    Raises, at start:
        StoreUnavailable
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        parts = make_services(settings, analyser or Analyser(settings.analysis_timeout_seconds))
        app.state.services = parts
        parts.reconciler.start()
        try:
            yield
        finally:
            parts.reconciler.stop()
            parts.cluster.close()
            parts.store.close()

    app = FastAPIOffline(  # a FastAPI whose /docs brings its own scripts: many clusters see no internet
        title="Normstudy",
        version=metadata.version("normstudy"),
        description="Runs experiments, not just trials: submit a study, follow it, read its verdict.",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    problems.install(app)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(Gatekeeper, allowed_hosts=settings.allowed_hosts)  # the outermost: added last
    for router in (studies.router, presets.router, health.router):
        app.include_router(router)
    app.openapi = lambda: _openapi(app)  # pyright: ignore[reportAttributeAccessIssue]
    return app


def make_services(settings: Settings, analyser: Analyser) -> Services:
    """Open the database and make the other parts; the reconciler is not started."""
    token = settings.ray_auth_token.get_secret_value() if settings.ray_auth_token else None
    cluster = Cluster(settings.ray_dashboard_url, token=token)
    store, tracking = open_store(settings.database_url), Tracking(settings.mlflow_url)
    library = Library(settings.study_root)
    reconciler = Reconciler(settings, store, cluster, tracking, library, analyser)
    views = Views(settings, library, tracking)
    return Services(settings, store, cluster, tracking, library, views, reconciler)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, and the two schemas that no route's signature mentions."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in (StudySpec, problems.Problem):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        for shape in ("StudyView", "Validation", "PresetView"):
            schemas[shape]["properties"]["spec"] = SPEC_SCHEMA
        app.openapi_schema = document
    return app.openapi_schema
