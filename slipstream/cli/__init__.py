"""The command line `slipstream`: a client of the gateway, and a local stack of the three services."""
