"""Models some of whose layers have a state of fixed size in place of keys and values: Qwen 3.5's gated delta rule."""
