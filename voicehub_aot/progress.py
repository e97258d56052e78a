"""What long work tells while it runs."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Progress:
    """What a build tells while it runs. This one only logs; the command line overrides it."""

    def stage(self, text: str) -> None:
        log.info("%s", text)

    def engine(self, name: str, state: str, seconds: float = 0.0) -> None:
        log.info("engine %s: %s (%.1f s)", name, state, seconds)

    def case(self, name: str) -> None:
        log.debug("parity case %s", name)
