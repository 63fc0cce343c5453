"""Opens a video by path, below the allowed roots only."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from slipstream.errors import InvalidConfig, InvalidRequest, VideoNotFound, check_lacks

OWNER = "{owner}"
"""A folder's name in a root: each owner has a folder of its own there, and sees no other's."""
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def root_of(root: Path, owner: str) -> Path | None:
    """What `root` is for that owner; None: one folder an owner, and nobody's name is this one."""
    if OWNER not in root.parts:
        return root
    if owner in ("", ".", "..") or not owner.isprintable() or "/" in owner:
        return None
    return Path(*(owner if part == OWNER else part for part in root.parts))


def shared_part(root: Path) -> Path:
    """The part of a root that is the same for all. Raises `InvalidConfig` where OWNER is not all of a folder's name."""
    parts = root.parts
    if any(OWNER in part and part != OWNER for part in parts):
        raise InvalidConfig(f"--video-roots: {str(root)!r}: {OWNER} must be the whole name of a folder")
    return Path(*parts[: parts.index(OWNER)]) if OWNER in parts else root


def joined(roots: Sequence[Path]) -> str:
    """As `--video-roots` has them. Raises `InvalidConfig` for one that would be taken for two."""
    real = [str(root.resolve()) for root in roots]
    for root in real:
        if os.pathsep in root:
            raise InvalidConfig(f"{root!r}: a {os.pathsep!r} is between two roots; give a folder without one")
    return os.pathsep.join(real)


def open_video_path(path: str, roots: Sequence[Path]) -> BinaryIO:
    """Open the regular file `path`, absolute or relative to one of `roots`; the first root that has it wins.

    The file is opened first and judged by its descriptor, so that nothing can be swapped in between. Symbolic links
    are followed for folders, never for the file, and never out of a root.

    Raises InvalidRequest for a path that no file can have, or that names a folder, pipe or device below a root.
    Raises VideoNotFound otherwise, with one message whether or not the file exists elsewhere; Overloaded where nothing
    can be opened now.
    """
    parts = Path(path).parts
    if not parts or "\0" in path:
        raise InvalidRequest("the video path is empty or contains a NUL byte; give the path of one file")
    if ".." in parts:
        raise InvalidRequest("the video path contains '..'; give it without, below an allowed folder")
    for root in roots:
        real_root = Path(os.path.realpath(root))
        candidate = real_root / path
        if not (candidate.is_relative_to(real_root) or candidate.is_relative_to(root)):
            continue
        descriptor = _open_below(candidate, real_root)
        if descriptor is not None:
            return os.fdopen(descriptor, "rb")
    raise VideoNotFound(
        "no readable video at that path below the allowed folders; check it, and that it is no symbolic link"
    )


def _open_below(candidate: Path, real_root: Path) -> int | None:
    """Descriptor of a regular file that really lies below the root, or None when there is none to be told about."""
    try:
        descriptor = os.open(candidate, _OPEN_FLAGS)
    except (OSError, UnicodeEncodeError) as error:
        check_lacks(error)
        return None
    try:
        real_path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not real_path.is_relative_to(real_root):
            os.close(descriptor)
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidRequest("the video path names a folder, pipe or device; give the path of a video file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
