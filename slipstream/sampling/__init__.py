"""How tokens are chosen from logits, and how draft tokens are judged, so that the target's distribution is kept."""
