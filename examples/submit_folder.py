"""Hands a folder in to a gateway's archive: `python examples/submit_folder.py FOLDER GATEWAY`.

The gateway opens the files itself, so the folder is below one of its roots: `slipstream up --video-root FOLDER`.
"""

import sys
from pathlib import Path

import slipstream


def main(folder: str, gateway: str) -> None:
    with slipstream.connect(gateway) as captioner:
        batch = captioner.archive.submit(sorted(Path(folder).resolve().glob("*.mp4")), num_frames=32)
        for result in batch.results():
            print(result.source, result.caption or result.error)


if __name__ == "__main__":
    main(*sys.argv[1:])
