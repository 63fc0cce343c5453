"""An answer whose text is not of the video's own frames says so over HTTP, too."""

from slipstream.messages import Caption, SharedFrom
from slipstream.services.front.completions import Completion


def answer_of(caption: Caption) -> dict[str, object]:
    whole = Completion("chatcmpl-1", "a-model", 0).whole(caption.text, [caption])
    receipt: dict[str, object] = whole["slipstream"]["receipt"]
    return receipt


def test_a_shared_or_skipped_caption_says_so() -> None:
    shared = answer_of(Caption("a cat", 2, None, shared=SharedFrom("job", 3, 4.5)))
    assert shared["shared"] == {"job_id": "job", "segment": 3, "distance": 4.5}
    skipped = answer_of(Caption("", 0, None, skipped="black"))
    assert skipped["skipped"] == "black" and "shared" not in skipped


def test_one_of_the_videos_own_frames_says_nothing() -> None:
    assert not {"shared", "skipped"} & answer_of(Caption("a cat", 2, None)).keys()
