"""Video files in, sampled RGB frames out. Imports no torch."""
