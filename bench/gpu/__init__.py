"""Figures of full-size models with random weights on a GPU. On a CPU, `--tiny` shows that all of it runs."""
