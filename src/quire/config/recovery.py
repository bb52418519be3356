"""What happens when the engine core dies or is stuck. Read by servers; `LLM` has its core in the
caller's process."""

from __future__ import annotations

from dataclasses import dataclass

from quire.bounds import check_section


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """Replacing an engine core that died or is stuck."""

    core_restart_limit: int = 16
    """How many times within `--core-restart-window` an engine core that died is replaced; its
    requests go on where their callers stand. One more death ends the server with exit code 1. 0:
    never replaced."""
    core_restart_window: float = 300.0
    """Seconds after which the death of a core no longer counts towards `--core-restart-limit`."""
    core_stall_timeout: float = 2.0
    """Seconds without progress after which an engine core that is stopped, deadlocked or in an
    endless loop is killed and replaced, as if it had died. A step that should take longer, going by
    the steps of this run, has five times that long. Waiting for processors or disks, and time
    spent in a debugger or suspended, do not count. 0: it is never killed; `/readyz` and the log
    tell all the same."""

    warm_spare: bool = False
    """Keep a second process ready to take the place of a core that dies: started, torch imported,
    the weights shared with the running core. It takes some 200 MB of memory and no processor time
    while it waits."""

    def __post_init__(self) -> None:
        check_section(self)
