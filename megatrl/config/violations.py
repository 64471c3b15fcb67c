"""One broken rule of a configuration, and the error that lists all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """What is wrong where: `origin` is file and line, `path` the dotted key, `seen` the value as written."""

    origin: str
    path: str
    seen: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        subject = f"{self.path} = {self.seen}" if self.seen else self.path
        parts = [part for part in (self.origin, subject, self.problem) if part]
        return ": ".join(parts) + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A broken rule that needs several values. `paths[0]` is the one to look at, the others are part of the rule."""

    paths: tuple[str, ...]
    message: str
    remedy: str
    is_warning: bool = False


def raise_for(violations: Sequence[Violation], what: str) -> None:
    """Raise one ConfigError with every violation on its own line; return where there is none."""
    if not violations:
        return
    lines = list(dict.fromkeys(str(violation) for violation in violations))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    raise ConfigError(f"{what}: {count}\n" + "\n".join(f"  {line}" for line in lines))
