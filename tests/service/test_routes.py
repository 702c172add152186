"""What every route owes: one error shape, strict queries, strict hosts, strict JSON, a true OpenAPI document."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.app import create_app
from service.pages import encode_token
from tests.service.conftest import Serve
from tests.service.helpers import PROBLEM_KEYS, settings_for
from tests.studies import SMALLEST, document
from trials.spec import preset_names, preset_text


def _document() -> dict[str, Any]:
    return create_app(settings_for(Path("/nowhere"))).openapi()


DOCUMENT = _document()
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]


@pytest.fixture(scope="module")
def study_id(client: httpx.Client) -> str:
    return client.post("/v1/studies", json=SMALLEST).json()["id"]


def fill(path: str, **values: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], "nothing"), path)


def test_the_routes_are_those_that_were_agreed():
    assert sorted(OPERATIONS) == [
        ("/healthz", "get"),
        ("/readyz", "get"),
        ("/v1/presets", "get"),
        ("/v1/presets/{name}", "get"),
        ("/v1/studies", "get"),
        ("/v1/studies", "post"),
        ("/v1/studies/{study_id}", "get"),
        ("/v1/studies/{study_id}/analysis", "get"),
        ("/v1/studies/{study_id}/cancel", "post"),
        ("/v1/studies/{study_id}/export", "get"),
        ("/v1/studies/{study_id}/report.html", "get"),
        ("/v1/studies/{study_id}/resume", "post"),
        ("/v1/studies/{study_id}/trials", "get"),
        ("/v1/studies/{study_id}/trials/{trial_key}", "get"),
    ]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_unknown_query_parameters_are_refused_everywhere(client: httpx.Client, study_id: str, path: str, method: str):
    url = fill(path, study_id=study_id, name=preset_names()[0])
    answer = client.request(method, url, params={"pagesize": "1"})
    assert answer.status_code == 422
    fault = answer.json()["errors"][0]
    assert fault["pointer"] == "?pagesize"
    names = [p["name"] for p in DOCUMENT["paths"][path][method].get("parameters", []) if p["in"] == "query"]
    if "page_size" in names:
        assert "did you mean 'page_size'?" in fault["detail"]


@pytest.mark.parametrize(("path", "method"), [o for o in OPERATIONS if "{" in o[0]])
def test_unknown_things_are_404_everywhere(client: httpx.Client, path: str, method: str):
    answer = client.request(method, fill(path))
    assert answer.status_code == 404
    assert "'nothing'" in answer.json()["detail"]


@pytest.mark.parametrize("path", list(DOCUMENT["paths"]))
def test_other_methods_are_405_everywhere(client: httpx.Client, path: str):
    allowed = sorted(method.upper() for method in DOCUMENT["paths"][path])
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - set(allowed):
        answer = client.request(method, fill(path))
        assert answer.status_code == 405
        assert answer.headers["allow"] == ", ".join(allowed)


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/study", "/v1/studies/", "/v1//studies", "/v1/studies/a/b/c", "/%2e%2e/etc"]
)
def test_other_paths_are_404(client: httpx.Client, path: str):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "parameter", "values"),
    [
        ("/v1/studies", "page_size", ["0", "501", "ten", "", "1.5"]),
        ("/v1/studies", "page_token", ["", "abc", "%%%", "W10", "x" * 1000]),
        ("/v1/studies", "state", ["running", "DONE", ""]),
        ("/v1/studies", "q", ["x" * 101]),
        ("/v1/studies/{study_id}/trials", "page_size", ["0", "501"]),
        ("/v1/studies/{study_id}/trials", "page_token", ["abc"]),
        ("/v1/studies/{study_id}/trials", "state", ["QUEUED"]),
        ("/v1/studies/{study_id}/trials", "normaliser", ["layernorm", "batch_norm"]),
        ("/v1/studies/{study_id}/export", "format", ["xlsx", ""]),
    ],
)
def test_bad_query_values_are_422_with_their_place(
    client: httpx.Client, study_id: str, path: str, parameter: str, values: list[str]
):
    for value in values:
        answer = client.get(fill(path, study_id=study_id), params={parameter: value})
        assert answer.status_code == 422, value
        assert answer.json()["errors"][0]["pointer"] == f"?{parameter}"


def test_a_parameter_given_twice_is_refused(client: httpx.Client):
    answer = client.get("/v1/studies?state=QUEUED&state=RUNNING")
    assert answer.status_code == 422
    assert "more than once" in answer.json()["detail"]


def test_a_token_keeps_to_its_listing(client: httpx.Client, study_id: str):
    client.post("/v1/studies", json=SMALLEST)
    token = client.get("/v1/studies", params={"page_size": 1}).json()["next_page_token"]
    assert client.get("/v1/studies", params={"page_size": 2, "page_token": token}).status_code == 200
    assert client.get("/v1/studies", params={"state": "QUEUED", "page_token": token}).status_code == 422
    assert client.get(f"/v1/studies/{study_id}/trials", params={"page_token": token}).status_code == 422


def test_listing_by_state_and_name(client: httpx.Client):
    made = client.post("/v1/studies", json=document(name="a rare_name")).json()
    found = client.get("/v1/studies", params={"q": "RARE_", "state": "QUEUED"}).json()
    assert [item["id"] for item in found["items"]] == [made["id"]]
    assert "spec" not in found["items"][0]
    assert found["items"][0].keys() | {"spec"} == made.keys()
    assert client.get("/v1/studies", params={"q": "rare_", "state": "RUNNING"}).json() == {
        "items": [],
        "next_page_token": None,
    }


@pytest.mark.parametrize(
    "host", ["example.org", "127.0.0.1.example.org", "169.254.1.1:8080", "[::2]", "evil@127.0.0.1", "0.0.0.0"]
)
@pytest.mark.parametrize("path", ["/v1/studies", "/healthz", "/docs", "/nothing"])
def test_a_foreign_host_is_refused(client: httpx.Client, host: str, path: str):
    answer = client.get(path, headers={"Host": host})
    assert answer.status_code == 400


@pytest.mark.parametrize("host", ["localhost", "LocalHost:1", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:8080"])
def test_loopback_by_any_name_is_served(client: httpx.Client, host: str):
    assert client.get("/healthz", headers={"Host": host}).status_code == 200


def test_an_allowed_host_is_served(serve: Serve, tmp_path: Path):
    client = serve(settings_for(tmp_path, allowed_hosts=("Studies.example",)))
    assert client.get("/healthz", headers={"Host": "studies.example:443"}).status_code == 200
    assert client.get("/healthz", headers={"Host": "x.studies.example"}).status_code == 400


@pytest.mark.parametrize(
    "origin", ["http://example.org", "null", "http://127.0.0.1:1", "http://localhost", "file://", ""]
)
def test_another_sites_page_is_refused(client: httpx.Client, origin: str):
    answer = client.post("/v1/studies", json=SMALLEST, headers={"Origin": origin})
    assert answer.status_code == 403


def test_the_services_own_page_is_served(client: httpx.Client):
    host = f"127.0.0.1:{client.base_url.port}"
    assert client.get("/v1/studies", headers={"Origin": f"http://{host}"}).status_code == 200


def test_an_error_of_the_services_own_tells_no_traceback(tmp_path: Path):
    import anyio

    app = create_app(settings_for(tmp_path))

    @app.get("/breaks")
    def breaks() -> None:
        raise RuntimeError("secret thought")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/breaks")

    answer = anyio.run(ask)
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json().keys() == PROBLEM_KEYS
    assert "secret" not in answer.text


def test_presets(client: httpx.Client):
    items = client.get("/v1/presets").json()["items"]
    assert [item["name"] for item in items] == preset_names()
    for item in items:
        preset = client.get(f"/v1/presets/{item['name']}").json()
        assert preset["text"] == preset_text(item["name"])
        checked = client.post("/v1/studies", params={"validate_only": "true"}, json=preset["spec"])
        if item["plan"]["trials"] <= 2000:  # the cap of this service
            assert checked.json()["plan"] == item["plan"]


def test_an_unknown_preset_is_told_the_nearest(client: httpx.Client):
    answer = client.get("/v1/presets/batch-size-digit")
    assert answer.status_code == 404
    assert "did you mean 'batch-size-digits'?" in answer.json()["detail"]


def test_documented_statuses_name_the_error_shape():
    for path, method in OPERATIONS:
        for status, answer in DOCUMENT["paths"][path][method]["responses"].items():
            if int(status) >= 400:
                schema = answer["content"]["application/problem+json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/Problem"}, (path, status)


def test_every_reference_of_the_document_leads_somewhere():
    schemas = DOCUMENT["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert names <= schemas.keys()
    assert {"StudySpec", "Problem", "Fault"} <= names


def test_the_body_is_documented_with_examples_that_are_accepted(client: httpx.Client):
    content = DOCUMENT["paths"]["/v1/studies"]["post"]["requestBody"]["content"]
    assert content.keys() == {"application/json", "application/yaml"}
    for media, described in content.items():
        assert described["schema"] == {"$ref": "#/components/schemas/StudySpec"}
        example = described["example"]
        body = example if isinstance(example, str) else json.dumps(example)
        answer = client.post(
            "/v1/studies", params={"validate_only": "true"}, content=body, headers={"Content-Type": media}
        )
        assert answer.status_code == 200


def test_answers_have_the_documented_shape(client: httpx.Client, study_id: str):
    study = client.get(f"/v1/studies/{study_id}").json()
    assert study.keys() == set(DOCUMENT["components"]["schemas"]["StudyView"]["properties"])
    assert study["links"].keys() == set(DOCUMENT["components"]["schemas"]["LinksView"]["properties"])


def test_docs_and_health(client: httpx.Client):
    assert client.get("/healthz").json() == {"status": "alive"}
    assert "swagger" in client.get("/docs").text.lower()
    assert client.get("/openapi.json").json() == DOCUMENT


def test_readiness_names_what_is_missing(client: httpx.Client):
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/parts/ray"]


def test_readiness_of_the_storage(serve: Serve, tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    client = serve(settings_for(tmp_path, storage=str(tmp_path / "file")))
    pointers = [fault["pointer"] for fault in client.get("/readyz").json()["errors"]]
    assert pointers == ["/parts/storage", "/parts/ray"]


def test_readiness_leaves_nothing_in_the_storage(client: httpx.Client, serve: Serve, tmp_path: Path):
    again = serve(settings_for(tmp_path))
    again.get("/readyz")
    assert list(Path(tmp_path, "studies").iterdir()) == []


def test_tokens_of_ones_own_making_are_422(client: httpx.Client, study_id: str):
    """The digest in a token is no secret; what it leads to must be checked."""
    positions = [
        ("0001-01-01T00:00:00+23:59", "s"),
        ("9999-12-31T23:59:59-23:59", "s"),
        ("2026-12-01T00:00:00", "s"),
        ("2026-12-01T00:00:00+00:00", "\ud800"),
        ("2026-12-01T00:00:00+00:00", "\0"),
    ]
    for position in positions:
        token = encode_token(("studies", None, None), position)
        assert client.get("/v1/studies", params={"page_token": token}).status_code == 422, position
    for place in (-1, 17, 2**70):
        token = encode_token(("trials", study_id, None, None), (place,))
        answer = client.get(f"/v1/studies/{study_id}/trials", params={"page_token": token})
        assert answer.status_code == 422, place
    assert client.get("/v1/studies", params={"q": "\0"}).status_code == 422


def test_warnings_name_what_is_probably_not_meant(client: httpx.Client, study_id: str):
    doubtful = document(seeds=1)
    checked = client.post("/v1/studies", params={"validate_only": "true"}, json=doubtful).json()
    assert checked["valid"] is True
    assert checked["warnings"] != []
    assert all(warning.keys() == {"pointer", "detail"} for warning in checked["warnings"])
    assert any("seed" in warning["pointer"] + warning["detail"] for warning in checked["warnings"])
    study = client.post("/v1/studies", json=doubtful).json()
    assert study["warnings"] == checked["warnings"]
    assert client.get(f"/v1/studies/{study['id']}").json()["warnings"] == checked["warnings"]
    items = {item["id"]: item["warnings"] for item in client.get("/v1/studies").json()["items"]}
    assert items[study["id"]] == checked["warnings"]
    schema = DOCUMENT["components"]["schemas"]
    for shape in ("StudyView", "StudyItem", "Validation"):
        assert schema[shape]["properties"]["warnings"]["items"] == {"$ref": "#/components/schemas/Fault"}


def test_readiness_without_mlflow_is_degraded(serve: Serve, tmp_path: Path, ray: Any):
    client = serve(settings_for(tmp_path, ray_dashboard_url=ray.url))
    answer = client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["status"] == "degraded"
    assert answer.json()["parts"]["ray"] == "ok"
    assert "does not answer" in answer.json()["parts"]["mlflow"]


def test_a_database_that_breaks_is_503(serve: Serve, tmp_path: Path):
    import sqlite3

    client = serve(settings_for(tmp_path))
    with sqlite3.connect(tmp_path / "normstudy.db") as connection:
        connection.execute("DROP TABLE idempotency_keys")
        connection.execute("DROP TABLE studies")
    for answer in (client.get("/v1/studies"), client.post("/v1/studies", json=SMALLEST)):
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
    assert client.get("/healthz").status_code == 200
