"""`python -m slipstream.cli` is the command `slipstream`."""

from slipstream.cli import main

main()
