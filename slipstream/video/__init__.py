"""Video files in, sampled RGB frames out. Knows no model and imports no torch."""
