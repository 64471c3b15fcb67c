"""Peak resident memory of this process and everything it started, sampled from /proc."""

import os
import threading
from collections import defaultdict
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree_rss_bytes(root_pid: int | None = None) -> int | None:
    """Resident bytes of a process and its descendants now; None where there is no /proc.

    Pages shared between processes count once for each of them, so the sum is an upper bound.
    """
    processes: dict[int, tuple[int, int]] = {}  # pid -> (parent, resident bytes)
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():
        return None
    for entry in os.listdir(proc):
        if not entry.isdigit():
            continue
        try:
            stat = (proc / entry / "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended since the listing, or is hidden from us
        # The command in parentheses may itself hold spaces and parentheses.
        after = stat[stat.rfind(")") + 2 :].split()
        processes[int(entry)] = (int(after[1]), int(after[21]) * _PAGE_BYTES)
    children: dict[int, list[int]] = defaultdict(list)
    for pid, (parent, _) in processes.items():
        children[parent].append(pid)
    total, waiting = 0, [os.getpid() if root_pid is None else root_pid]
    while waiting:
        pid = waiting.pop()
        total += processes.get(pid, (0, 0))[1]
        waiting.extend(children[pid])
    return total


class MemoryMeter:
    """Samples `tree_rss_bytes` in a thread and keeps the peak."""

    def __init__(self, interval_s: float = 2.0) -> None:
        self._peak: int | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._interval_s = interval_s
        self._thread = threading.Thread(target=self._sample_until_closed, name="memory-meter", daemon=True)
        self._thread.start()

    def take_peak_bytes(self) -> int | None:
        """The peak since the last call, at least the present value; None where it cannot be read."""
        self._sample()
        with self._lock:
            peak, self._peak = self._peak, None
        return peak

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(self._interval_s + 5.0)

    def _sample(self) -> None:
        now = tree_rss_bytes()
        if now is not None:
            with self._lock:
                self._peak = now if self._peak is None else max(self._peak, now)

    def _sample_until_closed(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._sample()
