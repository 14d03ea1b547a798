"""The logger "tunebook".

`logging` is imported only if `TUNEBOOK_LOG` asks for it: a program that has not imported it has nobody who listens, and
importing it takes longer than all of `import tunebook`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    import logging

Level = Literal["debug", "info", "warning"]
NAME: Final = "tunebook"
WARNED: Final = "tunebook_warned"  # on a record that was a warning too, which a terminal shows once


def _logger() -> logging.Logger | None:
    module: Any = sys.modules.get("logging")
    # Another thread may be importing it right now; `captureWarnings` is the last name that it defines.
    if module is None or not hasattr(module, "captureWarnings"):
        return None
    logger: logging.Logger = module.getLogger(NAME)
    if not logger.handlers:
        logger.addHandler(module.NullHandler())  # or Python prints warnings of programs that have no handlers
    return logger


def listens(level: Level) -> bool:
    """Whether a line of this level reaches a handler."""
    logger = _logger()
    return logger is not None and logger.isEnabledFor(_number(level)) and logger.hasHandlers()


def log(level: Level, text: str, *, warned: bool = False) -> None:
    """Write a line to the logger, if the program uses `logging` or `TUNEBOOK_LOG` is set."""
    logger = _logger()
    if logger is not None:
        logger.log(_number(level), "%s", text, extra={WARNED: warned})


def _number(level: Level) -> int:
    return {"debug": 10, "info": 20, "warning": 30}[level]


def log_to_stderr(level: Level) -> None:
    """Let the logger take lines of this level, and print them to standard error unless the program prints its log."""
    import logging  # noqa: PLC0415 - asked for

    logger = logging.getLogger(NAME)
    logger.setLevel(_number(level))
    if logging.getLogger().handlers or any(not isinstance(h, logging.NullHandler) for h in logger.handlers):
        return
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter("tunebook %(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: not getattr(record, WARNED, False))
    logger.addHandler(handler)


def _ToStderr() -> Any:  # noqa: N802 - makes an object of a class that needs `logging`
    import logging  # noqa: PLC0415 - asked for

    class ToStderr(logging.StreamHandler[Any]):
        """Writes to the standard error of the moment: a program may replace it."""

        @property
        def stream(self) -> Any:
            return sys.stderr

        @stream.setter
        def stream(self, _stream: object) -> None:
            pass

    return ToStderr()
