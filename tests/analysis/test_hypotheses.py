"""Holm by hand, the verdict of an arm at its edges, and the answer to a hypothesis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.holm import holm
from analysis.hypotheses import judge_arm, judge_hypothesis, judgement, rate_direction, with_diverged_excluded
from analysis.result import ArmJudgement, RateSlope
from trials.spec import BatchSizeSlope


def test_holm_by_hand():
    """0.01×4, 0.02×3, then 0.03×2 and 0.04×1 held up to the larger before."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_an_arm_without_a_p_value_counts_in_the_family():
    assert holm([0.01, None, 0.02]) == [pytest.approx(0.03), None, pytest.approx(0.04)]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_lies_between_raw_and_bonferroni(p_values):
    adjusted = holm(p_values)
    for raw, value in zip(p_values, adjusted, strict=True):
        assert value is not None
        assert raw <= value <= min(1.0, raw * len(p_values))
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    values = [adjusted[i] or 0.0 for i in order]
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("interval", "p_holm", "verdict"),
    [
        ((-0.02, -0.01), 0.01, "negative"),
        ((0.01, 0.02), 0.05, "positive"),
        ((-0.001, 0.002), 0.9, "flat"),
        ((-0.002, -0.001), 0.001, "flat"),  # excludes zero, and yet is too small to matter
        ((-0.003, 0.001), 0.2, "undecided"),
        ((-0.02, -0.01), 0.06, "undecided"),  # the interval is clear, the p-value is not
        ((-0.02, 0.01), 0.01, "undecided"),  # the p-value is clear, the interval is not
        ((-0.02, 0.0), 0.01, "undecided"),  # touching zero does not exclude it
        (None, None, "undecided"),
    ],
)
def test_the_verdict_of_an_arm(interval, p_holm, verdict):
    found, reason = judge_arm(interval, p_holm, 0.001, 0.0001, 0.002, 0.05, "one seed")
    assert found == verdict
    assert reason


def test_seeds_that_differ_too_much_for_the_number_of_arms_leave_it_undecided():
    verdict, reason = judge_arm((-0.02, -0.01), 0.001, 0.08, 0.0001, 0.002, 0.05, None)
    assert verdict == "undecided"
    assert "over seeds, 0.0800, is above 0.05" in reason


def test_a_design_that_cannot_decide_is_told_so():
    _, reason = judge_arm((-0.02, -0.01), 0.0625, 0.001, 0.0625, 0.002, 0.05, None)
    assert "no p-value below 0.0625 is possible" in reason


def test_what_cannot_be_computed_says_why():
    assert judge_arm(None, None, None, None, 0.002, 0.05, "one seed: …") == ("undecided", "not computable: one seed: …")


def answer(direction, *verdicts, mixed=()):
    """`mixed`: indices of arms that fall at 0.1 and rise at 1 and 3; the others fall at 0.1 only."""
    arms = ["none", "norm_like", "affine_like"][: len(verdicts)]
    hypothesis = BatchSizeSlope.model_validate({"arms": arms, "direction": direction})
    judged = [
        ArmJudgement(
            arm, -0.0073, (-0.0081, -0.0064), 0.0006, 0.0006, verdict, "…", (0.1,), (1.0, 3.0) if i in mixed else ()
        )
        for i, (arm, verdict) in enumerate(zip(arms, verdicts, strict=True))
    ]
    return judge_hypothesis(0, hypothesis, judged)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (("negative", "negative"), "supported"),
        (("negative", "undecided"), "undecided"),
        (("undecided", "undecided"), "undecided"),
        (("negative", "flat"), "contradicted"),
        (("positive", "undecided", "negative"), "contradicted"),
    ],
)
def test_the_answer_to_a_hypothesis(verdicts, expected):
    found = answer("negative", *verdicts)
    assert found.verdict == expected
    assert found.sentence.startswith(expected.capitalize())


def test_the_sentence_has_the_numbers():
    sentence = answer("negative", "negative", "negative").sentence
    assert sentence == (
        "Supported: test accuracy falls as batch size grows for “none” (−0.73 points per doubling, 95% interval "
        "−0.81 to −0.64, p = 0.0006) and norm_like (−0.73 points per doubling, 95% interval −0.81 to −0.64, "
        "p = 0.0006)."
    )
    assert "norm_like (flat, −0.73" in answer("negative", "negative", "flat").sentence
    assert "by more than 0.20 points per doubling" in answer("flat", "flat").sentence


