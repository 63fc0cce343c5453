"""Captions a folder in the background: python examples/submit_folder.py FOLDER GATEWAY

The gateway must have an archive and see the folder: slipstream up --video-root FOLDER
Run again it hands in what is new, and gives the captions of all.
"""

import sys
from pathlib import Path

import slipstream


def main(folder: Path, gateway: str) -> None:
    with slipstream.connect(gateway) as captioner:
        videos = [path.resolve() for path in sorted(folder.glob("*.mp4"))]
        batch = captioner.archive.submit(videos, "Describe the video.", num_frames=8, key=str(folder.resolve()))
        for job in batch.results():
            print(f"{Path(job.source).name}: {job.caption or job.error}")
        print(f"{batch.status().counts.done} of {len(videos)} captioned")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
