"""Where a local stack keeps its sockets and logs: a folder that goes with the stack, also with one that was killed."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "slipstream-"
LOCK = "lock"
LONGEST_SOCKET_PATH = 107
"""Bytes that the kernel takes as the path of a unix socket."""
KEPT_S = 7 * 86_400.0
"""How long the logs of a stack that failed are kept for whom its error message told where they are."""
MAX_LOG_BYTES = 16 * 1024**2
"""A log that has grown beyond becomes `<name>.1`, in place of the one before."""


class RunFolder:
    """A private folder (mode 0700) in the temporary folder, whose sockets have paths that are short enough.

    This process holds its lock. Making one sweeps those whose lock is free: their process was killed.
    """

    def __init__(self) -> None:
        short_enough = len(os.fsencode(tempfile.gettempdir())) < LONGEST_SOCKET_PATH - 40
        parent = Path(tempfile.gettempdir() if short_enough else "/tmp")
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        fresh = self.path / f"{LOCK}.new"
        self._lock: int | None = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / LOCK)  # it has its name once it is locked: no sweep sees it free

    def close(self, told: str = "") -> None:
        """Removes it, but for the logs whose paths are in `told`, the message of what failed: they stay for a week.

        May be called again.
        """
        if self._lock is None:
            return
        kept = {path for path in self.path.rglob("*.log") if str(path) in told}
        if kept:
            os.write(self._lock, b"kept\n")
            for path in sorted(self.path.rglob("*"), reverse=True):  # what is in a folder before the folder
                if path not in kept | {self.path / LOCK}:
                    with contextlib.suppress(OSError):  # a folder that holds a log
                        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def sweep(parent: Path) -> None:
    """Removes the folders below that nobody uses any more. A folder without a lock is none of ours, or of an older
    release, and is left alone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, gone meanwhile, or not a folder
            _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_kept = os.read(lock, 1) and time.time() - os.fstat(lock).st_mtime < KEPT_S
        if not is_kept:
            shutil.rmtree(folder)
    finally:
        os.close(lock)


def bound_log(path: Path) -> None:
    """Starts a log anew that has grown too large. Whoever writes it appends, and goes on; a line that comes in between
    is lost."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)
