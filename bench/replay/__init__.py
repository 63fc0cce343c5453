"""REPLAY: the real stack of the pocket models at the pace of other devices, whose times come from tables."""
