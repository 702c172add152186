"""/v1/studies: submit, follow, cancel, resume, and read what came out."""

import tempfile
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from service.analysing import REPORT_FILE, VERDICT_FILE
from service.cluster import slug
from service.lifecycle import cancel, resume
from service.pages import decode_token, encode_token, not_ours
from service.problems import Conflict, Invalid, NotFound, documented
from service.services import Parts, Services, check_query
from service.store import KeyReused, Study, StudyState
from service.submission import MEDIA_KINDS, new_study, read_spec, request_hash, size
from service.views import (
    SPEC_SCHEMA,
    StudyPage,
    StudyView,
    TrialPage,
    TrialView,
    Validation,
    faults,
    plan_view,
    spec_document,
)
from trials.records import TrialState
from trials.spec import Issue, load_preset, preset_text, warnings_of

router = APIRouter(prefix="/v1/studies", tags=["studies"], dependencies=[Depends(check_query)])

StudyId = Annotated[str, Path(description="Id of the study.", examples=["s1f0c9a7b3e2d"])]
PageSize = Annotated[int, Query(ge=1, le=500, description="Most items in the answer.")]
PageToken = Annotated[str | None, Query(description="`next_page_token` of the page before.")]

_EXAMPLE = "batch-size-digits"
_BODY = {
    "requestBody": {
        "required": True,
        "description": "A study: version 1 of the document, as JSON or YAML.",
        "content": {
            media: {
                "schema": SPEC_SCHEMA,
                "example": spec_document(load_preset(_EXAMPLE)) if kind == "json" else preset_text(_EXAMPLE),
            }
            for media, kind in MEDIA_KINDS.items()
            if media in ("application/json", "application/yaml")
        },
    }
}


async def _body(request: Request) -> bytes:
    return await request.body()


@router.post(
    "",
    status_code=201,
    response_model=StudyView | Validation,
    summary="Submit a study, or only check it",
    openapi_extra=_BODY,
    responses={
        200: {
            "model": StudyView | Validation,
            "description": "With `validate_only`: what the study would be. With a known Idempotency-Key: its study.",
        },
        201: {"description": "The study is queued.", "headers": {"Location": {"schema": {"type": "string"}}}},
        **documented(400, 413, 415, 422, 503),
    },
)
def submit(
    parts: Parts,
    request: Request,
    response: Response,
    body: Annotated[bytes, Depends(_body)],
    validate_only: Annotated[bool, Query(description="Check and size the study without starting it.")] = False,
    idempotency_key: Annotated[
        str | None, Header(min_length=1, max_length=255, description="Makes a repeated request the same study.")
    ] = None,
) -> Any:
    """The answer tells the size of the plan and a cost estimate. Names need not be unique."""
    headers = request.headers
    spec = read_spec(body, headers.get("content-type", ""), headers.get("content-encoding", ""))
    if validate_only:
        plan = size(spec, parts.settings).plan
        response.status_code = 200
        return Validation(
            spec=dict(spec_document(spec)),
            spec_hash=spec.content_hash(),
            plan=plan_view(plan),  # pyright: ignore[reportArgumentType]
            warnings=faults(warnings_of(spec)),
        )
    digest = request_hash(spec)
    try:
        study = parts.store.by_key(idempotency_key, digest) if idempotency_key else None
        created = False
        if study is None:
            study, created = parts.store.create(new_study(spec, size(spec, parts.settings)), idempotency_key, digest)
    except KeyReused as error:
        raise Invalid(str(error), [Issue("Idempotency-Key:", str(error))]) from error
    if created:
        parts.reconciler.wake()
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/v1/studies/{study.id}"
    return parts.views.study(study)


