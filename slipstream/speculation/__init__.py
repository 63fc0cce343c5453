"""Speculative decoding rules: acceptance, pacing and the protocol as a state machine. No I/O, no clock."""
