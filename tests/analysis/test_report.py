"""The report: one file that asks for nothing, escapes what users wrote, and prints the verdict's own numbers."""

import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest

from analysis import analyse, render_report, wording
from tests.analysis.simulate import absent, as_table, diverged, line, make_results, make_spec

NASTY = '<script>alert("x")</script> {{ 7 * 7 }} & "quotes" </style><img src=https://example.org/x>'
HYPOTHESES = [
    {"kind": "batch_size_slope", "arms": ["norm_like"], "direction": "negative"},
    {"kind": "batch_size_slope", "arms": ["none"], "direction": "positive"},
]


class Reader(HTMLParser):
    """Collects tags with their attributes, ids, and the text a reader sees."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.text, self._quiet = [], [], [], 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self._quiet += tag == "style"

    def handle_endtag(self, tag):
        self._quiet -= tag == "style"

    def handle_data(self, data):
        if not self._quiet:
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def report(spec, table, **provenance):
    analysis = analyse(table, spec, resamples=499)
    return analysis.to_dict(), render_report(analysis, table, spec, provenance)


@pytest.fixture(scope="module")
def whole():
    """A study with a nasty description, diverged and lost trials."""
    spec = make_spec(arms=("none", "norm_like"), seeds=4, hypotheses=HYPOTHESES, description=NASTY)
    results = make_results(spec, line(-0.01), np.random.default_rng(0))
    results[0], results[-1] = diverged(results[0]), absent(results[-1])
    verdict, page = report(spec, as_table(results), versions={"torch": "2.14.1"}, host="<b>node</b>", none=None)
    return spec, verdict, page, Reader(page)


def test_nothing_is_fetched(whole):
    _, _, page, reader = whole
    for tag, attributes in reader.tags:
        assert tag not in {"script", "link", "iframe", "img", "object", "embed", "base", "form", "use", "image"}
        for name, value in attributes.items():
            assert name not in {"src", "srcset", "href", "xlink:href", "action", "data", "poster"}, (tag, name)
            assert not name.startswith("on")
            assert "url(" not in (value or "")
    style = "".join(re.findall(r"<style>(.*?)</style>", page, re.S))
    assert "url(" not in style
    assert "@import" not in style
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    assert "http" not in drawings


def test_ids_are_unique(whole):
    ids = whole[3].ids
    assert len(ids) == len(set(ids))


def test_user_text_is_shown_as_it_was_written_and_does_nothing(whole):
    _, _, page, reader = whole
    assert NASTY in "".join(reader.text)
    assert "<b>node</b>" in "".join(reader.text)
    assert "<script" not in page
    assert html.escape("<script>") in page


def test_the_answer_comes_first(whole):
    _, verdict, page, reader = whole
    order = [
        page.index(f'id="{part}"') for part in ("answer", "slopes", "curves", "heat-maps", "exclusions", "methods")
    ]
    assert order == sorted(order)
    for hypothesis in verdict["hypotheses"]:
        assert hypothesis["sentence"] in reader.words


def test_the_numbers_are_those_of_the_verdict(whole):
    _, verdict, _, reader = whole
    cells = [attributes for tag, attributes in reader.tags if tag == "td"]
    slopes = [a["data-slope"] for a in cells if "data-slope" in a]
    p_values = [a["data-p-holm"] for a in cells if "data-p-holm" in a]
    assert slopes == [str(arm["slope"]) for arm in verdict["arms"]]
    assert p_values == [str(arm["p_holm"]) for arm in verdict["arms"]]
    for arm in verdict["arms"]:
        assert wording.points(arm["slope"]) in reader.words
        assert wording.points_interval(arm["interval"]) in reader.words
        assert arm["reason"][1:] in reader.words


def test_slopes_within_learning_rates_are_those_of_the_verdict(whole):
    _, verdict, _, reader = whole
    cells = [attributes for tag, attributes in reader.tags if tag == "td" and "data-rate-slope" in attributes]
    rates = [rate for arm in verdict["arms"] for rate in arm["by_learning_rate"]]
    assert [(c["data-rate-slope"], c["class"]) for c in cells] == [(str(r["slope"]), r["direction"]) for r in rates]
    for rate in rates:
        assert wording.points(rate["slope"]) in reader.words
        assert wording.points_interval(rate["interval"]) in reader.words


def test_an_arm_that_differs_between_learning_rates_is_told_three_times():
    spec = make_spec(learning_rates=(0.1, 1.0), batch_sizes=(8, 16, 32), seeds=4, hypotheses=HYPOTHESES[:1])
    rates = {0.1: -0.03, 1.0: 0.02}
    results = make_results(spec, lambda c: line(rates[c.learning_rate], 0.7)(c), np.random.default_rng(0), noise=0.002)
    table = as_table(results)
    verdict, page = report(spec, table)
    reader = Reader(page)
    assert verdict["hypotheses"][0]["mixed_over_learning_rates"]
    assert "undecided differs between learning rates" in reader.words
    assert verdict["arms"][0]["reason"][1:] in reader.words
    assert "accuracy falls at 0.1 and rises at 1" in verdict["arms"][0]["reason"]
    assert [a["class"] for tag, a in reader.tags if "data-rate-slope" in a] == ["falls", "rises"]


def test_exclusions_are_printed(whole):
    _, verdict, _, reader = whole
    assert {e["what"] for e in verdict["exclusions"]} >= {
        "lost trials",
        "diverged trials",
        "trials left out for balance",
    }
    for exclusion in verdict["exclusions"]:
        assert exclusion["what"] in reader.words
        assert exclusion["why"] in reader.words


def test_no_exclusions_are_said_to_be_none():
    spec = make_spec(batch_sizes=(8, 16, 32), learning_rates=(0.1,), seeds=3)
    _, page = report(spec, as_table(make_results(spec, line(-0.01), np.random.default_rng(0))))
    assert "None: every planned trial succeeded" in Reader(page).words


def test_methods_and_provenance_are_told(whole):
    spec, verdict, _, reader = whole
    for text in verdict["methods"].splitlines():
        assert text.partition(": ")[2] in reader.words
    assert "does not separate the two" in reader.words
    assert spec.content_hash() in reader.words
    assert "Versions torch" in reader.words
    assert "by epochs: 10 epochs" in reader.words
    shown = "".join(reader.text)
    text = shown[shown.index("{\n") : shown.rindex("}") + 1]
    assert json.loads(text) == json.loads(spec.canonical_json())


def test_a_study_without_hypotheses_says_so():
    spec = make_spec(batch_sizes=(8, 16), seeds=2)
    _, page = report(spec, as_table(make_results(spec, line(0), np.random.default_rng(0))))
    assert "states no hypothesis" in Reader(page).words


@pytest.mark.parametrize("kind", ["all diverged", "empty", "one level", "one seed", "null rate"])
def test_the_report_builds_for_the_poorest_studies(kind):
    spec = make_spec(
        arms=("none", "norm_like"),
        batch_sizes=(8,) if kind == "one level" else (8, 16),
        seeds=1 if kind == "one seed" else 2,
    )
    results = make_results(spec, line(-0.01), np.random.default_rng(0))
    if kind == "all diverged":
        results = [diverged(r) for r in results]
    table = as_table([] if kind == "empty" else results)
    if kind == "null rate":
        place = table.column_names.index("learning_rate")
        table = as_table([r for r in results if r.config.learning_rate == 0.1])
        table = table.set_column(place, pa.field("learning_rate", pa.float64()), pa.nulls(table.num_rows, pa.float64()))
    verdict, page = report(spec, table)
    reader = Reader(page)
    if kind == "one level":
        assert "no slope over batch sizes" in reader.words
        assert "slopes" not in reader.ids
    else:
        assert verdict["arms"][0]["reason"][1:] in reader.words
    for word in ("nan", "NaN", "inf", "None–"):
        assert not re.search(rf"\b{word}\b", reader.words)


def test_altair_is_imported_only_to_draw():
    code = "import sys, analysis; sys.exit('altair' in sys.modules or 'vl_convert' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