# -- learning rates that disagree ------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "direction"),
    [
        ((-0.02, -0.01), "falls"),
        ((0.01, 0.02), "rises"),
        ((-0.002, -0.001), "flat"),  # excludes zero, and yet is too small to matter
        ((-0.001, 0.002), "flat"),
        ((-0.003, 0.0), "unclear"),
        ((-0.003, 0.001), "unclear"),
        (None, "unclear"),
    ],
)
def test_the_direction_within_a_learning_rate(interval, direction):
    assert rate_direction(interval, 0.002) == direction


@pytest.mark.parametrize(
    ("directions", "mixed"),
    [
        (("falls", "falls", "rises"), True),
        (("falls", "unclear", "flat"), False),
        (("rises", "rises", "rises"), False),
        (("unclear", "flat", "unclear"), False),
    ],
)
def test_an_arm_is_mixed_where_it_falls_at_one_rate_and_rises_at_another(directions, mixed):
    rates = [RateSlope(rate, 0.01, None, d) for rate, d in zip((0.1, 0.3, 1.0), directions, strict=True)]
    found = judgement("none", 0.05, (0.04, 0.06), (0.01, 0.01), ("positive", "it is clear"), rates)
    assert found.mixed is mixed
    assert found.verdict == "positive"
    assert (found.reason == "it is clear") is not mixed
    if mixed:
        assert found.reason.endswith("; not at every learning rate: accuracy falls at 0.1 and 0.3 and rises at 1")
        open_ = judgement("none", 0.05, None, (0.4, 0.4), ("undecided", "so"), rates)
        assert "so; the direction differs between learning rates: accuracy falls at 0.1" in open_.reason


@pytest.mark.parametrize(
    ("direction", "verdicts", "mixed", "expected"),
    [
        ("negative", ("negative", "negative"), (1,), "undecided"),  # would be supported
        ("positive", ("negative", "positive"), (0,), "undecided"),  # would be contradicted
        ("positive", ("negative", "negative"), (0,), "contradicted"),  # the other arm contradicts by itself
        ("flat", ("flat",), (0,), "undecided"),  # falls and rises may cancel
        ("flat", ("negative",), (0,), "undecided"),
        ("negative", ("undecided", "negative"), (0,), "undecided"),
    ],
)
def test_a_mixed_arm_neither_supports_nor_contradicts(direction, verdicts, mixed, expected):
    found = answer(direction, *verdicts, mixed=mixed)
    assert found.verdict == expected
    assert found.mixed_over_learning_rates
    assert found.sentence.startswith(expected.capitalize())
    assert "The direction differs between learning rates: for " in found.sentence


def test_the_sentence_of_a_mixed_arm_says_where():
    found = answer("negative", "negative", "negative", "undecided", mixed=(0, 2))
    numbers = "−0.73 points per doubling, 95% interval −0.81 to −0.64, p = 0.0006"
    assert found.sentence == (
        f"Undecided: that test accuracy falls as batch size grows is not settled for “none” (combined slope negative, "
        f"{numbers}) and affine_like ({numbers}); it holds for norm_like ({numbers}). The direction differs between "
        "learning rates: for “none” and affine_like it falls at 0.1 and rises at 1 and 3."
    )


@given(
    st.sampled_from(["negative", "positive", "flat"]),
    st.lists(st.sampled_from(["negative", "positive", "flat", "undecided"]), min_size=1, max_size=3),
    st.sets(st.integers(0, 2)),
)
def test_mixed_arms_only_ever_withhold_an_answer(direction, verdicts, mixed):
    mixed &= set(range(len(verdicts)))
    plain, found = answer(direction, *verdicts), answer(direction, *verdicts, mixed=mixed)
    assert found.verdict in (plain.verdict, "undecided")
    assert found.mixed_over_learning_rates == bool(mixed)
    assert found == plain or mixed


def test_many_learning_rates_are_counted_not_listed():
    rates = [RateSlope(0.001 * i, -0.01, None, "falls") for i in range(1, 9)] + [RateSlope(1.0, 0.01, None, "rises")]
    reason = judgement("none", 0.05, None, (0.4, 0.4), ("undecided", "so"), rates).reason
    assert reason.endswith("accuracy falls at 8 learning rates between 0.001 and 0.008 and rises at 1")


def test_disagreement_over_diverged_trials_is_said():
    main, other = answer("negative", "negative"), answer("negative", "undecided")
    both = with_diverged_excluded(main, other, 3)
    assert both.sensitive_to_diverged
    assert both.verdict == "supported"
    assert both.verdict_excluding_diverged == "undecided"
    assert "3 diverged trials" in both.sentence
    assert "would be undecided" in both.sentence
    same = with_diverged_excluded(main, main, 3)
    assert not same.sensitive_to_diverged
    assert same.sentence == main.sentence
