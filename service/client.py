"""A client of the REST service, for the command line and for scripts.

    ClientError
    ├── NoServiceKnown        no address was given, and no stack of the user's runs
    ├── ServiceUnreachable    nothing answers at the address
    ├── ServiceFault          it answers, and cannot serve (5xx, or not a Normstudy service at all)
    ├── Refused               the service says no, and why
    │   ├── InvalidStudy      the document (400, 413, 415, 422)
    │   ├── NotFound          404
    │   └── Conflict          not in the study's present state (409)
    ├── UnclearStudy          a name or id prefix that fits no study, or several
    └── NoAnalysis            the study has no verdict and no report, or not yet

Errors of httpx are translated in `_send`, and nowhere else.
"""

import ipaddress
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import httpx

from service.client_types import Preset, PresetItem, Study, Validation

ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
STUDY_ID = re.compile(r"s[0-9a-f]{12}")
Media = Literal["application/json", "application/yaml"]


class ClientError(Exception):
    """Something the user should read."""


class NoServiceKnown(ClientError):
    def __init__(self, folders: Sequence[Path]):
        super().__init__(
            "no Normstudy service is running for this user "
            f"(looked in {' and '.join(str(folder) for folder in folders)}); "
            "start one with `normstudy up`, or say which with --url or NORMSTUDY_URL"
        )


class ServiceUnreachable(ClientError):
    def __init__(self, url: str, why: str = ""):
        super().__init__(
            f"no Normstudy service at {url}{f' ({why})' if why else ''}; "
            "start one with `normstudy up` or set --url/NORMSTUDY_URL"
        )


class ServiceFault(ClientError):
    pass


class Refused(ClientError):
    """`errors` has (JSON pointer, detail) of each fault the service found, and may be empty."""

    def __init__(self, status: int, title: str, detail: str, errors: list[tuple[str, str]]):
        self.status, self.title, self.detail, self.errors = status, title, detail, errors
        super().__init__("\n".join([f"{title}: {detail}" if not errors else title, *self.lines()]))

    def lines(self) -> list[str]:
        """One line per fault: where, and what to do about it."""
        return [f"  {pointer or '(document)'}: {detail}" for pointer, detail in self.errors]


class InvalidStudy(Refused):
    pass


class NotFound(Refused):
    pass


class Conflict(Refused):
    pass


class UnclearStudy(ClientError):
    pass


class NoAnalysis(ClientError):
    def __init__(self, study: Study):
        who, why = f"study {study['name']!r} ({study['id']})", study["reason"]
        if study["state"] in ENDED:
            why = why or "no trial had finished before its end"
            text = f"{who} is {study['state']} and was not analysed, so it has no report: {why}"
        else:
            text = f"{who} is {study['state']}{f' ({why})' if why else ''}; its report is made once it has ended"
        super().__init__(text)


