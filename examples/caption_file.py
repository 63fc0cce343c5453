"""Captions one video: `python examples/caption_file.py VIDEO [GATEWAY]`."""

import sys

import slipstream


def main(video: str, *gateway: str) -> None:
    with slipstream.connect(*gateway) if gateway else slipstream.Captioner() as captioner:
        caption = captioner.caption(video, "Describe this video in detail.", num_frames=32, max_new_tokens=64)
    print(caption.text)
    print(f"{caption.num_tokens} tokens, {caption.decoding_rate:.0f} a second after the first one")
    print(f"{caption.speculation.passes} target passes; {caption.speculation.accepted} tokens came from the draft")


if __name__ == "__main__":
    main(*sys.argv[1:])
