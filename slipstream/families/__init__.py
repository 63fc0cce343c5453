"""The model families: one file each turns frames and a prompt into embeddings, positions and video spans, and back."""
