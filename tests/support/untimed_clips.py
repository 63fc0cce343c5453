"""Real clips whose frames do not say when they are shown."""

TS_PACKET = 188


def still_mp4(mp4: bytes) -> bytes:
    """The same MP4, all of whose frames are shown at its beginning: in its index none lasts any time."""
    start = mp4.index(b"stts") + 8
    changed = bytearray(mp4)
    for number in range(int.from_bytes(mp4[start : start + 4], "big")):
        place = start + 8 + 8 * number
        changed[place : place + 4] = bytes(4)
    return bytes(changed)


def unstamped_ts(stream: bytes) -> bytes:
    """The same transport stream, no packet of whose video has a timestamp."""
    changed = bytearray(stream)
    for start in range(0, len(stream), TS_PACKET):
        header = stream.find(b"\0\0\1\xe0", start, start + TS_PACKET)
        if header >= 0:
            changed[header + 7] &= 0x3F
    return bytes(changed)
