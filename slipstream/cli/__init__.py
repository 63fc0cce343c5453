"""The command line `slipstream`: a client of the gateway, and a local stack of the three services."""

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """What the installed `slipstream` command calls. Until the commands are loaded, a Ctrl-C just ends the process.

    A script's shell starts what it runs in the background with SIGINT ignored: here it means what it says.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt inside an import is a traceback
    from slipstream.cli.app import guard_streams, run

    guard_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run())
