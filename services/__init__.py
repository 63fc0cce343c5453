"""The three processes. They import the library and never each other; they meet only on the wire."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when gRPC is imported: its own lines would break the JSON log
