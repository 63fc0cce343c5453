"""Text that is already there as a draft: where it goes on like the answer does, and which of it a pass judges."""
