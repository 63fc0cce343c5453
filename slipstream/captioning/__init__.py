"""One caption at the gateway: its video, its two model streams, the protocol between them, and what it measured."""
