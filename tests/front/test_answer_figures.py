"""What an answer over HTTP says beside its text: what was counted, and whose frames it is of."""

from slipstream.messages import Caption, SharedFrom, Speculation, VideoFacts
from slipstream.services.front.completions import Completion, Written, timings, usage_of


def answer_of(caption: Caption) -> dict[str, object]:
    whole = Completion("chatcmpl-1", "a-model", 0).whole([Written(caption.text, [caption])])
    receipt: dict[str, object] = whole["slipstream"]["receipt"]
    return receipt


def test_a_shared_or_skipped_caption_says_so() -> None:
    shared = answer_of(Caption("a cat", 2, None, shared=SharedFrom("job", 3, 4.5)))
    assert shared["shared"] == {"job_id": "job", "segment": 3, "distance": 4.5}
    skipped = answer_of(Caption("", 0, None, skipped="black"))
    assert skipped["skipped"] == "black" and "shared" not in skipped


def test_one_of_the_videos_own_frames_says_nothing() -> None:
    assert not {"shared", "skipped"} & answer_of(Caption("a cat", 2, None)).keys()


def test_predicted_tokens_are_those_of_hints_and_drafted_ones_the_drafts() -> None:
    """Also where both had a part, as in the method `hints_draft`; of two pages together."""
    both = Speculation(judged=9, accepted=4, accepted_prediction_tokens=20, rejected_prediction_tokens=7)
    pages = [Caption("a", 30, None, speculation=both), Caption("b", 5, None, speculation=Speculation(judged=3))]
    assert usage_of(pages)["completion_tokens_details"] == {
        "accepted_prediction_tokens": 20,
        "rejected_prediction_tokens": 7,
    }
    assert (timings(pages)["draft_n"], timings(pages)["draft_n_accepted"]) == (12, 4)


def test_the_usage_so_far_says_nothing_of_what_is_known_at_the_end() -> None:
    """It said that nothing had been cached, of a prompt of which most was."""
    counts = {"prompt_tokens": 208, "completion_tokens": 3, "total_tokens": 211}
    assert usage_of([], 3, 208) == counts
    video = VideoFacts(prompt_tokens=208, reused_tokens=200)
    assert usage_of([Caption("a", 3, None, video=video)])["prompt_tokens_details"]["cached_tokens"] == 200


def test_the_receipt_names_a_draft_that_took_part_and_no_other() -> None:
    """By plain decoding, or from hints, as documents are read, none does, though the gateway has one. Of several pages
    one is enough."""
    alone, drafted = Caption("a", 1, None), Caption("b", 1, None, speculation=Speculation(kept_digest="ab"))
    completion = Completion("chatcmpl-1", "a-model", 0, draft_model="a-draft")

    def named(*captions: Caption) -> object:
        return completion.whole([Written("", captions)])["slipstream"]["receipt"]["draft"]

    assert named(alone) is None and named(drafted) == named(alone, drafted) == "a-draft"
