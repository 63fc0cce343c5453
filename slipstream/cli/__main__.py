"""`python -m slipstream.cli` is the command `slipstream`."""

from slipstream.cli.main import main

main()
