"""Structured logs: one JSON object a line on stderr, with a bound request id. Knows no service."""

import logging
import sys

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure_logs(service: str, level: str = "info") -> None:
    """Sets the process's log format, also for libraries. Events are `noun.verb`; callers bind `request_id`."""
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*processors, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    libraries = logging.StreamHandler(sys.stderr)
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=processors,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[libraries], level=logging.WARNING, force=True)
    logging.captureWarnings(True)


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """A logger that carries what is bound to the current task."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger
