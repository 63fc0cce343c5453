"""Objects in buckets and on disk, behind one small interface."""
