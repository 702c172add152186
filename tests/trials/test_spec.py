"""The study document: what is accepted, and how a fault is told."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.studies import document, spec
from trials.plan import make_plan
from trials.spec import (
    BatchSizeSlope,
    Normaliser,
    SpecError,
    facts_for,
    load_preset,
    parse_document,
    parse_spec,
    preset_names,
    preset_text,
    warnings_of,
)

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
        ("version", True, "/version", "the whole number 1, not True"),
        ("version", 1.0, "/version", "the whole number 1, not 1.0"),
        ("data.dataset", "digit", "/data/dataset", "did you mean 'digits'"),
        ("data.dataset", "parquet", "/data/path", "required for data set 'parquet'"),
        ("data.dataset", "npz", "/data/path", "required for data set 'npz'"),
        ("data.dataset", "images", "/data/path", "required for data set 'images'"),
        ("data.path", "x", "/data/path", "no meaning"),
        ("data.synthetic", {}, "/data/synthetic", "no meaning"),
        ("training.budget", {}, "/training/budget", "exactly one of"),
        ("training.budget.updates", 3, "/training/budget", "exactly one of"),
        ("training.momentum", 0.5, "/training/momentum", "optimiser 'momentum'"),
        ("training.schedule", {"final": 0.5}, "/training/schedule/final", "schedule 'cosine'"),
        ("training.schedule", {"kind": "cosine", "every": 0.5}, "/training/schedule/every", "schedule 'step'"),
        ("training.schedule", {"kind": "cosine", "factor": 0.5}, "/training/schedule/factor", "schedule 'step'"),
        ("training.schedule", {"kind": "step", "every": 5e-324}, "/training/schedule/every", "or equal to 0.0001"),
        ("training.scaling_batch_size", 8, "/training/scaling_batch_size", "without scaling"),
        ("model.channels", [4], "/model/channels", "no meaning for model kind 'mlp'"),
        ("model.kernel", 5, "/model/kernel", "no meaning for model kind 'mlp'"),
        ("model.heads", 2, "/model/heads", "no meaning for model kind 'mlp'"),
        ("model.patch", 2, "/model/patch", "no meaning for model kind 'mlp'"),
        ("space.channels", [[4], [8]], "/space/channels", "no meaning for model kind 'mlp'"),
        ("space.stride", [1, 2], "/space/stride", "no meaning for model kind 'mlp'"),
        ("space.pooling", ["max"], "/space/pooling", "no meaning for model kind 'mlp'"),
        ("space.channels", [[4, 0]], "/space/channels/0/1", "greater than or equal to 1"),
        ("space.channels", [[4], [4]], "/space/channels", "listed twice"),
        ("space.gain", [1], "/space/gain/0", "valid boolean"),
        ("space.normaliser", ["norm_like", "patch_norm"], "/space/normaliser/1", "does not fit model kind 'mlp'"),
        ("probes", {"ever": 3}, "/probes/ever", "did you mean 'every'"),
        ("paper", {"row": "x"}, "/paper/outcome", "required"),
        ("hypotheses", [{"arms": ["layer_norm"], "direction": "flat"}], "/hypotheses/0/arms/0", "not among"),
        ("hypotheses", [{"arms": ["none"], "direction": "down"}], "/hypotheses/0/direction", "not one of"),
        ("hypotheses", [{"kind": "rankin"}], "/hypotheses/0/kind", "did you mean 'ranking'"),
        ("hypotheses", [{"kind": 3}], "/hypotheses/0/kind", "3 is not one of the valid values"),
        ("hypotheses", [{"kind": ["ranking"]}], "/hypotheses/0/kind", "not one of the valid values"),
        ("hypotheses", ["flat"], "/hypotheses/0", "must be a mapping"),
        ("hypotheses", [{"direction": "flat"}], "/hypotheses/0/arms", "required, but missing"),
        ("hypotheses", [{"arms": [], "direction": "flat"}], "/hypotheses/0/arms", "at least 1"),
        ("hypotheses", [{"arms": ["none", "none"], "direction": "flat"}], "/hypotheses/0/arms", "listed twice"),
        ("hypotheses", [{"kind": "ranking"}], "/hypotheses/0/tiers", "required, but missing"),
        ("hypotheses", [{"kind": "ranking", "tiers": [["none"]]}], "/hypotheses/0/tiers", "at least 2"),
        ("hypotheses", [{"kind": "ranking", "tiers": [["none"], []]}], "/hypotheses/0/tiers/1", "at least 1"),
        ("hypotheses", [{"kind": "ranking", "tiers": [["none"], ["none"]]}], "/hypotheses/0/tiers", "listed twice"),
        (
            "hypotheses",
            [{"kind": "ranking", "tiers": [["none"], ["non"]]}],
            "/hypotheses/0/tiers/1/0",
            "did you mean 'none'",
        ),
        (
            "hypotheses",
            [{"kind": "ranking", "tiers": [["none"], ["norm_like", "rms_norm"]]}],
            "/hypotheses/0/tiers/1/1",
            "not among",
        ),
        (
            "hypotheses",
            [{"kind": "ranking", "tiers": [["none"], ["norm_like"]], "ranking": 1}],
            "/hypotheses/0/ranking",
            "unknown key",
        ),
        ("hypotheses", [{"kind": "width_peak", "arms": ["none"]}], "/hypotheses/0", "three levels of width"),
        ("hypotheses", [{"kind": "geometry", "arms": ["none"], "shape": "cloud"}], "/hypotheses/0", "probes"),
        ("hypotheses", [{"kind": "geometry", "arms": ["none"], "shape": "disk"}], "/hypotheses/0/shape", "'disc'"),
        ("resources.packs_in_flight", 0, "/resources/packs_in_flight", "greater than or equal to 1"),
        ("space.width", [2, 4], "/model/width", "say it in one place"),
    ],
)
def test_fault_is_told_with_its_place(path, value, pointer, words):
    found = issues(**{path: value})
    assert list(found) == [pointer]
    assert words in found[pointer]


CNN = {"kind": "cnn", "channels": [4, 8]}
CLOUD = {"kind": "geometry", "arms": ["rms_norm"], "shape": "cloud"}
ATTENTION = {"kind": "attention", "width": 8, "heads": 2}


@pytest.mark.parametrize(
    ("model", "changes", "pointer", "words"),
    [
        ({"kind": "cnn"}, {}, "/model/channels", "required for model kind 'cnn'"),
        ({**CNN, "width": 64}, {}, "/model/width", "its channels"),
        ({**CNN, "depth": 2}, {}, "/model/depth", "its channels"),
        (CNN, {"space.width": [8, 16]}, "/space/width", "its channels"),
        (CNN, {"space.depth": [1, 2]}, "/space/depth", "its channels"),
        (CNN, {"space.channels": [[4], [8]]}, "/model/channels", "say it in one place"),
        (CNN, {"hypotheses": [{"kind": "width_peak", "arms": ["none"]}]}, "/hypotheses/0", "not for model kind 'cnn'"),
        ({"placement": "post"}, {"hypotheses": [CLOUD, CLOUD], "probes": {}}, "/model/placement", "raw input"),
        ({}, {"space.placement": ["post"], "hypotheses": [CLOUD], "probes": {}}, "/space/placement/0", "raw input"),
        ({**CNN, "heads": 2}, {}, "/model/heads", "no meaning for model kind 'cnn'"),
        (CNN, {"space.normaliser": ["none", "norm_like"]}, "/space/normaliser/1", "does not fit model kind 'cnn'"),
        ({**ATTENTION, "kernel": 5}, {}, "/model/kernel", "no meaning for model kind 'attention'"),
        ({**ATTENTION, "width": 9}, {}, "/model/width", "not a multiple of the 2 heads"),
        ({"kind": "attention", "heads": 3}, {"space.width": [9, 16]}, "/space/width/1", "not a multiple of the 3"),
        ({**ATTENTION, "depth": 0}, {}, "/model/depth", "at least one block"),
        (ATTENTION, {"space.depth": [1, 0]}, "/space/depth/1", "at least one block"),
        (ATTENTION, {"space.normaliser": ["group_norm"]}, "/space/normaliser/0", "does not fit"),
        (
            {"placement": "post"},
            {"space.normaliser": ["none", "affine_like"]},
            "/model/placement",
            "affine_like has no",
        ),
        ({**CNN, "placement": "post"}, {"space.normaliser": ["patch_norm"]}, "/model/placement", "patch_norm has no"),
        (
            {},
            {"space.placement": ["pre", "post"], "space.normaliser": ["gradient_only", "norm_like_half"]},
            "/space/placement/1",
            "gradient_only, norm_like_half have no",
        ),
        ({"gain": True}, {"space.gain": [False, True]}, "/model/gain", "say it in one place"),
        ({"activation": "relu"}, {"space.activation": ["tanh"]}, "/model/activation", "say it in one place"),
        ({}, {"training.optimiser": "adam", "space.optimiser": ["sgd"]}, "/training/optimiser", "say it in one place"),
        (
            {},
            {"training.weight_decay": 0.1, "space.weight_decay": [0.2]},
            "/training/weight_decay",
            "say it in one place",
        ),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(model, changes, pointer, words):
    found = issues(model=model, **({"hypotheses": [], "space.normaliser": ["none", "rms_norm"]} | changes))
    assert list(found) == [pointer]
    assert words in found[pointer]


@pytest.mark.parametrize("kind", ["mlp", "residual_mlp", "cnn", "attention"])
def test_every_normaliser_belongs_to_some_kind_of_model(kind):
    only_dense = {"norm_like", "norm_like_half", "affine_like", "gradient_only"}
    only_cnn = {"group_norm", "instance_norm", "patch_norm", "patch_norm_affine"}
    model = CNN if kind == "cnn" else {"kind": kind}
    everything = get_args(Normaliser)
    fitting = [name for name in everything if name not in (only_dense if kind == "cnn" else only_cnn)]
    spec(model=model, hypotheses=[], **{"space.normaliser": fitting})
    found = issues(model=model, hypotheses=[], **{"space.normaliser": list(everything)})
    assert {everything[int(pointer.rpartition("/")[2])] for pointer in found} == set(everything) - set(fitting)
    after = [
        "none",
        "batch_norm",
        "layer_norm",
        "rms_norm",
        *(["group_norm", "instance_norm"] if kind == "cnn" else []),
    ]
    spec(model=model | {"placement": "post"}, hypotheses=[], **{"space.normaliser": after})


@pytest.mark.parametrize("shape", ["points", "circle", "disc"])
def test_geometry_has_a_radius_where_its_shape_has(shape):
    claim = {"kind": "geometry", "arms": ["norm_like"], "shape": shape}
    assert "required" in issues(hypotheses=[claim], probes={})["/hypotheses/0/radius"]
    spec(hypotheses=[{**claim, "radius": 1.0}, {**claim, "shape": "cloud"}], probes={})
    cloud = {**claim, "shape": "cloud", "radius": 1.0}
    assert "no meaning" in issues(hypotheses=[cloud], probes={})["/hypotheses/0/radius"]


def test_hypothesis_without_a_kind_is_about_the_slope():
    (claim,) = spec(hypotheses=[{"arms": ["none"], "direction": "flat"}]).hypotheses
    assert isinstance(claim, BatchSizeSlope)
    peak = spec(**{"model": {}, "space.width": [1, 4, 16], "hypotheses": [{"kind": "width_peak", "arms": ["none"]}]})
    assert [h.kind for h in peak.hypotheses] == ["width_peak"]


@pytest.mark.parametrize(("path", "pointer"), [("seeds", "/seeds"), ("resources.packs_in_flight", None)])
def test_an_empty_list_is_one_fault(path: str, pointer: str | None):
    with pytest.raises(SpecError) as caught:
        parse_spec(document(**{path: []}))
    assert len(caught.value.issues) == 1
    if pointer:
        assert "at least 1 item" in caught.value.issues[0].detail


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


def test_content_hash_ignores_new_keys_at_their_defaults():
    stated = spec(
        **{
            "model.placement": "pre",
            "model.gain": False,
            "training.weight_decay": 0.0,
            "training.schedule": {"kind": "constant"},
            "training.scaling": "none",
            "probes": None,
            "paper": {"row": "figure 2", "outcome": "seen"},
        }
    )
    assert stated.content_hash() == spec().content_hash()
    for changes in (
        {"model.gain": True},
        {"training.weight_decay": 0.1},
        {"probes": {}},
        {"space.weight_decay": [0.0]},
        {"training.schedule": {"kind": "cosine"}},
    ):
        assert spec(**changes).content_hash() != spec().content_hash()


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, "training.weight_decay"),
        ({}, "resources.gpus_per_pack"),
        ({"training.optimiser": "momentum"}, "training.momentum"),
        ({"training.schedule": {"kind": "cosine"}}, "training.schedule.final"),
        ({"data": {"dataset": "synthetic", "synthetic": {}}}, "data.synthetic.separation"),
        ({"data": {"dataset": "synthetic", "synthetic": {}}}, "data.synthetic.spread"),
    ],
)
def test_minus_zero_is_zero(changes: dict[str, Any], path: str):
    minus, plus = (spec(**changes, **{path: zero}) for zero in (-0.0, 0.0))
    assert minus.canonical_json() == plus.canonical_json()
    assert minus.content_hash() == plus.content_hash()
    axis = spec(**{"space.weight_decay": [-0.0, 0.1]})
    assert axis.canonical_json() == spec(**{"space.weight_decay": [0.0, 0.1]}).canonical_json()


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": [3, 1]},
        {"model": {"depth": 2}, "space.width": [8, 64], "space.activation": ["relu"]},
        {"model": {"kind": "cnn"}, "space.channels": [[4], [4, 8]], "space.normaliser": ["none"], "hypotheses": []},
        {"training.optimiser": "momentum", "training.scaling": "linear", "training.schedule": {"kind": "step"}},
    ],
)
def test_canonical_json_reads_back_as_the_same_study(changes):
    """The service keeps a study in this form: keys at their defaults are no fault, even beside an axis."""
    study = spec(**changes)
    again = parse_spec(parse_document(study.canonical_json(), "json"))
    assert again == study
    assert again.content_hash() == study.content_hash()


def test_version_1_document_stays_readable():
    """A golden document of the first release: its meaning and its hash may never change."""
    study = parse_spec(parse_document((GOLDEN / "study-v1.yaml").read_text(), "yaml"))
    canonical = json.loads(study.canonical_json())
    assert later_keys(canonical, json.loads((GOLDEN / "study-v1.json").read_text()), study) == {
        "/data/synthetic",
        "/training/budget/updates",
        "/training/budget/samples",
        "/probes",
        "/paper",
        *(f"/model/{n}" for n in ("placement", "gain", "channels", "kernel", "stride", "pooling", "heads", "patch")),
        *(f"/training/{n}" for n in ("momentum", "weight_decay", "schedule", "scaling", "scaling_batch_size")),
        *(f"/space/{n}" for n in ("placement", "gain", "channels", "kernel", "stride", "pooling")),
        *(f"/space/{n}" for n in ("optimiser", "weight_decay")),
    }
    assert study.content_hash() == (GOLDEN / "study-v1.sha256").read_text().strip()


def later_keys(canonical: Any, golden: Any, part: Any, place: str = "") -> set[str]:
    """Keys that the golden form lacks; asserts that they are at their defaults and all else is equal."""
    if not isinstance(golden, dict):
        assert canonical == golden, place
        return set()
    later = {f"{place}/{key}" for key in canonical.keys() - golden.keys()}
    for key in canonical.keys() - golden.keys():
        assert getattr(part, key) == type(part).model_fields[key].default, f"{place}/{key}"
    for key, value in golden.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for index, item in enumerate(value):
                later |= later_keys(canonical[key][index], item, getattr(part, key)[index], f"{place}/{key}/{index}")
        else:
            later |= later_keys(canonical[key], value, getattr(part, key), f"{place}/{key}")
    return later


@pytest.mark.parametrize("name", ["study-v1-full", "study-v1-attention"])
def test_document_of_the_second_release_stays_readable(name):
    """Golden documents that use every key the second release added, with their hash and the keys of their trials."""
    study = parse_spec(parse_document((GOLDEN / f"{name}.yaml").read_text(), "yaml"))
    assert json.loads(study.canonical_json()) == json.loads((GOLDEN / f"{name}.json").read_text())
    assert study.content_hash() == (GOLDEN / f"{name}.sha256").read_text().strip()
    laid = make_plan(study, facts_for(study.data, []))
    keys = [f"{pack.label} {pack.key} {pack.config.key} {pack.config.cell_key}" for pack in laid.packs]
    assert keys == (GOLDEN / f"{name}.keys").read_text().splitlines()


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
    st.sampled_from(
        ["version", "name", "data", "model", "training", "space", "seeds", "hypotheses", "probes", "resources"]
    ),
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
    cnn = spec(model=CNN, hypotheses=[], **{"space.normaliser": ["batch_norm"], "space.batch_size": [1]})
    assert warnings_of(cnn) == [], "its positions make a batch of many"


def test_placement_post_beside_pre_is_told_where_geometry_is_claimed():
    both = {"space.placement": ["pre", "post"], "space.normaliser": ["rms_norm"], "probes": {}}
    assert [w.pointer for w in warnings_of(spec(**both, hypotheses=[CLOUD]))] == ["/space/placement/1"]
    assert warnings_of(spec(**both, hypotheses=[])) == []


def test_gain_beside_an_arm_without_one_is_told():
    without = {"space.normaliser": ["none", "norm_like", "gradient_only"]}
    (warning,) = warnings_of(spec(**without, **{"model.gain": True}))
    assert (warning.pointer, warning.detail.split(":")[0]) == ("/model/gain", "none and gradient_only have no gain")
    assert [w.pointer for w in warnings_of(spec(**without, **{"space.gain": [False, True]}))] == ["/space/gain/1"]
    assert warnings_of(spec(**{"model.gain": True, "space.normaliser": ["norm_like"]})) == []


def test_one_seed_is_enough_for_geometry_and_too_few_for_a_ranking():
    claim = {"kind": "geometry", "arms": ["norm_like"], "shape": "circle", "radius": 1}
    order = {"kind": "ranking", "tiers": [["norm_like"], ["none"]]}
    assert warnings_of(spec(seeds=1, probes={}, hypotheses=[claim])) == []
    assert [w.pointer for w in warnings_of(spec(seeds=1, probes={}, hypotheses=[claim, order]))] == ["/seeds"]


def test_every_normaliser_of_the_document_has_its_facts():
    from typing import get_args

    from trials.normalisers import FACTS, in_head
    from trials.spec.base import Normaliser

    assert list(FACTS) == list(get_args(Normaliser))
    assert all(FACTS[in_head(name)].dense for name in FACTS)
