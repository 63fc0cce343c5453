"""What a front can be told at start."""

from dataclasses import dataclass

from slipstream.captioning.fetch import check_hosts
from slipstream.config import between, one_of, option
from slipstream.logs import LEVELS
from slipstream.rpc.security import TokenOptions
from slipstream.rpc.service_options import otlp_option
from slipstream.services.front.browsers import check_names, check_origins

MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class FrontConfig(TokenOptions):
    """Options of the HTTP front."""

    listen: str = option("address to serve on: HOST:PORT, port 0 for any")
    gateway: str = option("addresses of the gateways, separated by ','")
    gateway_ca: str = option("PEM file of the authority of the gateways' certificates: call them by TLS", default="")
    gateway_cert: str = option("PEM file of the certificate that is shown to gateways", default="")
    gateway_key: str = option("PEM file of that certificate's private key", default="")
    tls_cert: str = option("PEM file of this server's certificate chain; without it the wire is plaintext", default="")
    tls_key: str = option("PEM file of the certificate's private key", default="")
    data: str = option("folder for files and batches; empty: neither is served", default="")
    shared_media: bool = option(
        "whether gateways may read DATA/media, which their --video-roots must then name: true or false; without it a"
        " batch takes no videos by value",
        default=False,
    )
    model_name: str = option("what clients call the target; empty: the end of its folder's path", default="")
    cors_origins: str = option(
        "origins whose pages may call, such as https://studio.example, separated by ','; empty: none",
        default="",
        check=check_origins,
    )
    hosts: str = option(
        "names by which it is reached, separated by ','; addresses and local names always are served, and with --tokens"
        " all",
        default="",
        check=check_names,
    )
    url_hosts: str = option(
        "hosts that media may be fetched from over https, as HOST or HOST:PORT, separated by ','; empty: none",
        default="",
        check=check_hosts,
    )
    url_timeout_s: float = option("longest time for fetching one file", default=600.0, check=between(0.1, 86400))
    max_body_bytes: int = option(
        "largest body of a chat request, with its media in base64", default=3 * 1024**3, check=between(1, 2**50)
    )
    max_json_bytes: int = option(
        "largest body without its media, which goes to disk", default=4 * MIB, check=between(1024, 64 * MIB)
    )
    max_spool_bytes: int = option(
        "most bytes of all media on disk whose requests are in work", default=8 * 1024**3, check=between(1, 2**50)
    )
    max_file_bytes: int = option("largest file of /v1/files", default=512 * MIB, check=between(1, 2**50))
    max_owner_bytes: int = option("most bytes of all files of one owner", default=20 * 1024**3, check=between(1, 2**50))
    max_batch_lines: int = option("most requests of one batch", default=50_000, check=between(1, 1_000_000))
    max_requests: int = option("requests in work at once; more are refused", default=256, check=between(1, 65_536))
    max_connections: int = option("open connections; more are closed", default=4096, check=between(1, 65_536))
    owner_share: float = option(
        "share of requests and spooled bytes that one owner, or one address without an owner, may have",
        default=0.5,
        check=between(0, 1),
    )
    head_s: float = option(
        "longest time for a request's head, and between two requests", default=15.0, check=between(0.1, 3600)
    )
    upload_idle_s: float = option("longest pause within a body", default=10.0, check=between(0.01, 3600))
    min_upload_rate: int = option(
        "fewest bytes a second of a body, on average; 0 for any", default=16 * 1024, check=between(0, 2**40)
    )
    write_s: float = option("how long a client may leave its answer unread", default=60.0, check=between(0.1, 86400))
    ping_s: float = option(
        "silence after which a stream says that it is alive", default=15.0, check=between(0.01, 3600)
    )
    request_timeout_s: float = option("longest time for one answer", default=3600.0, check=between(1, 86400))
    drain_s: float = option("how long open requests may go on after SIGTERM", default=20.0, check=between(0, 3600))
    otlp: str = otlp_option()
    log_level: str = option("least severe log event", default="info", check=one_of(*LEVELS))
