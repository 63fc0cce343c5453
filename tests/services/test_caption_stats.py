"""What a caption's summary says of time, also where all of its text had been delivered before."""

from slipstream.captioning.stats import CaptionStats
from slipstream.speculation.caption_book import Kind, Opening, Start
from slipstream.speculation.pacing import CostModel, Fixed
from slipstream.speculation.pipeline import Pipeline


def test_a_text_that_was_delivered_whole_takes_no_time_and_none_is_negative() -> None:
    stats = CaptionStats(arrived=1000.0)
    stats.sampled = 1001.0
    stats.caught_up(1003.0)
    timings = stats._timings()
    assert (timings.first_token_s, timings.generate_s, timings.total_s) == (2.0, 0.0, 3.0)
    stats.caught_up(1005.0)
    assert stats._timings() == timings


def test_what_a_token_takes_by_plain_decoding_is_told_where_it_was_measured() -> None:
    costs = CostModel()
    opening = Opening(Kind("", "", 1, ""), Start.ALONE, "", costs)
    pipeline = Pipeline(Fixed(), costs, max_window=4, vocab_size=9)
    stats = CaptionStats(arrived=0.0)
    stats.passed(0, 0.03, 0.05, 0.0)
    assert stats._speculation(pipeline, opening).plain_token_s == 0.0
    costs.plain_token_s.observe(0.03)
    assert stats._speculation(pipeline, opening).plain_token_s == 0.03
