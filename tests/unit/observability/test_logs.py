"""Log files stay readable and bounded whatever repeats in a run."""

import logging
import re
import sys
from pathlib import Path

import pytest

from megatrl.observability import logs
from megatrl.observability.logs import logging_to

logger = logging.getLogger("megatrl.test")


def test_ten_thousand_equal_failures_give_few_lines_with_the_right_total(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with logging_to(path, role="actor-3", to_stderr=False) as repeats:
        for number in range(10_000):
            logger.warning("episode %d failed: door %s", number, "jammed")
            logger.error("request %d refused", number)
    lines = path.read_text().splitlines()
    assert len(lines) < 50
    assert repeats.totals() == {"episode 0 failed: door jammed": 10_000, "request 0 refused": 10_000}
    assert all(re.match(r"\S+ \S+ [IWE] actor-3 ", line) for line in lines)
    assert lines[0].endswith("W actor-3 megatrl.test: episode 0 failed: door jammed")
    assert any("[1000 times so far; first: episode 0 failed: door jammed]" in line for line in lines)
    assert lines[-2].endswith("10000 times in all: episode 0 failed: door jammed")


def test_different_warnings_and_all_info_lines_pass(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with logging_to(path, to_stderr=False):
        for step in range(100):
            logger.info("step=%d", step)
        logger.warning("disk is full")
        logger.warning("port is taken")
    text = path.read_text()
    assert text.count("step=") == 100
    assert "disk is full" in text
    assert "port is taken" in text


def test_endless_kinds_of_warnings_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_KINDS", 20)
    path = tmp_path / "run.log"
    with logging_to(path, to_stderr=False) as repeats:
        for number in range(5_000):
            logger.warning("odd token %s", "".join(chr(97 + int(digit)) for digit in str(number)))
    assert len(path.read_text().splitlines()) < 50
    assert sum(repeats.totals().values()) == 5_000 - 20


def test_one_huge_message_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with logging_to(path, to_stderr=False):
        logger.error("answer was %s", "x" * 1_000_000)
    assert path.stat().st_size < 10_000
    assert "more characters)" in path.read_text()


def test_the_file_rotates_at_its_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_FILE_BYTES", 10_000)
    with logging_to(tmp_path / "run.log", to_stderr=False):
        for step in range(5_000):
            logger.info("step=%d", step)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"run.log", "run.log.1", "run.log.2", "run.log.3"}
    assert max(sizes.values()) <= 10_000


def test_the_console_handler_follows_a_replaced_stderr_and_the_set_up_is_restored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    before = logging.getLogger().handlers[:]
    with logging_to(None):
        logger.info("to the first")
        replaced = io.StringIO()
        monkeypatch.setattr(sys, "stderr", replaced)
        logger.info("to the second")
        monkeypatch.undo()
    assert "to the first" in capsys.readouterr().err
    assert "to the second" in replaced.getvalue()
    assert logging.getLogger().handlers == before
