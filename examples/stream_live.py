"""Prints a caption as it is made, the draft's tokens in brackets: `python examples/stream_live.py VIDEO [GATEWAY]`."""

import sys

import slipstream


def main(video: str, *gateway: str) -> None:
    with slipstream.connect(*gateway) if gateway else slipstream.Captioner() as captioner:
        stream = captioner.stream(video, num_frames=32, max_new_tokens=64)
        for piece in stream:  # text that is never taken back
            for token in piece.tokens:
                print(f"[{token.piece}]" if token.from_draft else token.piece, end="", flush=True)
    print(f"\n{stream.caption.num_tokens} tokens in {stream.caption.timings.total_s:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
