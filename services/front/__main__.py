"""Starts the HTTP front: `python -m slipstream.services.front --listen HOST:PORT --gateway ADDRESS`."""

import os
import sys

from slipstream.errors import InvalidConfig
from slipstream.logs import configure_logs, get_logger, log_all_output


def main() -> int:
    """The exit status: 0 after SIGTERM, 2 on a configuration that cannot work."""
    log_all_output()
    configure_logs("front")
    try:
        from slipstream.services.front.process import run
    except ModuleNotFoundError as error:
        get_logger().error("service.failed", error=f"the HTTP front needs {error.name}: install slipstream[front]")
        return InvalidConfig.exit_code
    return run(sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
