"""The command line `slipstream`: a client of the gateway, and a local stack of the three services."""

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """What the installed `slipstream` command calls. Until the commands are loaded, a Ctrl-C just ends the process."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:  # a KeyboardInterrupt inside an import is a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from slipstream.cli.app import run

    signal.signal(signal.SIGINT, on_interrupt)
    sys.exit(run())
