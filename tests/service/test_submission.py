"""POST /v1/studies: what is taken, and how everything else is refused."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from service.submission import request_hash
from tests.service.conftest import Serve
from tests.service.helpers import settings_for
from tests.studies import SMALLEST, document, spec
from trials.spec import preset_text


def post(client: httpx.Client, body: Any, media: str = "application/json", **options: Any) -> httpx.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    headers = {"Content-Type": media, **options.pop("headers", {})}
    return client.post("/v1/studies", content=content, headers=headers, **options)


def count(client: httpx.Client) -> int:
    total, token = 0, None
    while True:
        page = client.get("/v1/studies", params={"page_size": 500} | ({"page_token": token} if token else {})).json()
        total, token = total + len(page["items"]), page["next_page_token"]
        if token is None:
            return total


def test_a_study_is_queued(client: httpx.Client):
    answer = post(client, SMALLEST)
    assert answer.status_code == 201
    study = answer.json()
    assert answer.headers["location"] == f"/v1/studies/{study['id']}" == study["links"]["self"]
    assert len(study["id"]) == 13
    assert study["state"] == "QUEUED"
    assert study["plan"]["trials"] == 16
    assert study["plan"]["cells"] == 8
    assert study["plan"]["cost"]["core_seconds"] > 0
    assert study["spec_hash"] == spec().content_hash()
    assert study["spec"] == json.loads(spec().canonical_json())
    assert study["verdict"] is None
    assert client.get(answer.headers["location"]).json()["spec"] == study["spec"]


@pytest.mark.parametrize(
    "media", ["application/yaml", "text/yaml", "application/x-yaml", "Application/YAML; charset=utf-8"]
)
def test_yaml_is_the_same_study(client: httpx.Client, media: str):
    answer = post(client, yaml.safe_dump(SMALLEST), media)
    assert answer.status_code == 201
    assert answer.json()["spec_hash"] == spec().content_hash()


def test_the_preset_text_can_be_posted(client: httpx.Client):
    answer = post(client, preset_text("batch-size-digits"), "application/yaml")
    assert answer.status_code == 201
    assert answer.json()["plan"]["trials"] == 720


def test_validate_only_starts_nothing(client: httpx.Client):
    before = count(client)
    answer = post(client, SMALLEST, params={"validate_only": "true"})
    assert answer.status_code == 200
    body = answer.json()
    assert body.keys() == {"valid", "spec", "spec_hash", "plan", "warnings"}
    assert body["warnings"] == []
    assert body["valid"] is True
    assert body["plan"]["packs"] == 4
    assert count(client) == before


def test_names_need_not_be_unique(client: httpx.Client):
    assert post(client, SMALLEST).json()["id"] != post(client, SMALLEST).json()["id"]


NOT_ACCEPTABLE = {
    "batch size 0": ({"space.batch_size": [0]}, "/space/batch_size/0"),
    "batch size 32.5": ({"space.batch_size": [32.5]}, "/space/batch_size/0"),
    "batch size 32.0": ({"space.batch_size": [64, 32.0]}, "/space/batch_size/1"),
    "batch size as text": ({"space.batch_size": ["32"]}, "/space/batch_size/0"),
    "batch size larger than the data": ({"space.batch_size": [64, 1300]}, "/space/batch_size/1"),
    "learning rate 0": ({"space.learning_rate": [0]}, "/space/learning_rate/0"),
    "learning rate below 0": ({"space.learning_rate": [0.1, -0.1]}, "/space/learning_rate/1"),
    "learning rate as text": ({"space.learning_rate": [0.001, "1e-3"]}, "/space/learning_rate/1"),
    "one level twice": ({"space.learning_rate": [0.001, 1e-3]}, "/space/learning_rate"),
    "empty axis": ({"space.normaliser": []}, "/space/normaliser"),
    "unknown normaliser": ({"space.normaliser": ["batchnorm"]}, "/space/normaliser/0"),
    "null": ({"space": None}, "/space"),
    "name with a path": ({"name": "../x"}, "/name"),
    "name with a slash": ({"name": "a/b"}, "/name"),
    "name of 300 characters": ({"name": "a" * 300}, "/name"),
    "name with an emoji": ({"name": "study 🎉"}, "/name"),
    "path out of the data roots": ({"data": {"dataset": "parquet", "path": "../../etc/passwd"}}, "/data/path"),
    "absolute path": ({"data": {"dataset": "parquet", "path": "/etc"}}, "/data/path"),
    "another version": ({"version": 2}, "/version"),
    "too many training samples": ({"data.train_samples": 10**6}, "/data/train_samples"),
    "over the cap": ({"seeds": 500}, "/space"),
    "far over the cap": ({"seeds": 10000, "space.learning_rate": [i / 999 for i in range(1, 1000)]}, "/space"),
    "misspelt key": ({"modle": {}}, "/modle"),
    "misspelt nested key": ({"training.budget": {"epoch": 3}}, "/training/budget/epoch"),
    "hypothesis about an absent arm": (
        {"hypotheses": [{"arms": ["layer_norm"], "direction": "flat"}]},
        "/hypotheses/0/arms/0",
    ),
}


@pytest.mark.parametrize("case", NOT_ACCEPTABLE)
def test_what_is_not_acceptable_is_422_with_its_place(client: httpx.Client, case: str):
    changes, place = NOT_ACCEPTABLE[case]
    before = count(client)
    answer = post(client, document(**changes))
    assert answer.status_code == 422
    assert place in [fault["pointer"] for fault in answer.json()["errors"]]
    checked = post(client, document(**changes), params={"validate_only": "true"})
    assert checked.json()["errors"] == answer.json()["errors"]
    assert count(client) == before


def test_all_faults_are_told_at_once(client: httpx.Client):
    answer = post(client, document(**{"space.batch_size": [0], "space.learning_rate": ["1"], "seed": 3}))
    assert {f["pointer"] for f in answer.json()["errors"]} == {"/space/batch_size/0", "/space/learning_rate/0", "/seed"}


def test_a_misspelling_is_told_the_nearest_name(client: httpx.Client):
    answer = post(client, document(**{"training.budget": {"epochs": 3, "epoch": 3}}))
    assert [f["detail"] for f in answer.json()["errors"]] == ["unknown key 'epoch'; did you mean 'epochs'?"]


def test_the_cap_is_told_with_the_count(client: httpx.Client):
    detail = post(client, document(seeds=500)).json()["detail"]
    assert "4,000 trials" in detail
    assert "2,000" in detail


JSON_TEXT = json.dumps(SMALLEST)
MALFORMED = {
    "nothing": ("", "application/json"),
    "half a document": ('{"version": 1', "application/json"),
    "YAML sent as JSON": ("version: 1", "application/json"),
    "NaN": (JSON_TEXT.replace("0.3", "NaN"), "application/json"),
    "infinity": (JSON_TEXT.replace("0.3", "-Infinity"), "application/json"),
    "a key twice": ('{"version": 1, "version": 1}', "application/json"),
    "a nested key twice": (JSON_TEXT.replace('"seeds"', '"data": {}, "seeds"'), "application/json"),
    "not UTF-8": (b'{"name": "\xff"}', "application/json"),
    "UTF-16": (JSON_TEXT.encode("utf-16"), "application/json"),
    "deep JSON": ("[" * 100_000 + "]" * 100_000, "application/json"),
    "deep enough JSON": ("[" * 30 + "]" * 30, "application/json"),
    "deep YAML": ("[" * 20_000 + "]" * 20_000, "application/yaml"),
    "an integer of 10,000 digits": (JSON_TEXT.replace("128", "1" * 10_000), "application/json"),
    "half a YAML document": ("version: [1", "application/yaml"),
    "a tab in YAML": ("version:\n\t- 1", "application/yaml"),
    "a YAML key twice": ("version: 1\nversion: 1", "application/yaml"),
    "a YAML alias": ("a: &a [1]\nb: *a", "application/yaml"),
    "a YAML tag": ("version: !!python/object/apply:os.system [id]", "application/yaml"),
    "two YAML documents": ("version: 1\n---\nversion: 1", "application/yaml"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_is_400(client: httpx.Client, case: str):
    body, media = MALFORMED[case]
    answer = post(client, body, media)
    assert answer.status_code == 400
    assert answer.json()["type"] == "urn:normstudy:problem:malformed"


@pytest.mark.parametrize("body", ["[]", "3", '"text"', "null"])
def test_a_document_that_is_no_mapping(client: httpx.Client, body: str):
    answer = post(client, body)
    assert answer.status_code == 422
    assert "mapping" in answer.json()["detail"]


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_other_media_are_415(client: httpx.Client, media: str):
    assert post(client, SMALLEST, media).status_code == 415


def test_no_media_type_is_415(client: httpx.Client):
    request = client.build_request("POST", "/v1/studies", content=b"{}")
    request.headers.pop("content-type", None)
    assert client.send(request).status_code == 415


def test_a_compressed_body_is_415(client: httpx.Client):
    assert post(client, SMALLEST, headers={"Content-Encoding": "gzip"}).status_code == 415


def test_an_announced_huge_body_is_413(client: httpx.Client):
    assert post(client, b" " * 1_048_577).status_code == 413


def test_a_chunked_huge_body_is_413(client: httpx.Client):
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 32_768

    answer = client.post("/v1/studies", content=chunks(), headers={"Content-Type": "application/json"})
    assert "content-length" not in answer.request.headers
    assert answer.status_code == 413


def test_a_large_yaml_body_is_413_and_the_same_as_json_is_read(client: httpx.Client):
    large = document(seeds=list(range(100)), description="x" * 2000)
    comment = "# " + "x" * 131_072 + "\n"
    assert post(client, comment + yaml.safe_dump(large), "application/yaml").status_code == 413
    assert post(client, json.dumps(large) + " " * 131_072, params={"validate_only": "true"}).status_code == 200


def test_a_body_at_the_limit_is_read(client: httpx.Client):
    text = json.dumps(SMALLEST)
    assert post(client, text + " " * (1_048_576 - len(text)), params={"validate_only": "true"}).status_code == 200


def test_a_client_that_hangs_up_leaves_no_study(client: httpx.Client):
    before = count(client)

    def chunks() -> Iterator[bytes]:
        yield b'{"version": 1,'
        raise RuntimeError("hung up")

    with pytest.raises(RuntimeError, match="hung up"):
        client.post("/v1/studies", content=chunks(), headers={"Content-Type": "application/json"})
    assert client.get("/healthz").status_code == 200
    assert count(client) == before


def test_an_idempotency_key_makes_one_study(client: httpx.Client):
    headers = {"Idempotency-Key": "k-1"}
    first = post(client, SMALLEST, headers=headers)
    again = post(client, yaml.safe_dump(SMALLEST), "application/yaml", headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    assert again.headers["location"] == first.headers["location"]
    other = post(client, document(seeds=3), headers=headers)
    assert other.status_code == 422
    assert other.json()["errors"][0]["pointer"] == "Idempotency-Key:"


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_bad_idempotency_key(client: httpx.Client, key: str):
    assert post(client, SMALLEST, headers={"Idempotency-Key": key}).status_code == 422


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_simultaneous_posts(kind: str, serve: Serve, tmp_path: Path, request: pytest.FixtureRequest):
    """Sixteen clients, a key among each four, while others list."""
    changes = {}
    if kind == "postgresql":
        changes["database_url"] = request.getfixturevalue("postgres").new_database()
    client = serve(settings_for(tmp_path, **changes))

    def work(index: int) -> tuple[int, str]:
        answer = post(client, SMALLEST, headers={"Idempotency-Key": f"key-{index % 4}"})
        assert client.get("/v1/studies").status_code == 200
        return answer.status_code, answer.json()["id"]

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(work, range(32)))
    assert sorted(status for status, _ in made) == [200] * 28 + [201] * 4
    assert len({study_id for _, study_id in made}) == 4
    assert count(client) == 4


@given(st.permutations(list(SMALLEST)))
def test_the_order_of_keys_does_not_matter_to_an_idempotency_key(order: list[str]):
    from trials.spec import parse_spec

    assert request_hash(parse_spec({key: SMALLEST[key] for key in order})) == request_hash(spec())


def test_another_name_is_another_request():
    assert request_hash(spec(name="other")) != request_hash(spec())
    assert request_hash(spec(description="other")) != request_hash(spec())
