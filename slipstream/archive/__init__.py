"""The archive: a durable queue of jobs, what it promises (`queue`), on Redis, and the worker that drains it."""
