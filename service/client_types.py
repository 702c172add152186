"""What the REST service answers, as its client reads it: plain JSON objects."""

from typing import Any, NotRequired, TypedDict


class Cost(TypedDict):
    """Estimates: training samples and optimiser steps over all trials, seconds of one core."""

    samples: int
    updates: int
    core_seconds: float


class Plan(TypedDict):
    trials: int
    cells: int
    packs: int
    cost: Cost


class Progress(TypedDict):
    trials_total: int
    trials_done: int
    packs_total: int
    packs_done: int
    states: dict[str, int]
    trials_per_second: float | None
    seconds_left: float | None


class Fault(TypedDict):
    """A remark on one place (JSON pointer) of a study's document."""

    pointer: str
    detail: str


class HypothesisVerdict(TypedDict):
    hypothesis: int
    verdict: str


class Study(TypedDict):
    """A study as the service tells it; times are RFC 3339 in UTC. Items of a list have no `spec`."""

    id: str
    name: str
    description: str | None
    state: str
    reason: str | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    attempt: int
    spec: NotRequired[dict[str, Any]]
    spec_hash: str
    plan: Plan
    progress: Progress
    tracking: str
    verdict: list[HypothesisVerdict] | None
    links: dict[str, str | None]
    warnings: NotRequired[list[Fault]]


class Validation(TypedDict):
    valid: bool
    spec: dict[str, Any]
    spec_hash: str
    plan: Plan
    warnings: NotRequired[list[Fault]]


class PresetItem(TypedDict):
    name: str
    description: str | None
    plan: Plan


class Preset(TypedDict):
    name: str
    text: str
    spec: dict[str, Any]
