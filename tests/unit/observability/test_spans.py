"""Timing spans and the trace file."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from megatrl.observability.spans import SpanRecorder, read_trace


def _spans(path: Path) -> list[tuple[str, float, float, int]]:
    return [
        (event["name"], event["ts"], event["ts"] + event["dur"], event["tid"])
        for event in read_trace(path)
        if event["ph"] == "X"
    ]


def test_nested_spans_are_named_by_path_and_summed(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path / "trace.json")
    with recorder.frame("step"):
        for _ in range(2):
            with recorder.span("learn"):
                with recorder.span("forward"):
                    time.sleep(0.02)
                time.sleep(0.01)
    seconds = recorder.take_seconds()
    assert set(seconds) == {"step", "learn", "learn/forward"}
    assert 0.04 <= seconds["learn/forward"] <= seconds["learn"] - 0.02 <= seconds["step"] - 0.02
    assert recorder.take_seconds() == {}


def test_the_trace_file_nests_by_time_and_reads_as_json_when_closed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    recorder = SpanRecorder(path)
    with recorder.span("learn", step=3), recorder.span("forward"):
        pass
    recorder.external("sample", started_s=1000.5, seconds=2.0, track="server-0")
    recorder.close()
    (forward, learn, sample) = _spans(path)
    assert (forward[0], learn[0], sample[:3]) == ("forward", "learn", ("sample", 1000500000, 1002500000))
    assert learn[1] <= forward[1]
    assert forward[3] == learn[3] != sample[3]
    names = {event["args"]["name"] for event in read_trace(path) if event["ph"] == "M"}
    assert "server-0" in names
    assert path.read_text().rstrip().endswith("]")


def test_a_trace_cut_at_any_byte_gives_its_whole_spans(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    recorder = SpanRecorder(path)
    assert read_trace(path) == []
    for number in range(3):
        with recorder.span(f"s{number}"):
            pass
        recorder.flush()
    content = path.read_bytes()
    for size in range(1, len(content) + 1):
        path.write_bytes(content[:size])
        names = [name for name, *_ in _spans(path)]
        assert names == ["s0", "s1", "s2"][: len(names)]
    assert len(names) == 3


def test_a_span_counts_when_its_body_raises_and_leaves_no_trace_in_the_path(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    with pytest.raises(RuntimeError), recorder.span("act"):
        raise RuntimeError
    assert recorder.current_path() == ()
    assert set(recorder.take_seconds()) == {"act"}


async def test_overlapping_tasks_do_not_nest_in_each_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    recorder = SpanRecorder(path)
    both_inside = asyncio.Barrier(2)

    async def episode(name: str) -> None:
        with recorder.span(name):
            await both_inside.wait()
            with recorder.span("call"):
                await asyncio.sleep(0.01)

    with recorder.span("act"):
        await asyncio.gather(episode("a"), episode("b"))
    assert set(recorder.take_seconds()) == {"act", "act/a", "act/a/call", "act/b", "act/b/call"}
    recorder.close()
    tracks = {name: track for name, _, _, track in _spans(path) if name in "ab"}
    assert tracks["a"] != tracks["b"]


def test_spans_from_many_threads_are_all_counted(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path / "trace.json")

    def work() -> None:
        for _ in range(50):
            with recorder.span("call"):
                pass
            recorder.flush()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    recorder.close()
    assert len(_spans(tmp_path / "trace.json")) == 200


def test_a_full_trace_file_stops_growing_but_times_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrl.observability.spans.MAX_EVENTS_PER_FILE", 5)
    recorder = SpanRecorder(tmp_path / "trace.json")
    for number in range(20):
        with recorder.span(f"s{number}"):
            pass
    recorder.close()
    assert len(read_trace(tmp_path / "trace.json")) <= 6
    assert len(recorder.take_seconds()) == 20
