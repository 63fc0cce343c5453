"""Captions as JSON of one form, a line each: `python examples/json_captions.py GATEWAY VIDEO...`."""

import json
import sys

import slipstream

SCENE = {
    "type": "object",
    "properties": {
        "opening": {"type": "string", "maxLength": 80},
        "background": {"enum": ["plain", "grid", "striped", "dotted"]},
        "scenes": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "required": ["opening", "background", "scenes"],
    "additionalProperties": False,
}


def main(gateway: str, *videos: str) -> None:
    with slipstream.connect(gateway) as captioner:
        for video in videos:
            caption = captioner.caption(video, "Describe the video as JSON.", json_schema=SCENE)
            print(json.dumps({"video": video} | json.loads(caption.text)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
