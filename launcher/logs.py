"""Log lines of the launcher's process: one line each, fields as key=value."""

import logging

OWN = ("coppice", "gateway", "launcher")
STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FieldFormatter(logging.Formatter):
    """Appends the `extra` fields of a record."""

    def format(self, record: logging.LogRecord) -> str:
        extra = {k: v for k, v in vars(record).items() if k not in STANDARD_FIELDS}
        fields = " ".join(f"{key}={value!r}" for key, value in extra.items())
        return f"{super().format(record)} {fields}".rstrip()


def configure_logs(level: str) -> None:
    """To stderr: ours from `level` on, of libraries the warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(FieldFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in OWN:
        logging.getLogger(name).setLevel(level.upper())
