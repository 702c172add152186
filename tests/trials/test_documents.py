"""Text → document: strict, and never an exception of another kind."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.spec import DocumentError, parse_document


def test_yaml_reads_exponents_as_the_numbers_they_are():
    assert parse_document("a: [1e-3, 1E5, -2e+2, 0.001, .5]", "yaml") == {"a": [0.001, 1e5, -200.0, 0.001, 0.5]}
    assert parse_document("a: ['1e-3', 2026-01-01]", "yaml") == {"a": ["1e-3", "2026-01-01"]}


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("a: &x 1\nb: *x", "yaml", "aliases"),
        ("a: 1\na: 2", "yaml", "appears twice (line 2)"),
        ("a: {b: 1, b: 2}", "yaml", "appears twice"),
        ("1: 2", "yaml", "keys must be text"),
        ("{", "yaml", "not well-formed YAML"),
        ("a: !!python/object/apply:os.system [x]", "yaml", "not well-formed YAML"),
        ('a: !!bool "x"', "yaml", "not well-formed YAML"),
        ('a: !!timestamp "x"', "yaml", "not well-formed YAML"),
        ("--- a\n--- b", "yaml", "not well-formed YAML"),
        ("[" * 5000, "yaml", "nested deeper"),
        ("[" * 30 + "]" * 30, "yaml", "nested deeper"),
        ('{"a": NaN}', "json", "NaN"),
        ('{"a": -Infinity}', "json", "Infinity"),
        ('{"a": 1, "a": 2}', "json", "appears twice"),
        ("{", "json", "not well-formed JSON"),
        ("", "json", "not well-formed JSON"),
        ("[" * 100_000, "json", "nested deeper"),
        ("1" * 5000, "json", "not well-formed JSON"),
        (b"\xff\xfe", "json", "not UTF-8"),
    ],
)
def test_refused_with_words(text, kind, words):
    with pytest.raises(DocumentError) as caught:
        parse_document(text, kind)
    assert words in str(caught.value)


@given(st.text(max_size=200), st.sampled_from(["json", "yaml"]))
def test_any_text_is_read_or_refused(text, kind):
    try:
        parse_document(text, kind)
    except DocumentError as error:
        assert str(error)


@given(
    st.dictionaries(
        st.text(), st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    )
)
def test_json_round_trip(value):
    assert parse_document(json.dumps(value), "json") == value
