"""The same caption by several methods, all with the same text: `python examples/compare_methods.py VIDEO [GATEWAY]`."""

import sys

import slipstream

METHODS = ("autoregressive", "sd", "parallelvlm", "slipstream")


def main(video: str, *gateway: str) -> None:
    asked = slipstream.CaptionOptions("Describe this video in detail.", num_frames=32, max_new_tokens=64)
    with slipstream.connect(*gateway) if gateway else slipstream.Captioner() as captioner:
        captions = {method: captioner.caption(video, options=asked, method=method) for method in METHODS}
    for method, caption in captions.items():
        accepted = caption.speculation.mean_accepted_length
        print(f"{method:15} {caption.decoding_rate:6.1f} tokens/s, {accepted:4.1f} tokens between two rejections")
    print(f"different texts: {len({caption.text for caption in captions.values()})}")


if __name__ == "__main__":
    main(*sys.argv[1:])
