"""Study documents for tests: the smallest valid one, and ways to vary it."""

import copy
from typing import Any

from trials.plan import Plan, make_plan
from trials.spec import StudySpec, facts_for, parse_spec

SMALLEST: dict[str, Any] = {
    "version": 1,
    "name": "smallest",
    "data": {"dataset": "digits"},
    "model": {"width": 4},
    "training": {"budget": {"epochs": 2}},
    "space": {"normaliser": ["none", "norm_like"], "batch_size": [64, 128], "learning_rate": [0.1, 0.3]},
    "seeds": 2,
    "hypotheses": [{"kind": "batch_size_slope", "arms": ["norm_like"], "direction": "negative"}],
}


def document(**changes: Any) -> dict[str, Any]:
    """`SMALLEST` with values set at dotted paths, as in `document(**{"space.batch_size": [4, 8]})`."""
    result = copy.deepcopy(SMALLEST)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = result
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return result


def spec(**changes: Any) -> StudySpec:
    return parse_spec(document(**changes))


def plan(**changes: Any) -> Plan:
    study = spec(**changes)
    return make_plan(study, facts_for(study.data, []))
