"""The headline from rows whose ratios were worked out by hand."""

from dataclasses import replace

import pytest

from cacheslide_agents.bench.results import Row, Spread
from cacheslide_agents.bench.summary import summarise

PLAIN = Row(
    id="a",
    turn=1,
    policy="recompute",
    prompt_tokens=100,
    first_change=10,
    reused_tokens=0,
    active_tokens=100,
    compute_fraction=1.0,
    populate_s=0.0,
    ttft_s=6.0,
    kl=0.0,
    top1=1.0,
    answer=None,
    f1=None,
    em=None,
    outcome="cold",
    reason="",
    bytes_written=0,
    peak_kv_bytes=0,
)


def rows() -> list[Row]:
    slide = replace(PLAIN, policy="cacheslide", reused_tokens=80, compute_fraction=0.2)
    return [
        PLAIN,
        replace(PLAIN, policy="prefix", ttft_s=3.0, outcome="partial", reused_tokens=10),
        replace(slide, ttft_s=1.0, outcome="hit", kl=0.02, top1=1.0, f1=1.0, em=1.0),
        replace(PLAIN, id="b", prompt_tokens=300, ttft_s=8.0),
        replace(PLAIN, id="b", policy="prefix", prompt_tokens=300, ttft_s=4.0, outcome="partial"),
        replace(slide, id="b", prompt_tokens=300, ttft_s=10.0, outcome="fallback", top1=0.5),
        replace(PLAIN, turn=2, ttft_s=9.0),
        replace(PLAIN, turn=2, policy="prefix", ttft_s=4.5, outcome="partial"),
        replace(slide, turn=2, ttft_s=4.5, outcome="declined", reused_tokens=10, f1=0.0, em=0.0),
    ]


def test_ratios_pair_rows_of_one_turn_and_a_fallback_counts_with_its_own_time() -> None:
    slide = summarise(rows())["cacheslide"]
    assert slide.ttft_speedup_vs_recompute == Spread(median=2.0, min=0.8, max=6.0)
    assert slide.ttft_speedup_vs_prefix == Spread(median=1.0, min=0.4, max=3.0)


def test_the_hits_only_figure_leaves_fallbacks_and_declined_rows_out() -> None:
    slide = summarise(rows())["cacheslide"]
    assert slide.ttft_speedup_hits_only == Spread(median=6.0, min=6.0, max=6.0)
    assert (slide.rows_hit, slide.fallbacks, slide.declined) == (1, 1, 1)


def test_hit_rate_is_reused_over_prompt_tokens_and_a_fallback_reuses_nothing() -> None:
    assert summarise(rows())["cacheslide"].hit_rate == (80 + 10) / (100 + 300 + 100)


def test_quality_is_averaged_over_rows_and_answers_over_rows_that_have_one() -> None:
    slide = summarise(rows())["cacheslide"]
    assert slide.kl_mean == pytest.approx(0.02 / 3)
    assert slide.kl_p95 == pytest.approx(
        0.018
    )  # 0.9 of the way from the 2nd to the 3rd of 0, 0, .02
    assert slide.top1 == pytest.approx(2.5 / 3)
    assert (slide.f1, slide.em) == (0.5, 0.5)


def test_without_a_prefix_run_or_a_hit_there_is_no_such_ratio() -> None:
    dense = summarise([PLAIN])["recompute"]
    assert dense.ttft_speedup_vs_recompute == Spread(1.0, 1.0, 1.0)
    assert dense.ttft_speedup_vs_prefix is None
    assert dense.ttft_speedup_hits_only is None
    assert dense.f1 is None


def test_policies_keep_the_order_in_which_they_first_appear() -> None:
    assert list(summarise(rows())) == ["recompute", "prefix", "cacheslide"]
