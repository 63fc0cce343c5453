"""The synthetic world of moving shapes and the trainer of the pocket pair."""
