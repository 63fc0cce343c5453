"""Channel and server options, chosen by measurement: how fast a dead peer is noticed, how large a message may be."""

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Largest message either side accepts; the default of 4 MiB would kill streams of large chunks."""
MAX_DRAFT_MESSAGE_BYTES = 64 * 1024
"""Largest message taken from a draft: it sends token ids, and proposals a few tokens at a time."""
CHUNK_BYTES = 512 * 1024
"""Bulk data travels in chunks of this size: whole messages are slower and stall other streams."""
UPLOAD_CHUNK_BYTES = 128 * 1024
"""Of a client's video: a message counts for the gateway's idle limit when all of it has come, also on a slow link."""
REQUEST_ID_KEY = "x-request-id"
"""Metadata key that carries a request's id through all three services."""
RETRY_AFTER_KEY = "retry-after-ms"
"""Trailing metadata of every RESOURCE_EXHAUSTED that a service of ours says: when the same request may succeed."""
RETRY_AFTER_S = 1.0
"""What it says where nobody knows better."""
ANSWERED_KEY = "x-slipstream-answered"
"""Trailing metadata of every failure that a service of ours says itself; without it the failure is the connection's."""
UNREADABLE_KEY = "x-slipstream-unreadable"
"""Trailing metadata of an INVALID_ARGUMENT that is about a video or document which cannot be read."""
ADVERTISED_KEY = "x-slipstream-address"
"""Initial metadata of a target's session: where this one of several targets serves the session's guidance."""
QUEUED_KEY = "x-slipstream-queued"
"""Initial metadata of a target's session that waits for its place: its frames are not to be sent yet."""
UNARY_TIMEOUT_S = 60.0
"""Longest time for a call that neither side streams; none of ours does more than ask a store."""
MAX_CONCURRENT_CALLS = 4096
"""Of one server, health's apart: far above what any service takes on, so its own, clearer limits act first. gRPC's own
ceiling is not used: it counts health's calls as well, and refuses without a reason, a hint or a line in the log."""
MAX_WATCHERS = 64
"""Of health, at one server."""
WATCH_S = 300.0
"""How long one watches before it has to ask again."""
FIRST_MESSAGE_S = 10.0
"""How long a call may stay without its first message."""
MAX_SILENT_CALLS = 1024
"""Calls at one server that have said nothing yet: beyond it the oldest gives way, as a half-open connection would."""
MAX_CONCURRENT_STREAMS = 1024
"""Of one connection."""

MAX_RECEIVE_OPTION = "grpc.max_receive_message_length"
NO_PROXY = ("grpc.enable_http_proxy", 0)
"""For what is on this machine: gRPC takes a proxy that the environment names for the way to it, too."""

_COMMON = [
    (MAX_RECEIVE_OPTION, MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    *_COMMON,
    # A name may stand for several: each call goes to the next, and one that is replaced is looked up again soon.
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.keepalive_time_ms", 2000),
    # keepalive_timeout alone leaves a frozen peer unnoticed for a minute; the HTTP/2 ping timeout does not.
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long a handshake may take: a busy peer needs more than the time between two attempts.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # Without this a second server binds the same port silently and takes half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    # Our own clients ping every 2 s; who pings more often than this, three times, is disconnected.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
    # A connection that never says what it wants keeps a file descriptor, by default for two minutes.
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
]
