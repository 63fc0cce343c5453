"""A gateway's callers: captions and the archive, for programs and for the command line."""
