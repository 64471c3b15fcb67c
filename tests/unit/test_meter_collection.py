import gzip

import pytest

from megatrl.data.messages import ToolSpec
from megatrl.data.trajectories import Prompt, PromptGroup, Termination
from megatrl.errors import ScoringError
from megatrl.meter.collection import Source, gather, read_collection, task_key, write_collection
from tests.fakes.frozen_models import make_group, make_trajectory


def source(name="one", fingerprint="words", domain="hunt"):
    return Source(
        name=name,
        domain=domain,
        tokenizer="models/words",
        tokenizer_fingerprint=fingerprint,
        chat_format="chatml",
        tool_format="react",
        tools=(ToolSpec(name="open", description="Open it.", parameters={"type": "object"}),),
    )


def group(*trajectories, task=None):
    made = make_group(*trajectories)
    return PromptGroup(
        prompt=Prompt(prompt_id=made.prompt.prompt_id, task=task or {}, seed=0),
        group_id=made.group_id,
        trajectories=made.trajectories,
    )


def episode(action=5, **options):
    return make_trajectory([((1, 2), (action,)), ((3,), (4,))], **options)


def test_what_says_nothing_is_left_out_and_counted():
    episodes = [
        episode(index=0),
        episode(6, index=1, reward=0.0),
        episode(7, index=2, reward=0.0, termination=Termination.MAX_TURNS),
        episode(8, index=3, reward=None, termination=Termination.TIMEOUT),
        episode(9, index=4, reward=None),
        episode(index=5),  # as the first
    ]
    collection, (counts,) = gather([(source(), [group(*episodes)])])
    assert dict(counts.taken) == {"trajectories": 3, "success": 1, "failure": 2, "truncated": 1}
    assert dict(counts.left_out) == {"infrastructure": 1, "unknown": 1, "duplicate": 1}
    assert [t.id.index for t in collection.trajectories] == [0, 1, 2]
    dropped, (counts,) = gather([(source(), [group(*episodes)])], truncated="drop")
    assert counts.left_out["truncated"] == 1
    assert [t.id.index for t in dropped.trajectories] == [0, 1]


def test_runs_keep_apart_even_where_their_ids_are_equal():
    one, other = group(episode()), group(episode(9))
    collection, _ = gather([(source("one"), [one]), (source("two"), [other])])
    ids = [t.id for t in collection.trajectories]
    assert len(set(ids)) == 2
    assert [collection.source_of(g).name for g in collection.groups] == ["one", "two"]


def test_a_trajectory_that_two_runs_share_is_taken_once_and_only_where_task_and_tokens_agree():
    def kept(second_source, second_group):
        return len(gather([(source(), [group(episode())]), (second_source, [second_group])])[0].trajectories)

    assert kept(source("two"), group(episode())) == 1
    assert kept(source("two", fingerprint="other words"), group(episode())) == 2
    assert kept(source("two", domain="maze"), group(episode())) == 2
    assert kept(source("two"), group(episode(), task={"question": 2})) == 2
    assert kept(source("two"), group(episode(reward=0.0))) == 2


def test_a_task_is_known_by_its_content():
    assert task_key(group(episode(prompt_id="p1")), "hunt") == task_key(group(episode(prompt_id="p2")), "hunt")


def test_a_collection_comes_back_from_disk_as_it_was(tmp_path):
    collection, _ = gather([(source(), [group(episode(), episode(6, index=1), task={"values": [1, 2]})])])
    write_collection(tmp_path / "c.jsonl.gz", collection)
    assert read_collection(tmp_path / "c.jsonl.gz") == collection


def test_nothing_usable_and_files_that_are_none_are_errors(tmp_path):
    with pytest.raises(ScoringError, match=r"usable trajectory.*'unknown': 1"):
        gather([(source(), [group(episode(reward=None))])])
    with pytest.raises(ScoringError, match="does not exist"):
        read_collection(tmp_path / "none")
    (tmp_path / "text").write_text("{}")
    with pytest.raises(ScoringError, match="cannot be read"):
        read_collection(tmp_path / "text")
    with gzip.GzipFile(tmp_path / "other.gz", "wb") as file:
        file.write(b'{"kind": "other"}\n')
    with pytest.raises(ScoringError, match="no meter collection"):
        read_collection(tmp_path / "other.gz")
