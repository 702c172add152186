"""What the API says: the shapes of its answers, and how records become them."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel, Field, create_model

from service.cluster import submission_id
from service.library import Library, no_progress
from service.logs import event
from service.problems import Fault
from service.results import SCALAR_COLUMNS, STORAGE_ERRORS
from service.settings import Settings
from service.store import Study, StudyState
from service.tracking import Tracking
from trials.plan import Plan
from trials.spec import DocumentError, Issue, StudySpec, parse_document, parse_spec, warnings_of
from trials.table import CURVE_COLUMNS, PROBE_COLUMNS, RESULTS_SCHEMA

log = logging.getLogger(__name__)

SPEC_SCHEMA = {"$ref": "#/components/schemas/StudySpec"}


_WARNINGS: Any = Field(description="What is accepted and probably not meant, each with its place in the spec.")


class CostView(BaseModel):
    """What a plan asks of the cluster."""

    samples: int = Field(description="Training samples over all trials and epochs.", examples=[10987200])
    updates: int = Field(description="Optimiser steps over all trials.", examples=[1356000])
    core_seconds: float = Field(description="Rough estimate, good to a factor of about 3.", examples=[24.5])


class PlanView(BaseModel):
    """The size of a study."""

    trials: int = Field(examples=[720])
    cells: int = Field(description="Points of the design without the seed.", examples=[144])
    packs: int = Field(description="Groups of trials that are trained together.", examples=[36])
    cost: CostView


class ProgressView(BaseModel):
    """How far a study has come."""

    trials_total: int
    trials_done: int = Field(description="Trials that have ended, in whatever state.")
    packs_total: int
    packs_done: int
    states: dict[str, int] = Field(description="Trials that have ended, by state.", examples=[{"succeeded": 700}])
    trials_per_second: float | None = Field(description="Rate of the present attempt; null until a pack has ended.")
    seconds_left: float | None


class HypothesisVerdict(BaseModel):
    """The answer to one of the study's hypotheses."""

    hypothesis: int = Field(description="Its place in the spec's list, from 0.")
    verdict: Literal["supported", "contradicted", "undecided"]


class LinksView(BaseModel):
    """Where to read on. Paths are of this service, URLs of others."""

    self: str
    trials: str
    analysis: str
    report: str
    export: str
    ray_job: str
    ray_dashboard: str
    mlflow_experiment: str | None = Field(description="Null until the study's driver has reached MLflow.")


class StudyItem(BaseModel):
    """A study in a listing."""

    id: str = Field(examples=["s1f0c9a7b3e2d"])
    name: str
    description: str | None
    state: StudyState
    reason: str | None = Field(description="Why the study waits, or why it failed.")
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    attempt: int = Field(description="Number of the present (or last) attempt to run its job.")
    spec_hash: str = Field(description="SHA-256 of everything in the spec that can change a number or a verdict.")
    plan: PlanView
    progress: ProgressView
    tracking: Literal["current", "delayed"] = Field(description="Whether MLflow has all it should have by now.")
    verdict: list[HypothesisVerdict] | None = Field(description="Null until the study was analysed.")
    warnings: list[Fault] = _WARNINGS
    links: LinksView


class StudyView(StudyItem):
    """A study."""

    spec: dict[str, Any]


class StudyPage(BaseModel):
    items: list[StudyItem]
    next_page_token: str | None = Field(description="For the next page; null on the last.")


class Validation(BaseModel):
    """What a study would be. Nothing was started."""

    valid: Literal[True] = True
    spec: dict[str, Any] = Field(description="The document as it was understood, defaults filled in.")
    spec_hash: str
    plan: PlanView
    warnings: list[Fault] = _WARNINGS


class PresetItem(BaseModel):
    name: str
    description: str | None
    plan: PlanView


class PresetPage(BaseModel):
    items: list[PresetItem]


class PresetView(BaseModel):
    name: str
    text: str = Field(description="The preset as YAML, with its comments.")
    spec: dict[str, Any]


_PYTHON_TYPES = {pa.string(): str, pa.int64(): int, pa.float64(): float, pa.bool_(): bool}


