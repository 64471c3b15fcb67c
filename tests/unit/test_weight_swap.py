import copy

import pytest
import torch

from megatrl.errors import ScoringError
from megatrl.scoring.weight_swap import FrozenWeights, combined_hash, state_hashes, tensor_hash


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def trained(module):
    """Moves every parameter and buffer away from where it was."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)
    return module


def same_state(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_the_module_holds_the_frozen_weights_inside_and_its_own_outside():
    module = model()
    initial = copy.deepcopy(module)
    frozen = FrozenWeights.capture([module])
    trained(module)
    own = copy.deepcopy(module)
    with frozen.swapped_into([module]):
        assert same_state(module, initial)
    assert same_state(module, own)
    assert not same_state(module, initial)


def test_own_weights_come_back_after_an_exception_inside():
    module = model()
    frozen = FrozenWeights.capture([module])
    own = copy.deepcopy(trained(module))
    with pytest.raises(ZeroDivisionError), frozen.swapped_into([module]):
        raise ZeroDivisionError
    assert same_state(module, own)


def test_storage_gradients_and_optimizer_views_survive_the_swap():
    module = model()
    # As Megatron does: parameters are views into one flat buffer.
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    offset = 0
    for parameter in module.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        parameter.grad = torch.ones_like(parameter)
        offset += parameter.numel()
    frozen = FrozenWeights.capture([module])
    flat.mul_(3)
    own = flat.clone()
    addresses = [p.data_ptr() for p in module.parameters()]
    with frozen.swapped_into([module]):
        assert torch.allclose(flat * 3, own)
    assert [p.data_ptr() for p in module.parameters()] == addresses
    assert torch.equal(flat, own)
    assert all(p.grad is not None and torch.equal(p.grad, torch.ones_like(p)) for p in module.parameters())


def test_weights_changed_while_scoring_are_reported_by_name_and_still_restored():
    module = model()
    frozen = FrozenWeights.capture([module])
    own = copy.deepcopy(trained(module))
    with (
        pytest.raises(ScoringError, match=r"while they were scoring: 0\.2\.weight"),
        frozen.swapped_into([module]),
    ):
        next(module[2].parameters()).data.add_(1e-3)
    assert same_state(module, own)
    frozen.verify()  # the host copy did not change


def test_a_changed_host_copy_is_reported_by_name():
    frozen = FrozenWeights.capture([model()])
    frozen.verify()
    frozen._copies["0.0.weight"][0, 0] += 1
    with pytest.raises(ScoringError, match=r"0\.0\.weight"):
        frozen.verify()


def test_a_module_of_another_shape_is_refused_before_anything_is_written():
    frozen = FrozenWeights.capture([model()])
    other = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    before = copy.deepcopy(other)
    with pytest.raises(ScoringError, match=r"0\.0\.weight"), frozen.swapped_into([other]):
        pass
    with pytest.raises(ScoringError, match="different tensors"), frozen.swapped_into([other[0]]):
        pass
    assert same_state(other, before)


def test_the_identity_is_stable_over_swaps_and_follows_the_weights():
    module = model()
    frozen = FrozenWeights.capture([module])
    identity = frozen.identity
    assert identity == combined_hash(state_hashes([module])) == FrozenWeights.capture([model()]).identity
    trained(module)
    for _ in range(3):
        with frozen.swapped_into([module]):
            assert combined_hash(state_hashes([module])) == identity
    assert frozen.identity == identity
    assert FrozenWeights.capture([module]).identity != identity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_a_tensor_hash_sees_bits_places_shapes_and_dtypes(dtype):
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    exchanged = tensor.flip(0)
    assert tensor_hash(tensor) == tensor_hash(tensor.clone())
    assert tensor_hash(tensor) == tensor_hash(tensor.t().contiguous().t())  # layout in memory does not matter
    assert tensor_hash(tensor) != tensor_hash(exchanged)
    assert tensor_hash(tensor) != tensor_hash(tensor.reshape(3, 2))


def test_a_tensor_hash_sees_one_flipped_bit_and_not_a_number():
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    changed = tensor.clone()
    changed.view(torch.int32)[500] ^= 1
    assert tensor_hash(tensor) != tensor_hash(changed)
    changed[500] = float("nan")
    assert tensor_hash(changed) == tensor_hash(changed.clone())


def test_scoring_inside_the_swap_leaves_no_trace_in_training():
    # Dropout off, same values twice, and the training stream of random numbers unmoved.
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).eval()
    frozen = FrozenWeights.capture([module])
    state = torch.get_rng_state()
    with frozen.swapped_into([module]), torch.no_grad():
        first, second = module(torch.ones(1, 3)), module(torch.ones(1, 3))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
