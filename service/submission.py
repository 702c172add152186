"""From a request's body to a study: decode, validate, size, and check against the caps. Makes nothing."""

import hashlib
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from service.problems import BodyTooLarge, Invalid, MediaNotSupported
from service.settings import Settings
from service.store import Study, StudyState, new_study_id
from trials.plan import Plan, count_trials, make_plan
from trials.spec import DataFacts, Issue, StudySpec, facts_for, parse_document, parse_spec

MEDIA_KINDS = {
    "application/json": "json",
    "application/yaml": "yaml",
    "application/x-yaml": "yaml",
    "text/yaml": "yaml",
    "text/x-yaml": "yaml",
}

MAX_YAML_BYTES = 131_072
"""YAML takes seconds per 100 kB to read, JSON next to nothing; a study with 10,000 seeds listed has 60 kB."""


@dataclass(frozen=True)
class Sized:
    """A spec whose data set has been looked at, and its plan."""

    facts: DataFacts
    plan: Plan


def read_spec(body: bytes, content_type: str, content_encoding: str = "") -> StudySpec:
    """Decode and validate.

    Raises:
        MediaNotSupported, BodyTooLarge, DocumentError, SpecError
    """
    media = content_type.split(";", 1)[0].strip().lower()
    if media not in MEDIA_KINDS:
        said = f"{media!r} is not a media type of a study" if media else "the request has no Content-Type"
        raise MediaNotSupported(f"{said}; send application/json or application/yaml")
    if content_encoding.strip().lower() not in ("", "identity"):
        raise MediaNotSupported(f"Content-Encoding {content_encoding!r} is not supported; send the body as it is")
    kind = MEDIA_KINDS[media]
    if kind == "yaml" and len(body) > MAX_YAML_BYTES:
        raise BodyTooLarge(f"a YAML body may have {MAX_YAML_BYTES} bytes at most; send a larger study as JSON")
    return parse_spec(parse_document(body, kind))


def size(spec: StudySpec, settings: Settings) -> Sized:
    """Look at the data set and lay out the plan, if the number of trials is within the cap.

    Raises:
        Invalid: too many trials.
        SpecError: the data set is not there, or does not fit the spec.
    """
    trials = count_trials(spec)
    if trials > settings.max_trials:
        detail = (
            f"this design asks for {trials:,} trials, and this service accepts {settings.max_trials:,}; "
            "use fewer levels or seeds (an operator can raise NORMSTUDY_MAX_TRIALS)"
        )
        raise Invalid(detail, [Issue("/space", detail)])
    facts = facts_for(spec.data, settings.data_roots)
    return Sized(facts, make_plan(spec, facts))


def new_study(spec: StudySpec, sized: Sized) -> Study:
    """The study's first record; it is not stored yet."""
    plan = sized.plan
    return Study(
        id=new_study_id(),
        name=spec.name,
        description=spec.description,
        state=StudyState.QUEUED,
        created_at=datetime.now(UTC),
        attempt=1,
        first_attempt=1,
        spec=spec.canonical_json(),
        spec_hash=spec.content_hash(),
        facts=sized.facts.as_json(),
        trials=plan.trials,
        cells=plan.cells,
        packs=len(plan.packs),
        cost=asdict(plan.cost),
        published=False,
    )


def request_hash(spec: StudySpec) -> str:
    """What makes two requests the same under one idempotency key: the document, however it was written."""
    return hashlib.sha256(spec.canonical_json().encode()).hexdigest()
