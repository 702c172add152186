"""The study document: what is accepted, and how a fault is told."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.studies import document, spec
from trials.spec import SpecError, load_preset, parse_document, parse_spec, preset_names, preset_text, warnings_of

GOLDEN = Path(__file__).parent / "golden"


def issues(**changes):
    with pytest.raises(SpecError) as caught:
        parse_spec(document(**changes))
    return {issue.pointer: issue.detail for issue in caught.value.issues}


@pytest.mark.parametrize(
    ("path", "value", "pointer", "words"),
    [
        ("space.batch_sise", [4], "/space/batch_sise", "did you mean 'batch_size'"),
        ("training.budget.epoch", 3, "/training/budget/epoch", "did you mean 'epochs'"),
        ("nmae", "x", "/nmae", "did you mean 'name'"),
        ("zzz", 1, "/zzz", "valid here: version, name"),
        ("space.batch_size", [4, 0], "/space/batch_size/1", "greater than or equal to 1"),
        ("space.batch_size", [-4], "/space/batch_size/0", "greater than or equal to 1"),
        ("space.batch_size", [32.5], "/space/batch_size/0", "whole number"),
        ("space.batch_size", [32.0], "/space/batch_size/0", "whole number"),
        ("space.batch_size", ["32"], "/space/batch_size/0", "not text ('32')"),
        ("space.batch_size", [True], "/space/batch_size/0", "valid integer"),
        ("space.batch_size", [None], "/space/batch_size/0", "integer"),
        ("space.batch_size", 4, "/space/batch_size", "such as [4]"),
        ("space.batch_size", [], "/space/batch_size", "at least 1"),
        ("space.batch_size", [4, 4], "/space/batch_size", "listed twice"),
        ("space.batch_size", [10**400], "/space/batch_size/0", "less than or equal"),
        ("space.learning_rate", [0], "/space/learning_rate/0", "greater than 0"),
        ("space.learning_rate", [-0.1], "/space/learning_rate/0", "greater than 0"),
        ("space.learning_rate", [float("nan")], "/space/learning_rate/0", "finite"),
        ("space.learning_rate", [float("inf")], "/space/learning_rate/0", "finite"),
        ("space.learning_rate", ["1e-3"], "/space/learning_rate/0", "without quotes"),
        ("space.learning_rate", [1, 1.0], "/space/learning_rate", "listed twice"),
        ("space.normaliser", ["norm_lik"], "/space/normaliser/0", "did you mean 'norm_like'"),
        ("seeds", 0, "/seeds", "greater than or equal to 1"),
        ("seeds", "five", "/seeds", "not text"),
        ("seeds", [1, 1], "/seeds", "listed twice"),
        ("seeds", [1, -1], "/seeds/1", "greater than or equal to 0"),
        ("seeds", [], "/seeds", "at least 1"),
        ("name", "a/b", "/name", "not a valid name"),
        ("name", "../x", "/name", "not a valid name"),
        ("name", "x" * 101, "/name", "at most 100"),
        ("name", "naïve 🎉", "/name", "not a valid name"),
        ("name", "line\nbreak", "/name", "not a valid name"),
        ("version", 2, "/version", "not one of the valid values"),
        ("data.dataset", "digit", "/data/dataset", "did you mean 'digits'"),
        ("data.dataset", "parquet", "/data/path", "required for data set 'parquet'"),
        ("data.path", "x", "/data/path", "no meaning"),
        ("hypotheses", [{"arms": ["layer_norm"], "direction": "flat"}], "/hypotheses/0/arms/0", "not among"),
        ("hypotheses", [{"arms": ["none"], "direction": "down"}], "/hypotheses/0/direction", "not one of"),
        ("resources.packs_in_flight", 0, "/resources/packs_in_flight", "greater than or equal to 1"),
        ("space.width", [2, 4], "/model/width", "say it in one place"),
    ],
)
def test_fault_is_told_with_its_place(path, value, pointer, words):
    found = issues(**{path: value})
    assert list(found) == [pointer]
    assert words in found[pointer]


@pytest.mark.parametrize("key", ["version", "name", "data", "training", "space", "seeds"])
def test_missing_key_is_named(key):
    broken = document()
    del broken[key]
    with pytest.raises(SpecError) as caught:
        parse_spec(broken)
    assert [(i.pointer, i.detail) for i in caught.value.issues] == [(f"/{key}", "required, but missing")]


def test_all_faults_are_told_at_once():
    assert set(issues(**{"space.batch_size": [0, 1.5], "seeds": 0, "nmae": 1})) == {
        "/space/batch_size/0",
        "/space/batch_size/1",
        "/seeds",
        "/nmae",
    }


@pytest.mark.parametrize("whole", [None, [], "text", 3, True])
def test_document_must_be_a_mapping(whole):
    with pytest.raises(SpecError, match="mapping"):
        parse_spec(whole)


def test_one_slope_level_cannot_answer_a_slope():
    assert "at least two levels" in issues(**{"space.batch_size": [8]})["/hypotheses/0"]


def test_content_hash_ignores_what_cannot_change_a_result():
    plain = spec()
    assert (
        plain.content_hash() == spec(name="other", description="words", resources={"cpus_per_pack": 2}).content_hash()
    )
    assert plain.content_hash() != spec(seeds=3).content_hash()
    assert plain.content_hash() != spec(**{"training.budget.epochs": 3}).content_hash()


def test_canonical_json_reads_back_as_the_same_study():
    study = spec(seeds=[3, 1])
    assert parse_spec(parse_document(study.canonical_json(), "json")) == study


def test_version_1_document_stays_readable():
    """A golden version-1 document: its meaning and its hash may never change."""
    study = parse_spec(parse_document((GOLDEN / "study-v1.yaml").read_text(), "yaml"))
    assert json.loads(study.canonical_json()) == json.loads((GOLDEN / "study-v1.json").read_text())
    assert study.content_hash() == (GOLDEN / "study-v1.sha256").read_text().strip()


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_a_valid_study_named_after_its_file(name):
    assert load_preset(name).name == name
    assert load_preset(name).description
    assert preset_text(name).startswith("#")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(), s, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(["version", "name", "data", "model", "training", "space", "seeds", "hypotheses", "resources"]),
)
def test_any_value_anywhere_is_accepted_or_told(value, key):
    changed = document()
    changed[key] = value
    try:
        parse_spec(changed)
    except SpecError as error:
        assert error.issues
        assert all(i.pointer == "" or i.pointer.startswith("/") for i in error.issues)
        assert all(i.detail for i in error.issues)


def test_what_will_disappoint_is_told():
    assert warnings_of(spec()) == []
    assert [w.pointer for w in warnings_of(spec(seeds=1))] == ["/seeds"]
    assert warnings_of(spec(seeds=1, hypotheses=[])) == []
    alone = spec(**{"space.normaliser": ["norm_like", "batch_norm"], "space.batch_size": [4, 1]})
    assert [w.pointer for w in warnings_of(alone)] == ["/space/batch_size/1"]
