"""The client against the real service, and against everything that can stand at an address instead."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client import (
    Client,
    ClientError,
    Conflict,
    InvalidStudy,
    NotFound,
    ServiceFault,
    ServiceUnreachable,
    UnclearStudy,
)
from tests.ports import free_port
from tests.service.conftest import Serve
from tests.service.fake_ray import FakeRay
from tests.service.helpers import settings_for
from tests.studies import document


def text(**changes: object) -> str:
    return json.dumps(document(**changes))


@pytest.fixture(scope="module")
def api(client: httpx.Client) -> Iterator[Client]:
    """A client of a service whose Ray is away: studies stay QUEUED."""
    with Client(str(client.base_url)) as api:
        yield api


def test_submits_reads_cancels_and_resumes(serve: Serve, ray: FakeRay, tmp_path: Path):
    api = Client(str(serve(settings_for(tmp_path, ray_dashboard_url=ray.url)).base_url))
    study = api.submit(text(name="whole life"), "application/json")
    assert study["state"] == "QUEUED"
    assert study["plan"]["trials"] == study["progress"]["trials_total"] == 16
    assert api.get(study["id"])["name"] == "whole life"
    while not ray.submissions:
        time.sleep(0.01)
    assert api.cancel(study["id"])["state"] == "CANCELLING"
    ray.end(ray.last, exit_code=None, status="STOPPED")
    seen: list[str] = []
    ended = api.wait(study["id"], each=lambda s: seen.append(s["state"]), pause=0.05, timeout=60)
    assert ended["state"] == seen[-1] == "CANCELLED"
    assert api.cancel(study["id"])["state"] == "CANCELLED"
    assert [t["state"] for t in api.trials(study["id"])] == ["cancelled"] * 16
    assert api.export(study["id"], "parquet")[:4] == b"PAR1"
    assert api.export(study["id"], "csv").count(b"\n") == 17
    assert api.resume(study["id"])["attempt"] == 2
    with pytest.raises(Conflict):
        api.resume(study["id"])


def test_the_same_key_is_the_same_study(api: Client):
    first = api.submit(text(name="keyed"), "application/json", key="my key")
    assert api.submit(text(name="keyed"), "application/json", key="my key")["id"] == first["id"]
    assert api.submit(text(name="keyed"), "application/json")["id"] != first["id"]


def test_validates_without_starting(api: Client):
    checked = api.validate(text(name="never made"), "application/json")
    assert checked["valid"]
    assert checked["plan"]["cells"] == 8
    assert not list(api.studies(text="never made"))


def test_says_where_a_study_is_wrong(api: Client):
    with pytest.raises(InvalidStudy) as caught:
        api.submit(text(**{"space.batch_size": [4, "x"], "model.widht": 3}), "application/json")
    pointers = [pointer for pointer, _ in caught.value.errors]
    assert "/model/widht" in pointers
    assert any(pointer.startswith("/space/batch_size") for pointer in pointers)
    assert all(pointer in str(caught.value) for pointer in pointers)
    with pytest.raises(InvalidStudy, match="not well-formed"):
        api.submit("{", "application/json")


def test_walks_over_all_pages(api: Client):
    ids = {api.submit(text(name=f"page {i}"), "application/json")["id"] for i in range(3)}
    assert {s["id"] for s in api.studies(text="page ", page_size=1)} == ids


def test_finds_by_id_beginning_and_name(api: Client):
    study = api.submit(text(name="a name of its own"), "application/json")
    for reference in (study["id"], study["id"][:10], "a name of its own"):
        assert api.find(reference)["id"] == study["id"]
    api.submit(text(name="a name of two"), "application/json")
    api.submit(text(name="a name of two"), "application/json")
    with pytest.raises(UnclearStudy, match="2 studies are named"):
        api.find("a name of two")
    with pytest.raises(UnclearStudy, match="begins with 's'"):
        api.find("s")
    for unknown in ("a name of", "", "x" * 300):
        with pytest.raises(UnclearStudy, match="no study has"):
            api.find(unknown)
    with pytest.raises(NotFound):
        api.find("s" + "0" * 12)


def test_presets(api: Client):
    names = [preset["name"] for preset in api.presets()]
    assert "batch-size-digits" in names
    assert api.validate(api.preset("batch-size-digits")["text"])["plan"]["trials"] == 720
    with pytest.raises(NotFound, match="batch-size-digits"):
        api.preset("batch-size-digit")
    with pytest.raises(NotFound):
        api.preset("../../studies")


def test_stops_waiting_after_a_while(api: Client):
    study = api.submit(text(name="for ever"), "application/json")
    with pytest.raises(TimeoutError):
        api.wait(study["id"], pause=0.01, timeout=0.05)


def test_waits_for_mlflow_until_it_has_all_or_the_time_is_up():
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        if len(seen) == 1:
            return httpx.Response(503, json={"title": "away", "detail": "for a moment"})
        return httpx.Response(200, json=study(tracking="current" if len(seen) == 3 else "delayed"))

    def study(state: str = "COMPLETED", tracking: str = "delayed", done: int = 4) -> Any:
        return {"id": "s0", "state": state, "tracking": tracking, "progress": {"trials_done": done}}

    api = Client("http://127.0.0.1:9", transport=httpx.MockTransport(answer))
    assert api.wait_until_tracked(study(), 60, pause=0.01)["tracking"] == "current"
    assert seen == ["/v1/studies/s0"] * 3
    assert api.wait_until_tracked(study(), 0.05, pause=0.01)["tracking"] == "delayed"
    asked = len(seen)
    for settled in (study(tracking="current"), study("RUNNING"), study("FAILED", done=0)):
        assert api.wait_until_tracked(settled, 60) == settled
    assert len(seen) == asked


def test_an_address_may_lack_its_scheme(api: Client):
    with Client(f" {api.url.removeprefix('http://')}/ ") as same:
        assert same.url == api.url
        assert same.presets()


def test_nothing_at_the_address():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServiceUnreachable, match=f"no Normstudy service at {url}; start one with `normstudy up`"):
        Client(url).presets()
    with pytest.raises(ServiceUnreachable):
        Client(url).wait("s" + "0" * 12, pause=0.01, patience=0.05)
    for wrong in ("not a url", "", "localhost:9", "ftp://127.0.0.1", "http://", "http://127.0.0.1:port"):
        with pytest.raises(ServiceUnreachable):
            Client(wrong).presets()


def test_another_server_at_the_address():
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ServiceFault, match="not a Normstudy service"):
            client.presets()
        server.shutdown()


def test_a_lost_answer_is_asked_for_again_under_the_same_key():
    with _loses_the_first_answer() as (url, requests):
        assert Client(url).submit("version: 1")["id"] == "s123456789abc"
    keys = [line for request in requests for line in request.splitlines() if line.lower().startswith("idempotency-key")]
    assert len(keys) == 2
    assert keys[0] == keys[1]


def _all_errors(kind: type[Exception]) -> Iterator[type[Exception]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _all_errors(sub)


@pytest.mark.parametrize("error", sorted(set(_all_errors(httpx.HTTPError)), key=repr))
def test_no_error_of_httpx_gets_through(error: type[httpx.RequestError]):
    def fail(request: httpx.Request) -> httpx.Response:
        if issubclass(error, httpx.HTTPStatusError):
            return httpx.Response(500, text="broken")
        raise error("it broke")

    with pytest.raises(ClientError):
        Client("http://127.0.0.1:9", transport=httpx.MockTransport(fail)).presets()


@contextmanager
def _loses_the_first_answer() -> Iterator[tuple[str, list[str]]]:
    """A server that takes the first request and hangs up, and answers the second."""
    requests: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for answer in (b"", b'HTTP/1.1 201 Created\r\nContent-Length: 22\r\n\r\n{"id":"s123456789abc"}'):
                connection, _ = listener.accept()
                with connection:
                    requests.append(connection.recv(65536).decode())
                    connection.sendall(answer)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        thread.join(5)