class Client:
    """Talks to one service. Close it, or use it as a context manager.

    Args:
        url: address of the service, `http://host:port`; the `http://` may be left out.
        timeout: seconds to wait for an answer.
        transport: for tests, something that answers in the network's place.
    """

    def __init__(self, url: str, *, timeout: float = 30.0, transport: httpx.BaseTransport | None = None):
        url = url.strip().rstrip("/")
        self.url = url if "://" in url or not url else f"http://{url}"
        try:
            self._http = httpx.Client(
                base_url=self.url,
                timeout=httpx.Timeout(timeout, connect=min(timeout, 5.0)),
                trust_env=not _is_loopback(self.url),  # a proxy cannot reach this machine's loopback
                transport=transport,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ServiceUnreachable(self.url, str(error)) from None

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, document: str | bytes, media: Media = "application/yaml", *, key: str | None = None) -> Study:
        """Submit a study. With a `key` of yours, repeating the call does not make a second study.

        A reply lost on the way is asked for once more under the same key, so one call never
        makes two studies.

        Raises:
            InvalidStudy, ServiceUnreachable, ServiceFault
        """
        headers = {"Content-Type": media, "Idempotency-Key": key or str(uuid.uuid4())}
        return self._json("POST", "/v1/studies", content=document, headers=headers, again=True)

    def validate(self, document: str | bytes, media: Media = "application/yaml") -> Validation:
        """What submitting would do, without doing it.

        Raises:
            InvalidStudy, ServiceUnreachable, ServiceFault
        """
        headers = {"Content-Type": media}
        parameters = {"validate_only": "true"}
        return self._json("POST", "/v1/studies", content=document, headers=headers, params=parameters, again=True)

    def studies(self, *, state: str | None = None, text: str | None = None, page_size: int = 100) -> Iterator[Study]:
        """All studies, newest first, a page at a time; `text` is part of the name or begins the id."""
        yield from self._pages("/v1/studies", {"state": state, "q": text}, page_size)

    def get(self, study_id: str) -> Study:
        """
        Raises:
            NotFound
        """
        return self._json("GET", f"/v1/studies/{study_id}", again=True)

    def cancel(self, study_id: str) -> Study:
        """Ask for the study's end; asking twice is no error.

        Raises:
            Conflict: it has completed or failed already.
        """
        return self._json("POST", f"/v1/studies/{study_id}/cancel", again=True)

    def resume(self, study_id: str) -> Study:
        """Run what is missing of a failed or cancelled study.

        Raises:
            Conflict: it is in another state.
        """
        return self._json("POST", f"/v1/studies/{study_id}/resume")

    def trials(
        self, study_id: str, *, state: str | None = None, normaliser: str | None = None, page_size: int = 500
    ) -> Iterator[dict[str, Any]]:
        """The trials' rows of the results table, without their curves."""
        yield from self._pages(f"/v1/studies/{study_id}/trials", {"state": state, "normaliser": normaliser}, page_size)

    def trial(self, study_id: str, trial_key: str) -> dict[str, Any]:
        """One trial, with its curves."""
        return self._json("GET", f"/v1/studies/{study_id}/trials/{quote(trial_key, safe='')}", again=True)

    def analysis(self, study_id: str) -> dict[str, Any]:
        """The verdict document.

        Raises:
            Conflict: the study has not ended.
        """
        return self._json("GET", f"/v1/studies/{study_id}/analysis", again=True)

    def report(self, study_id: str) -> bytes:
        """The HTML report.

        Raises:
            Conflict: the study has not ended.
        """
        return self._send("GET", f"/v1/studies/{study_id}/report.html", again=True).content

    def export(self, study_id: str, form: Literal["csv", "parquet"]) -> bytes:
        """The results table: `csv` has the scalar columns, `parquet` all of them."""
        return self._send("GET", f"/v1/studies/{study_id}/export", params={"format": form}, again=True).content

    def presets(self) -> list[PresetItem]:
        return self._json("GET", "/v1/presets", again=True)["items"]

    def preset(self, name: str) -> Preset:
        """
        Raises:
            NotFound: the text names the nearest preset.
        """
        return self._json("GET", "/v1/presets/" + quote(name, safe=""), again=True)

    def find(self, reference: str) -> Study:
        """The study meant by an id, a name that one study has, or the beginning of one study's id.

        Raises:
            UnclearStudy, NotFound
        """
        if STUDY_ID.fullmatch(reference):
            return self.get(reference)
        everything = list(self.studies(text=reference[:100])) if reference else []
        named = [study for study in everything if study["name"] == reference]
        found = named or [study for study in everything if study["id"].startswith(reference)]
        if not found:
            raise UnclearStudy(f"no study has the id or name {reference!r}; `normstudy ls` lists them")
        if len(found) > 1:
            what = "are named" if named else "have an id that begins with"
            lines = [f"  {s['id']}  {s['state'].lower():<10} {s['created_at']}  {s['name']}" for s in found[:10]]
            more = [f"  … and {len(found) - 10} more"] if len(found) > 10 else []
            raise UnclearStudy("\n".join([f"{len(found)} studies {what} {reference!r}; say which:", *lines, *more]))
        return self.get(found[0]["id"])

    def wait(
        self,
        study_id: str,
        *,
        each: Callable[[Study], None] = lambda study: None,
        meanwhile: Callable[[], None] = lambda: None,
        pause: float = 1.0,
        patience: float = 60.0,
        timeout: float | None = None,
    ) -> Study:
        """Wait for a study's end.

        Args:
            each: called with the study after every look at it, the last one included.
            meanwhile: called between two looks, whether the service answers or not.
            pause: seconds between two looks.
            patience: seconds for which the service may be away (restarting) before that is an error.
            timeout: seconds after which to stop waiting; None waits for as long as it takes.

        Raises:
            TimeoutError: after `timeout`.
            ServiceUnreachable, ServiceFault: for longer than `patience`.
            NotFound
        """
        began = last_answer = time.monotonic()
        while True:
            try:
                study = self.get(study_id)
            except (ServiceUnreachable, ServiceFault):
                if time.monotonic() - last_answer > patience:
                    raise
            else:
                last_answer = time.monotonic()
                each(study)
                if study["state"] in ENDED:
                    return study
            if timeout is not None and time.monotonic() - began > timeout:
                raise TimeoutError(f"study {study_id} has not ended within {timeout:g} s")
            meanwhile()
            time.sleep(pause)

    def wait_until_tracked(
        self,
        study: Study,
        seconds: float,
        *,
        meanwhile: Callable[[], None] = lambda: None,
        pause: float = 0.25,
    ) -> Study:
        """Give MLflow some time to take what it still lacks of an ended study.

        Args:
            seconds: how long to wait at most.
            meanwhile: called between two looks.
            pause: seconds between two looks.

        Returns:
            The study as it was seen last; its `tracking` says whether MLflow has it all.
        """
        deadline = time.monotonic() + seconds
        while is_tracking_late(study) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(pause)
            try:
                latest = self.get(study["id"])
            except (ServiceUnreachable, ServiceFault):
                continue
            if latest["state"] not in ENDED:  # somebody has resumed it
                break
            study = latest
        return study

    def _pages(self, path: str, query: dict[str, str | None], page_size: int) -> Iterator[Any]:
        parameters: dict[str, Any] = {k: v for k, v in query.items() if v is not None} | {"page_size": page_size}
        while True:
            page = self._json("GET", path, params=parameters, again=True)
            yield from page["items"]
            if not page.get("next_page_token"):
                return
            parameters["page_token"] = page["next_page_token"]

    def _json(self, method: str, path: str, **options: Any) -> Any:
        answer = self._send(method, path, **options)
        try:
            return answer.json()
        except ValueError:
            raise self._stranger(answer) from None

    def _send(self, method: str, path: str, *, again: bool = False, **options: Any) -> httpx.Response:
        """`again`: the request may be repeated once where the answer was lost, without harm."""
        try:
            answer = self._http.request(method, path, **options)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            why = "" if "refused" in str(error).lower() else str(error)
            raise ServiceUnreachable(self.url, why) from None
        except httpx.TransportError as error:
            if again:
                return self._send(method, path, **options)
            raise ServiceUnreachable(self.url, str(error) or type(error).__name__) from None
        except httpx.HTTPError as error:  # a body in an encoding that is none, redirects without end
            raise ServiceFault(f"{self.url} gave an answer that cannot be read: {error}") from None
        if answer.is_success:
            return answer
        raise self._refusal(answer)

    def _refusal(self, answer: httpx.Response) -> ClientError:
        try:
            problem = answer.json()
            title, detail = str(problem["title"]), str(problem["detail"])
            errors = [(str(e["pointer"]), str(e["detail"])) for e in problem.get("errors", [])]
        except (ValueError, KeyError, TypeError):
            return self._stranger(answer)
        if answer.status_code >= 500:
            return ServiceFault(f"the service at {self.url} cannot serve this now: {detail}")
        kind = {
            400: InvalidStudy,
            404: NotFound,
            409: Conflict,
            413: InvalidStudy,
            415: InvalidStudy,
            422: InvalidStudy,
        }
        return kind.get(answer.status_code, Refused)(answer.status_code, title, detail, errors)

    def _stranger(self, answer: httpx.Response) -> ServiceFault:
        return ServiceFault(
            f"what answers at {self.url} is not a Normstudy service (HTTP {answer.status_code}, "
            f"{answer.headers.get('content-type', 'no content type')}); check --url/NORMSTUDY_URL"
        )


def is_tracking_late(study: Study) -> bool:
    """Whether an ended study has results that MLflow does not have yet."""
    has_results = study["progress"]["trials_done"] > 0
    return study["state"] in ENDED and study["tracking"] == "delayed" and has_results


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
