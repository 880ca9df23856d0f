"""``verify`` in a process that has imported most of what reproducers need: its server is a fork, no new interpreter."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from patches.verification import processes, worker


class _Fork:
    """What stands where ``verify`` has its interpreter."""

    def __init__(self, folder: Path) -> None:
        ours, self._lifeline = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.setsid()
                os.dup2(ours, 0)
                os.close(self._lifeline)
                worker.serve_questions(str(folder))
            finally:
                os._exit(0)
        os.close(ours)

    def close(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._lifeline)


def begin() -> None:
    """From now on ``verify`` does so in this process."""
    processes._start_server = _Fork  # type: ignore[assignment]
