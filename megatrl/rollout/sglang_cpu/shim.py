"""Stand-ins that let an unmodified SGLang wheel serve on a plain CPU.

SGLang has torch-native code for every operation of Qwen3, Qwen3-MoE and Llama. Without CUDA what
stops it are imports of packages that have no CPU build. `install` registers stand-ins for

* triton: decorators that return the function; no kernel is ever called on this path;
* torchvision: two multimodal config modules import it at top level;
* sgl_kernel: two functions are called on a CPU, every other `*_cpu` name raises when called.

They sit at the END of `sys.meta_path`, so a package that is really installed always wins, and
where CUDA is available nothing is done at all. Written for SGLang 0.5.21 to 0.5.23; delete a
stand-in once SGLang imports without that package.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_STUBBED = ("triton", "torchvision")
_MASK32 = 0xFFFFFFFF
_LIBRARIES: list[Any] = []


class _Stub(types.ModuleType):
    """Module, decorator and base class factory in one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            value: Any = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            value = _Stub(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # @triton.jit
        return lambda function: function  # @triton.autotune(...)


def _assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Write the new cache locations of each request into its row of the request-to-token table."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[offset : offset + last - first].to(req_to_token.dtype)
        offset += last - first


def _sgl_kernel_getattr(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)  # optional probes fall back to torch

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a plain CPU; turn the feature off")

    return missing


def _mix(state: Any, block: Any) -> Any:
    """One 32-bit block of MurmurHash3, on int64 tensors that hold unsigned 32-bit values."""
    block = (block * 0xCC9E2D51) & _MASK32
    block = ((block << 15) | (block >> 17)) & _MASK32
    state = state ^ ((block * 0x1B873593) & _MASK32)
    state = ((state << 13) | (state >> 19)) & _MASK32
    return (state * 5 + 0xE6546B64) & _MASK32


def murmur_hash32(seed: Any, positions: Any, col_indices: Any) -> Any:
    """MurmurHash3 of (seed, position, column): int64 [n, m] with values below 2**32.

    The CPU twin of SGLang's kernel of that name (kernels/ops/sampling/murmur_hash.py): 64-bit seeds
    [n], positions [n] and columns [m] as four 32-bit blocks. int64 products wrap, which leaves the low
    32 bits right.
    """
    import torch

    seed, positions, columns = (tensor.to(torch.int64) for tensor in (seed, positions, col_indices))
    rows = _mix(torch.zeros_like(seed), seed & _MASK32)
    rows = _mix(rows, (seed >> 32) & _MASK32)
    rows = _mix(rows, positions & _MASK32)
    hashed = _mix(rows[:, None], columns[None, :] & _MASK32) ^ 16
    hashed ^= hashed >> 16
    hashed.mul_(0x85EBCA6B).bitwise_and_(_MASK32)
    hashed ^= hashed >> 13
    hashed.mul_(0xC2B2AE35).bitwise_and_(_MASK32)
    hashed ^= hashed >> 16
    return hashed


def _register_murmur_hash() -> None:
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _LIBRARIES.append(library)  # a library that is garbage collected takes its operators along


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in _STUBBED:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname == "sgl_kernel":
            return importlib.machinery.ModuleSpec(fullname, self)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if spec.name != "sgl_kernel":
            return _Stub(spec.name)
        _register_murmur_hash()
        module = types.ModuleType("sgl_kernel")
        module.assign_req_to_token_pool_cpu = _assign_req_to_token_pool_cpu  # type: ignore[attr-defined]
        module.__getattr__ = _sgl_kernel_getattr  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> bool:
    """True where the stand-ins are in place; False, and nothing done, where CUDA is available.

    Must run at the top level of the launching script: SGLang spawns its children, and a spawned
    child runs that top level again before anything else.
    """
    import torch

    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # torch and transformers probe for triton and torchvision once: let them see the truth first.
    import torch.utils._triton
    import transformers.image_utils  # noqa: F401

    torch.utils._triton.has_triton_package()
    sys.meta_path.append(_Finder())
    _adapt_sglang()
    return True


def let_weights_come_through_shared_memory() -> None:
    """Add `torch.from_file` to the calls that SGLang's unpickler makes, on every device.

    The publisher names memory of its own that way. SGLang's list has only torch's own strategies, which need a
    common secret or a daemon. Releases before 0.5.22 allow all of torch.
    """
    from sglang.srt.utils import common

    allowed = getattr(getattr(common, "SafeUnpickler", None), "ALLOWED_GLOBALS", None)
    if isinstance(allowed, set):
        allowed.add(("torch", "from_file"))


def _adapt_sglang() -> None:
    """Let SGLang allocate host pools and use the seeds of requests on a CPU."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: Any, dtype: Any, device: Any, pin_memory: bool, allocator: Any, *_: Any, **__: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate  # the default pins memory through CUDA
    # A request's sampling_seed counts only under "deterministic inference", which lists attention backends by
    # name and installs batch-invariant CUDA kernels. On a CPU the seeds work and batches may still differ by
    # rounding.
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
