"""What a decoder and who has its film say to each other: questions for ranges, and bytes. Either side imports this."""

import struct

ASKED = struct.Struct("<QI")
"""A question: from which byte, and how many."""
GIVEN = struct.Struct("<i")
"""Before each answer: how many bytes follow, or `FAILED`. First come the film's facts, as JSON."""
FAILED = -1
MOST_ASKED = 1024 * 1024
"""Bytes of one answer."""
