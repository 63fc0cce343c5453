"""The three services on this machine as child processes, with a Redis of their own where none is given."""