def _column(name: str) -> Any:
    field = RESULTS_SCHEMA.field(name)
    kind = _python_type(field.type)
    return (kind | None if field.nullable else kind, ...)


def _python_type(column: pa.DataType) -> Any:
    if pa.types.is_list(column):
        return list[_python_type(column.value_type) | None]
    return _PYTHON_TYPES[column]


TrialItem: Any = create_model(
    "TrialItem", __doc__="A row of the results table.", **{name: _column(name) for name in SCALAR_COLUMNS}
)
TrialView: Any = create_model(
    "TrialView",
    __base__=TrialItem,
    __doc__="A row of the results table with its curves, one value per completed epoch, and its probes, one list "
    "per probe with a value per affine map.",
    **{name: _column(name) for name in (*CURVE_COLUMNS, *PROBE_COLUMNS)},
)
_ITEMS: Any = (list[TrialItem], ...)  # pyright: ignore[reportInvalidTypeForm] - made by create_model
TrialPage: Any = create_model(
    "TrialPage", __doc__="Trials in the plan's order.", items=_ITEMS, next_page_token=(str | None, ...)
)


class Views:
    """Makes the answers about studies."""

    def __init__(self, settings: Settings, library: Library, tracking: Tracking):
        self._settings, self._library, self._tracking = settings, library, tracking

    def study(self, study: Study) -> StudyView:
        return StudyView(**self._fields(study), spec=_stored_document(study.spec))

    def item(self, study: Study) -> StudyItem:
        return StudyItem(**self._fields(study))

    def _fields(self, study: Study) -> dict[str, Any]:
        trouble: str | None = None
        try:
            progress, is_tracked = self._library.progress(study), self._library.is_tracked(study)
        except STORAGE_ERRORS as error:  # one damaged study must not hide itself, or a listing's others
            trouble = f"its results cannot be read: {error}"
            progress, is_tracked = study.progress or no_progress(study), False
            event(log, "study unreadable", level=logging.WARNING, study=study.id, detail=str(error))
        return {
            "id": study.id,
            "name": study.name,
            "description": study.description,
            "state": StudyState(study.state),
            "reason": f"{study.reason}; {trouble}" if study.reason and trouble else trouble or study.reason,
            "created_at": study.created_at,
            "started_at": study.started_at,
            "ended_at": study.ended_at,
            "attempt": study.attempt,
            "spec_hash": study.spec_hash,
            "plan": {"trials": study.trials, "cells": study.cells, "packs": study.packs, "cost": study.cost},
            "progress": progress,
            "tracking": "current" if is_tracked else "delayed",
            "verdict": study.verdict,
            "warnings": faults(_warnings(study.spec)),
            "links": self._links(study),
        }

    def _links(self, study: Study) -> dict[str, str | None]:
        here, ray = f"/v1/studies/{study.id}", self._settings.ray_dashboard_url
        return {
            "self": here,
            "trials": f"{here}/trials",
            "analysis": f"{here}/analysis",
            "report": f"{here}/report.html",
            "export": f"{here}/export",
            "ray_job": f"{ray}/#/jobs/{submission_id(study.name, study.id, study.attempt)}",
            "ray_dashboard": ray,
            "mlflow_experiment": self._tracking.experiment_link(study.mlflow_experiment)
            if study.mlflow_experiment
            else None,
        }


def plan_view(plan: Plan) -> dict[str, Any]:
    return {"trials": plan.trials, "cells": plan.cells, "packs": len(plan.packs), "cost": asdict(plan.cost)}


def spec_document(spec: StudySpec) -> Mapping[str, Any]:
    return spec.model_dump(mode="json")


def faults(issues: Iterable[Issue]) -> list[Fault]:
    return [Fault(pointer=issue.pointer, detail=issue.detail) for issue in issues]


def _stored_document(text: str) -> dict[str, Any]:
    """The stored spec; empty where the database's copy is damaged, which `reason` says then."""
    try:
        return parse_document(text, "json")
    except DocumentError:
        return {}


@lru_cache(maxsize=1000)  # a listing asks for every study's again
def _warnings(spec: str) -> tuple[Issue, ...]:
    try:
        return tuple(warnings_of(parse_spec(parse_document(spec, "json"))))
    except ValueError:  # as above
        return ()
