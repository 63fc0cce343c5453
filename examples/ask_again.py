"""Questions about one video, each of which knows the answers before: `python examples/ask_again.py VIDEO [GATEWAY]`."""

import sys

import slipstream

QUESTIONS = ("Describe this video in detail.", "What moves?", "And where to?")


def main(video: str, *gateway: str) -> None:
    with slipstream.connect(*gateway) if gateway else slipstream.Captioner() as captioner:
        turns: tuple[str, ...] = ()
        for question in QUESTIONS:
            caption = captioner.caption(video, question, turns=turns, num_frames=32, max_new_tokens=32)
            facts, first_s = caption.video, caption.timings.first_token_s
            print(f"{question}\n  {caption.text}")
            print(f"  ({facts.reused_tokens} of {facts.prompt_tokens} tokens at hand, begun after {first_s:.2f} s)")
            turns += (question, caption.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
