"""Steps of fixed shapes over keys and values at fixed addresses, which a GPU replays as one graph."""
