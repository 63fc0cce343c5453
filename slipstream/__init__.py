"""Slipstream: lossless parallel speculative decoding for Video-LLMs. The library knows no service, socket or queue."""

__version__ = "0.2.0"
