"""Publisher against a stub that can refuse, ignore and tamper."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from megatrl.config.engines import PublishConfig, ServerConfig, TinyModel
from megatrl.config.model_shape import ModelShape, tiny_model_shape
from megatrl.errors import WeightSyncError
from megatrl.rollout.control import ServerControl
from megatrl.weight_sync import plan as plan_module
from megatrl.weight_sync import tensor as tensor_module
from megatrl.weight_sync import verify as verify_module
from megatrl.weight_sync.buckets import Bucket
from megatrl.weight_sync.expected import expected_tensors
from megatrl.weight_sync.fanout import Failures
from megatrl.weight_sync.plan import plan_publish
from megatrl.weight_sync.publisher import Publisher
from megatrl.weight_sync.routes import make_publisher
from megatrl.weight_sync.tensor import TensorTransport
from tests.fakes.weight_server import WeightServer

MODEL = tiny_model_shape(TinyModel(family="qwen3_moe", num_experts=4), vocab_size=100)
SERVERS = ServerConfig(device="cpu", precision="fp32")
Weights = dict[str, torch.Tensor]


def make_weights(seed: int, model: ModelShape = MODEL) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    specs = expected_tensors(model, torch.float32)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}


def make(
    urls: list[str] | None, *, bucket_bytes: int = 40_000, model: ModelShape = MODEL, verify: bool = True
) -> Publisher:
    config = PublishConfig(bucket_bytes=bucket_bytes, timeout_s=20.0, verify=verify)
    return make_publisher(config, model, SERVERS, urls)


@pytest.fixture
def stub() -> Iterator[WeightServer]:
    with WeightServer(make_weights(0), num_experts=4) as server:
        yield server


def assert_same(left: Weights, right: Weights) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_publish_changes_every_tensor_and_names_the_version_last(stub: WeightServer) -> None:
    weights = make_weights(1)
    report = make([stub.url]).publish(weights.items(), 7)
    assert_same(stub.weights, weights)
    assert (stub.version, stub.is_paused, stub.is_session_open) == ("7", False, False)
    assert report.is_proven
    assert report.num_tensors == len(weights)
    assert report.num_buckets == stub.num_updates > 2
    assert report.num_bytes == sum(tensor.nbytes for tensor in weights.values())
    order = [call for call in stub.calls if call != "/update_weights_from_tensor"]
    assert order == [
        "/pause_generation", "/update_weight_version", "/begin_weight_update", "/end_weight_update", "/flush_cache",
        "/weights_checker", "/update_weight_version", "/continue_generation",
    ]  # fmt: skip


def test_tensors_are_cast_to_the_precision_of_the_server(stub: WeightServer) -> None:
    weights = {name: tensor.to(torch.float64) for name, tensor in make_weights(1).items()}
    assert make([stub.url]).publish(weights.items(), 1).is_proven
    assert {tensor.dtype for tensor in stub.weights.values()} == {torch.float32}


def test_a_server_without_update_sessions_is_served_too() -> None:
    with WeightServer(make_weights(0), num_experts=4, has_sessions=False) as stub:
        assert make([stub.url]).publish(make_weights(1).items(), 1).is_proven
        assert "/end_weight_update" not in stub.calls


def test_a_refused_second_bucket_leaves_the_server_unusable_until_a_whole_publish(stub: WeightServer) -> None:
    stub.reject_update = 2
    publisher, weights = make([stub.url]), make_weights(1)
    with pytest.raises(WeightSyncError, match=rf"server {stub.url} .*phase send, bucket 1 .*refused by the stub"):
        publisher.publish(weights.items(), 1)
    assert stub.is_paused, "a server with mixed weights must not answer"
    assert stub.version == "partial-1"
    assert stub.num_updates == 2, "nothing is sent to a server after it has failed"
    assert list(publisher.unusable) == [stub.url]
    with pytest.raises(WeightSyncError, match="bucket 1"):
        publisher.check_usable()
    assert publisher.publish(weights.items(), 1).is_proven
    publisher.check_usable()
    assert_same(stub.weights, weights)
    assert (stub.version, stub.is_paused) == ("1", False)


def test_one_failing_server_does_not_keep_the_others_from_the_new_weights() -> None:
    old, new = make_weights(0), make_weights(1)
    with WeightServer(old, num_experts=4) as bad, WeightServer(old, num_experts=4) as good:
        bad.reject_update = 1
        publisher = make([bad.url, good.url])
        with pytest.raises(WeightSyncError, match=f"1 of 2 servers: server {bad.url}"):
            publisher.publish(new.items(), 3)
        assert_same(good.weights, new)
        assert (good.version, good.is_paused) == ("3", False)
        assert (bad.version, bad.is_paused) == ("partial-3", True)
        assert list(publisher.unusable) == [bad.url]


def test_names_that_the_server_ignores_are_found_at_the_first_publish(stub: WeightServer) -> None:
    stub.ignore_names = "experts.2"
    with pytest.raises(WeightSyncError, match=r"phase verify: 4 of \d+ tensors differ.*w13_weight"):
        make([stub.url]).publish(make_weights(1).items(), 1)
    assert (stub.version, stub.is_paused) == ("partial-1", True)


def test_without_verification_ignored_names_go_unnoticed_and_the_report_says_unproven(stub: WeightServer) -> None:
    stub.ignore_names = "experts.2"
    assert not make([stub.url], verify=False).publish(make_weights(1).items(), 1).is_proven
    assert "/weights_checker" not in stub.calls


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_one_changed_element_is_caught(stub: WeightServer, name: str) -> None:
    stub.tamper_name = name
    with pytest.raises(WeightSyncError, match=r"phase verify: 1 of \d+ tensors differ"):
        make([stub.url]).publish(make_weights(1).items(), 1)


def test_a_refused_flush_fails_the_publish(stub: WeightServer) -> None:
    stub.refuses_flush = True
    with pytest.raises(WeightSyncError, match=r"phase flush: .*Flush cache failed"):
        make([stub.url]).publish(make_weights(1).items(), 1)
    assert stub.version == "partial-1"


def spoiled(weights: Weights, how: str) -> list[tuple[str, torch.Tensor]]:
    items = list(weights.items())
    if how == "unknown":
        return [*items, ("model.layers.9.mlp.gate.weight", torch.zeros(4, 64))]
    if how == "duplicate":
        return [*items, items[0]]
    if how == "missing":
        return items[:-1]
    if how == "integer":
        return [(name, tensor.to(torch.int64)) for name, tensor in items]
    return [*items[:-1], (items[-1][0], items[-1][1][:-1])]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unknown", r"refused to publish 'model.layers.9.mlp.gate.weight': not one of"),
        ("duplicate", r"gave it twice"),
        ("missing", r"1 of \d+ tensors were not exported: lm_head.weight"),
        ("misshapen", r"shape \(99, 64\), expected \(100, 64\)"),
        ("integer", r"dtype torch.int64"),
    ],
)
def test_wrong_exports_are_refused_before_anything_reaches_the_server(
    stub: WeightServer, how: str, message: str
) -> None:
    publisher = make([stub.url], bucket_bytes=1 << 30)
    with pytest.raises(WeightSyncError, match=message):
        publisher.publish(spoiled(make_weights(1), how), 1)
    assert stub.calls == []
    assert publisher.unusable == {}


def test_a_refusal_half_way_keeps_the_server_paused(stub: WeightServer) -> None:
    publisher = make([stub.url], bucket_bytes=40_000)
    with pytest.raises(WeightSyncError, match="gave it twice"):
        publisher.publish(spoiled(make_weights(1), "duplicate"), 1)
    assert stub.is_paused
    assert list(publisher.unusable) == [stub.url]


def counted(items: list[tuple[str, torch.Tensor]], seen: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in items:
        seen.append(name)
        yield name, tensor


def test_the_export_is_drained_to_its_end_when_sending_fails(stub: WeightServer) -> None:
    stub.reject_update = 1
    seen: list[str] = []
    with pytest.raises(WeightSyncError):
        make([stub.url]).publish(counted(list(make_weights(1).items()), seen), 1)
    assert seen == list(make_weights(1))


def test_the_export_is_drained_to_its_end_when_a_name_is_refused(stub: WeightServer) -> None:
    seen: list[str] = []
    items = list(make_weights(1).items())
    items.insert(1, ("bogus.weight", torch.zeros(1)))
    with pytest.raises(WeightSyncError, match=r"bogus\.weight"):
        make([stub.url]).publish(counted(items, seen), 1)
    assert len(seen) == len(items)


def test_a_rank_without_servers_drains_the_export() -> None:
    seen: list[str] = []
    report = make(None).publish(counted(list(make_weights(1).items()), seen), 5)
    assert seen == list(make_weights(1))
    assert (report.policy_version, report.num_buckets, report.is_proven) == (5, 0, False)


def test_a_dead_server_is_named() -> None:
    with WeightServer({}) as gone:
        url = gone.url
    with pytest.raises(WeightSyncError, match=f"server {url} .*phase pause: .*Is the server alive"):
        make([url]).publish(make_weights(1).items(), 1)


def test_a_tied_mixture_gets_its_output_layer_published() -> None:
    tied = tiny_model_shape(TinyModel(family="qwen3_moe", num_experts=4, tie_word_embeddings=True), vocab_size=100)
    weights = make_weights(1, tied)
    del weights["lm_head.weight"]  # a tied model exports only the embedding
    with WeightServer(make_weights(0), num_experts=4) as stub:
        assert make([stub.url], model=tied).publish(weights.items(), 1).is_proven
        assert torch.equal(stub.weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_a_tied_dense_model_has_no_output_layer_to_publish() -> None:
    tied = tiny_model_shape(TinyModel(family="qwen3", tie_word_embeddings=True), vocab_size=100)
    assert "lm_head.weight" not in expected_tensors(tied, torch.float32)
    with WeightServer(make_weights(0, tied)) as stub:
        assert make([stub.url], model=tied).publish(make_weights(1, tied).items(), 1).is_proven


def test_buckets_stay_within_their_bound_unless_one_tensor_is_larger() -> None:
    sent: list[Bucket] = []

    class Recording(TensorTransport):
        def send(self, servers: Sequence[ServerControl], bucket: Bucket) -> Failures:
            sent.append(bucket)
            return super().send(servers, bucket)

    plan = plan_publish(PublishConfig(bucket_bytes=20_000), MODEL, SERVERS)
    with WeightServer(make_weights(0), num_experts=4) as stub:
        publisher = Publisher(plan, [ServerControl(stub.url)], Recording(tensor=1, timeout_s=10.0))
        publisher.publish(make_weights(1).items(), 1)
    assert all(bucket.num_bytes <= 20_000 or len(bucket.names) == 1 for bucket in sent)
    assert any(bucket.num_bytes > 20_000 for bucket in sent), "the embedding alone is above the bound"
    assert any(len(bucket.names) > 1 for bucket in sent)
    assert [name for bucket in sent for name in bucket.names] == list(make_weights(1))


def test_the_name_map_is_built_once_for_all_publishes(stub: WeightServer, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = make([stub.url])
    for module, name in ((plan_module, "expected_tensors"), (verify_module, "fused_pieces")):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("a publish built the name map again"))
    for version in (1, 2):
        assert publisher.publish(make_weights(version).items(), version).is_proven


def test_bytes_moved_are_those_of_the_model_and_a_little_talk(stub: WeightServer) -> None:
    report = make([stub.url]).publish(make_weights(1).items(), 1)
    assert report.model_bytes == report.num_bytes == sum(tensor.nbytes for tensor in make_weights(1).values())
    talk = report.moved_bytes[stub.url] - report.num_bytes
    assert 0 < stub.num_body_bytes == talk, "every body in either direction counts, checksums too"
    assert 1.0 < report.bytes_ratio <= 1.1


def test_a_server_on_another_host_gets_the_bytes_in_the_request_and_the_ratio_says_so(
    stub: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_module, "is_on_this_host", lambda url: False)
    report = make([stub.url]).publish(make_weights(1).items(), 1)
    assert report.is_proven
    assert_same(stub.weights, make_weights(1))
    assert report.bytes_ratio > 4 / 3


def test_shared_buckets_leave_nothing_open_behind(stub: WeightServer) -> None:
    publisher = make([stub.url])
    publisher.publish(make_weights(1).items(), 1)
    assert not [name for name in open_files() if "megatrl-bucket" in name]
    stub.reject_update = stub.num_updates + 2
    with pytest.raises(WeightSyncError):
        publisher.publish(make_weights(2).items(), 2)
    assert not [name for name in open_files() if "megatrl-bucket" in name]


def open_files() -> list[str]:
    return [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


def test_servers_come_and_go_between_publishes_of_one_publisher() -> None:
    old = make_weights(0)
    with WeightServer(old, num_experts=4) as first, WeightServer(old, num_experts=4) as second:
        publisher = make([first.url])
        first.reject_update = 1
        with pytest.raises(WeightSyncError):
            publisher.publish(make_weights(1).items(), 1)
        publisher.use_servers([second.url])
        publisher.check_usable()  # who is not published to is nobody's worry here
        report = publisher.publish(make_weights(2).items(), 2)
        assert report.served == (second.url,)
        assert_same(second.weights, make_weights(2))
        publisher.use_servers([first.url, second.url])
        assert publisher.publish(make_weights(3).items(), 3).served == (first.url, second.url)
        assert_same(first.weights, make_weights(3))


def test_a_disk_publish_that_one_server_misses_leaves_the_files_for_the_others(tmp_path: Path) -> None:
    config = PublishConfig(route="disk", bucket_bytes=40_000, timeout_s=20.0)
    old = make_weights(0)
    with WeightServer(old, num_experts=4) as bad, WeightServer(old, num_experts=4) as good:
        publisher = make_publisher(config, MODEL, SERVERS, [bad.url, good.url], directory=tmp_path)
        bad.reject_update = 1
        report = publisher.publish_to_reachable(make_weights(1).items(), 1)
        assert (report.served, list(report.failures)) == ((good.url,), [bad.url])
        assert_same(good.weights, make_weights(1))
        (live,) = tmp_path.iterdir()
        assert str(live) == good.disk_path, "SGLang goes back to these files when a later load fails"
        assert 1.0 < report.bytes_ratio <= 1.1

        def export() -> Iterator[tuple[str, torch.Tensor]]:
            yield from make_weights(2).items()
            assert live.exists(), "the next set is not live yet"

        publisher.publish(export(), 2)
        assert [str(path) for path in tmp_path.iterdir()] == [good.disk_path]
        assert not live.exists()
        publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_the_disk_route_needs_a_directory(tmp_path: Path) -> None:
    config = PublishConfig(route="disk")
    with pytest.raises(WeightSyncError, match="needs a directory"):
        make_publisher(config, MODEL, SERVERS, ["http://127.0.0.1:1"])
    assert make_publisher(config, MODEL, SERVERS, ["http://127.0.0.1:1"], directory=tmp_path).unusable == {}
