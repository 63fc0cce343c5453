"""What a caption's summary says of time, also where all of its text had been delivered before."""

from slipstream.captioning.stats import CaptionStats


def test_a_text_that_was_delivered_whole_takes_no_time_and_none_is_negative() -> None:
    stats = CaptionStats(arrived=1000.0)
    stats.sampled = 1001.0
    stats.caught_up(1003.0)
    timings = stats._timings()
    assert (timings.first_token_s, timings.generate_s, timings.total_s) == (2.0, 0.0, 3.0)
    stats.caught_up(1005.0)
    assert stats._timings() == timings
