"""The archive's durable job queue: what it promises (`base`), on Redis, in memory, and the worker that drains it."""
