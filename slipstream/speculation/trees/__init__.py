"""Dynamic trees: a draft's line that branches, and goes on growing while the target judges a part of it. Pure."""
