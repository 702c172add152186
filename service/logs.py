"""One line per event on stderr, as `time level event key=value …`, so that a study's story can be grepped by its id."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_FIELDS = "normstudy_fields"


def event(log: logging.Logger, name: str, /, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log that something happened: `event(log, "submitted", study=id, attempt=1)`."""
    log.log(level, name, extra={_FIELDS: fields})


class LineFormatter(logging.Formatter):
    """Renders a record as one line; a traceback, where there is one, follows it."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = getattr(record, _FIELDS, {})
        parts = [time, record.levelname.lower(), record.name, _value(record.getMessage())]
        parts += [f"{key}={_value(value)}" for key, value in fields.items() if value is not None]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(level: int = logging.INFO) -> None:
    """Send every logger's lines to stderr in this form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "alembic", "mlflow", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _value(value: Any) -> str:
    text = str(value)
    plain = text and text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)
