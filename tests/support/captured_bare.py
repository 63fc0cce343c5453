"""A captured decoder on a machine that gives no namespaces and no Landlock: the list of system calls stands alone."""

import sys

from slipstream.video import child, confine
from tests.support.captured_decoder import serve

if __name__ == "__main__":
    for wall in ("_leave_namespaces", "_become_nobody", "_leave_paths"):
        setattr(confine, wall, lambda *given: set())
    child._serve = serve
    child.main(*map(int, sys.argv[1:]))