@router.get("", response_model=StudyPage, summary="List studies, newest first", responses=documented(422, 503))
def list_studies(
    parts: Parts,
    state: Annotated[StudyState | None, Query(description="Only studies in this state.")] = None,
    q: Annotated[str | None, Query(max_length=100, description="Part of the name, or start of the id.")] = None,
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> Any:
    if q is not None and "\0" in q:  # which PostgreSQL's text cannot have
        raise Invalid("?q: must not contain a NUL character", [Issue("?q", "must not contain a NUL character")])
    listing = ("studies", state, q)
    after = None
    if page_token is not None:
        moment, study_id = decode_token(page_token, listing, (str, str))
        if "\0" in study_id:  # which PostgreSQL's text cannot have
            raise not_ours()
        after = (_moment(moment), study_id)
    studies = parts.store.page(page_size + 1, state=state, text=q, after=after)
    shown = studies[:page_size]
    last = shown[-1] if len(studies) > page_size else None
    token = encode_token(listing, (last.created_at.astimezone(UTC).isoformat(), last.id)) if last else None
    return StudyPage(items=[parts.views.item(study) for study in shown], next_page_token=token)


@router.get("/{study_id}", response_model=StudyView, summary="A study", responses=documented(404, 422, 503))
def get_study(parts: Parts, study_id: StudyId) -> Any:
    return parts.views.study(parts.store.get(study_id))


@router.post(
    "/{study_id}/cancel",
    status_code=202,
    response_model=StudyView,
    summary="End a study early",
    responses=documented(404, 409, 422, 503),
)
def cancel_study(parts: Parts, study_id: StudyId) -> Any:
    """What has been trained is kept and analysed. Cancelling again is the same."""
    study = cancel(parts.store, study_id)
    parts.reconciler.wake()
    return parts.views.study(study)


@router.post(
    "/{study_id}/resume",
    status_code=202,
    response_model=StudyView,
    summary="Run what is missing of a study that has ended",
    responses=documented(404, 409, 422, 503),
)
def resume_study(parts: Parts, study_id: StudyId) -> Any:
    """Of a completed study: packs whose results have been damaged since, and trials that were lost."""
    study = resume(parts.store, parts.library, study_id)
    parts.reconciler.wake()
    return parts.views.study(study)


@router.get(
    "/{study_id}/trials", response_model=TrialPage, summary="A study's trials", responses=documented(404, 422, 503)
)
def list_trials(
    parts: Parts,
    study_id: StudyId,
    state: Annotated[TrialState | None, Query(description="Only trials that ended so.")] = None,
    normaliser: Annotated[str | None, Query(description="Only trials of this normaliser.")] = None,
    page_size: PageSize = 100,
    page_token: PageToken = None,
) -> Any:
    """Rows of the results table without curves, in the plan's order: those of ended trials while the
    study runs, those of all planned trials afterwards."""
    study = parts.store.get(study_id)
    results = parts.library.open(study)
    arms = results.spec.space.normaliser
    if normaliser is not None and normaliser not in arms:
        detail = f"{normaliser!r} is not among the study's normalisers ({', '.join(arms)})"
        raise Invalid(detail, [Issue("?normaliser", detail)])
    listing = ("trials", study_id, state, normaliser)
    start = decode_token(page_token, listing, (int,))[0] if page_token is not None else 0
    if not 0 <= start <= study.trials:
        raise not_ours()
    rows = results.rows(study, page_size + 1, start=start, state=state, normaliser=normaliser)
    token = encode_token(listing, (rows[page_size][0],)) if len(rows) > page_size else None
    return {"items": [row for _, row in rows[:page_size]], "next_page_token": token}


@router.get(
    "/{study_id}/trials/{trial_key}",
    response_model=TrialView,
    summary="A trial with its curves",
    responses=documented(404, 422, 503),
)
def get_trial(parts: Parts, study_id: StudyId, trial_key: str) -> Any:
    row = parts.library.open(study := parts.store.get(study_id)).row(study, trial_key)
    if row is None:
        raise NotFound(f"study {study_id} has no trial {trial_key!r}, or it has not ended yet")
    return row


@router.get(
    "/{study_id}/analysis",
    summary="The verdict and the numbers behind it",
    responses={
        200: {"description": "verdict.json", "content": {"application/json": {"schema": {"type": "object"}}}},
        **documented(404, 409, 422, 503),
    },
)
def get_analysis(parts: Parts, study_id: StudyId) -> Response:
    return Response(_artifact(parts, study_id, VERDICT_FILE), media_type="application/json")


@router.get(
    "/{study_id}/report.html",
    summary="The report: one self-contained page",
    responses={
        200: {"description": "The report", "content": {"text/html": {"schema": {"type": "string"}}}},
        **documented(404, 409, 422, 503),
    },
)
def get_report(parts: Parts, study_id: StudyId) -> Response:
    return Response(_artifact(parts, study_id, REPORT_FILE), media_type="text/html; charset=utf-8")


@router.get(
    "/{study_id}/export",
    summary="The results table",
    responses={
        200: {
            "description": "Scalar columns as CSV, or all columns as Parquet.",
            "content": {"text/csv": {}, "application/vnd.apache.parquet": {}},
        },
        **documented(404, 422, 503),
    },
)
def export(
    parts: Parts,
    study_id: StudyId,
    form: Annotated[Literal["csv", "parquet"], Query(alias="format", description="Form of the table.")] = "csv",
) -> Response:
    study = parts.store.get(study_id)
    results = parts.library.open(study)
    headers = {"Content-Disposition": f'attachment; filename="{slug(study.name)}-{study.id}.{form}"'}
    # Whole before its first byte is sent: what cannot be read becomes a problem, not half a table.
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the generator that sends it
    try:
        (results.csv if form == "csv" else results.parquet)(study, file)
    except BaseException:
        file.close()
        raise
    file.seek(0)

    def pieces() -> Any:
        with file:
            while piece := file.read(1 << 20):
                yield piece

    media = "text/csv; charset=utf-8" if form == "csv" else "application/vnd.apache.parquet"
    return StreamingResponse(pieces(), media_type=media, headers=headers)


def _artifact(parts: Services, study_id: str, name: str) -> bytes:
    """A file that the analysis wrote.

    Raises:
        Conflict: the study has not ended.
        NotFound: it ended without an analysis.
    """
    study: Study = parts.store.get(study_id)
    if not StudyState(study.state).has_ended:
        raise Conflict(f"study {study_id} is {study.state}; it is analysed once it has ended")
    if study.verdict is None:
        why = study.reason or "no trial was run before it ended"
        raise NotFound(f"study {study_id} ended without an analysis: {why}")
    return parts.library.open(study).ledger.read_file(name)


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError
        return moment.astimezone(UTC)
    except (ValueError, OverflowError):  # the latter: in UTC it is before the year 1, or after 9999
        raise not_ours() from None
