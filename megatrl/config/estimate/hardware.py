"""GPUs as a roofline needs them, and what fraction of their peaks this project assumes."""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Peaks of one device, from the vendor's data sheet; bandwidths in bytes per second and one direction."""

    name: str
    memory_bytes: int  # usable, as the driver reports it
    peak_flops: float  # dense bf16 matrix products per second, without sparsity
    memory_bandwidth: float
    link_bandwidth: float  # to the other devices of its node
    network_bandwidth: float  # of one device to other nodes
    host_bandwidth: float  # to the memory of its host
    is_cpu: bool = False


def _gpu(name: str, gib: float, tflops: float, tb_s: float, link_gb_s: float, host_gb_s: float) -> Hardware:
    return Hardware(
        name=name,
        memory_bytes=int(gib * GIB),
        peak_flops=tflops * 1e12,
        memory_bandwidth=tb_s * 1e12,
        link_bandwidth=link_gb_s * 1e9,
        network_bandwidth=50e9,  # one 400 Gb/s adapter for each device
        host_bandwidth=host_gb_s * 1e9,
    )


GPUS: Mapping[str, Hardware] = {
    "h200": _gpu("h200", 139.8, 989, 4.8, 450, 50),
    "h100": _gpu("h100", 79.1, 989, 3.35, 450, 50),
    "a100": _gpu("a100", 79.1, 312, 2.0, 300, 25),
    "b200": _gpu("b200", 178.0, 2250, 8.0, 900, 50),
}

CPU_CORE = Hardware(
    name="cpu",
    memory_bytes=0,  # the host's, found where the plan is made
    peak_flops=50e9,  # fp32 of one core with wide vectors
    memory_bandwidth=10e9,
    link_bandwidth=1e9,
    network_bandwidth=1e9,
    host_bandwidth=10e9,
    is_cpu=True,
)
"""One process with one thread. A tiny model is far from any peak: its seconds are a lower bound and no forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fractions of the peaks, and latencies in seconds. docs/plan.md says where each number comes from."""

    dense_matmul: float = 0.60
    expert_matmul: float = 0.35  # grouped products of small experts, permutation included; calibrated
    imbalance: float = 1.8  # work of the busiest expert rank over the mean under natural routing; calibrated
    attention: float = 0.45
    memory: float = 0.75
    decode_memory: float = 0.34  # of a decode step, the server's own work included; calibrated
    link: float = 0.70
    network: float = 0.80
    host: float = 0.60
    collective_s: float = 30e-6  # of each collective of a layer in training
    mixture_layer_s: float = 1e-3  # least time of a mixture layer's forward pass: launches from the host
    dense_layer_s: float = 0.3e-3
    decode_layer_s: float = 60e-6  # of each layer of a decode step, on top of its bytes: launches, small kernels
    http_bandwidth: float = 0.5e9  # bytes per second into one server by the `tensor` route
    disk_bandwidth: float = 2e9  # bytes per second of a shared file system
    step_s: float = 5.0  # what a step spends on the driver: rendering, packing, files
