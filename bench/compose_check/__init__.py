"""Runs the project's own Dockerfile and compose.yaml for real, breaks the stack, and looks whether a batch survives."""
