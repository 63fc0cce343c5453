"""A reader's process that loads no model: it draws pages, and takes the text that a document brings along unchecked."""

import sys

from slipstream.documents import child
from tests.support.bad_reader import NoEyes


class NoLetters(NoEyes):
    """What no OCR knows it cannot doubt."""

    def knows(self, char: str) -> bool:
        return False


if __name__ == "__main__":
    child.Recogniser = NoLetters  # type: ignore[misc, assignment]
    child.main(*map(int, sys.argv[1:]))
