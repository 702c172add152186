"""Page tokens and slugs, for any input."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.cluster import slug, submission_id
from service.pages import decode_token, encode_token
from service.problems import Invalid

LISTING = st.lists(st.text() | st.none(), max_size=4)


@given(LISTING, st.text(max_size=30), st.integers(min_value=0, max_value=2**53))
def test_a_token_says_where_to_go_on(listing: list[str | None], text: str, number: int):
    token = encode_token(listing, (text, number))
    assert re.fullmatch(r"[A-Za-z0-9_-]+", token), "it travels in a URL as it is"
    assert decode_token(token, listing, (str, int)) == [text, number]


@given(LISTING, LISTING, st.integers())
def test_a_token_of_another_listing_is_refused(made_for: list[str | None], used_for: list[str | None], place: int):
    if made_for != used_for:
        with pytest.raises(Invalid, match="another listing"):
            decode_token(encode_token(made_for, (place,)), used_for, (int,))


@given(st.text() | st.text(string.ascii_letters + string.digits + "-_=", max_size=600))
def test_anything_else_is_refused_and_nothing_breaks(token: str):
    with pytest.raises(Invalid, match="page_token") as refused:
        decode_token(token, ("x",), (int,))
    assert refused.value.errors[0].pointer == "?page_token"


@given(st.integers())
def test_a_position_of_another_kind_is_refused(place: int):
    with pytest.raises(Invalid, match="not a token"):
        decode_token(encode_token((), (place,)), (), (str,))
    with pytest.raises(Invalid, match="not a token"):
        decode_token(encode_token((), (True,)), (), (int,))


def test_a_lone_surrogate_is_refused():
    with pytest.raises(Invalid, match="not a token"):
        decode_token(encode_token((), ("\ud800",)), (), (str,))


@given(st.text(max_size=200))
def test_a_slug_is_short_and_plain(name: str):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug(name))
    assert len(slug(name)) <= 40


def test_slugs_as_they_look():
    assert slug("Batch size: tanh, W=64 (v2)") == "batch-size-tanh-w-64-v2"
    assert slug("…") == "study"
    assert submission_id("My Study", "s0123456789ab", 2) == "my-study-s0123456789ab-a2"
