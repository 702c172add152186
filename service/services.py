"""The parts that the routes share: made once per application, handed to each request."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from service.cluster import Cluster
from service.library import Library
from service.lifecycle import Reconciler
from service.problems import Invalid
from service.settings import Settings
from service.store import Store
from service.tracking import Tracking
from service.views import Views
from trials.spec import Issue, nearest


@dataclass(frozen=True)
class Services:
    settings: Settings
    store: Store
    cluster: Cluster
    tracking: Tracking
    library: Library
    views: Views
    reconciler: Reconciler


def _services(request: Request) -> Services:
    return request.app.state.services


Parts = Annotated[Services, Depends(_services)]


def check_query(request: Request) -> None:
    """Refuse query parameters that the route does not have, or that are given twice.

    Raises:
        Invalid: naming the nearest parameter that there is.
    """
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    issues: list[Issue] = []
    for name in dict.fromkeys(request.query_params.keys()):
        if name not in known:
            guess = nearest(name, known)
            hint = f"did you mean {guess!r}?" if guess else f"valid here: {', '.join(known) or 'none'}"
            issues.append(Issue(f"?{name}", f"unknown query parameter {name!r}; {hint}"))
        elif len(request.query_params.getlist(name)) > 1:
            issues.append(Issue(f"?{name}", f"query parameter {name!r} is given more than once"))
    if issues:
        raise Invalid("; ".join(issue.detail for issue in issues), issues)
