"""Peak rates and memory of device kinds, as their vendors publish them; `planner.scenario.roofline` uses them.

Peaks are without structured sparsity; peaks of tensor cores are with 32-bit accumulation, which training uses.
Memory is the nominal capacity: error correction and the driver leave a few percent less.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from traces.common.errors import unknown_name


@dataclass(frozen=True)
class DeviceKind:
    """One kind of GPU or CPU, as its vendor describes it.

    Attributes:
        name: Name in scenarios, such as ``a100-40``.
        peak_flops: Dense peak by precision (`planner.scenario.training.PRECISIONS`), floating-point operations per
            second; every kind has fp32 and may lack the others.
        source: Vendor document and year, and how figures that are not in this document were derived.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    source: str


def find_kind(name: str) -> DeviceKind:
    """Return the datasheet entry of a device kind.

    Raises:
        InputError: There is no entry; the message names the most similar kind and all kinds.
    """
    if name not in DATASHEET:
        raise unknown_name("device kind", name, DATASHEET)
    return DATASHEET[name]


def is_gpu(kind: str) -> bool:
    """Return whether devices of a kind are GPUs: all but ``cpu``, names with ``cpu-``, and boards without one."""
    return not (kind == "cpu" or kind.startswith(("cpu-", "raspberry-pi-")))


def _kind(name: str, tera_flops: dict[str, float], memory_gib: int, gigabytes_per_s: float, source: str) -> DeviceKind:
    peaks = {precision: value * 1e12 for precision, value in tera_flops.items()}
    return DeviceKind(name, peaks, memory_gib * 2**30, gigabytes_per_s * 1e9, source)


def _tensor(fp32: float, tf32: float, half: float, fp8: float | None = None) -> dict[str, float]:
    """Return peaks, TFLOP/s, of a GPU whose tensor cores compute FP16 and BF16 at the rate ``half``, TF32 and FP8."""
    return {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half, **({} if fp8 is None else {"fp8": fp8})}


# fmt: off
_KINDS = (
    # Data centre
    _kind("p100", {"fp32": 9.3, "fp16": 18.7}, 16, 732, "NVIDIA Tesla P100 datasheet (PCIe, 16 GB), 2016"),
    _kind("v100-16", {"fp32": 15.7, "fp16": 125}, 16, 900, "NVIDIA V100 datasheet (SXM2), 2018"),
    _kind("v100-32", {"fp32": 15.7, "fp16": 125}, 32, 900, "NVIDIA V100 datasheet (SXM2), 2018"),
    _kind("t4", {"fp32": 8.1, "fp16": 65}, 16, 320,
          "NVIDIA T4 datasheet, 2018; bandwidth derived: 256 bit x 10 Gbit/s / 8"),
    _kind("a100-40", _tensor(19.5, 156, 312), 40, 1555, "NVIDIA A100 datasheet (SXM4, 40 GB), 2020"),
    _kind("a100-80", _tensor(19.5, 156, 312), 80, 2039, "NVIDIA A100 datasheet (SXM4, 80 GB), 2021"),
    _kind("a10g", _tensor(35, 35, 70), 24, 600, "NVIDIA A10G datasheet, 2022"),
    _kind("l4", _tensor(30.3, 60, 121, 242.5), 24, 300,
          "NVIDIA L4 datasheet, 2023; tensor-core figures derived: half of the sparse ones"),
    _kind("l40s", _tensor(91.6, 183, 362, 733), 48, 864, "NVIDIA L40S datasheet, 2023"),
    _kind("h100-80", _tensor(67, 494.7, 989.4, 1978.9), 80, 3350,
          "NVIDIA H100 datasheet (SXM5), 2023; tensor-core figures derived: half of the sparse ones"),
    _kind("h200", _tensor(67, 494.7, 989.4, 1978.9), 141, 4800,
          "NVIDIA H200 datasheet (SXM), 2024; tensor-core figures derived: half of the sparse ones"),
    _kind("gh200-96", _tensor(67, 494.7, 989.4, 1978.9), 96, 4000,
          "NVIDIA GH200 Grace Hopper Superchip datasheet (HBM3), 2023; tensor-core figures derived: half "
          "of the sparse ones"),
    # Workstation
    _kind("p4000", {"fp32": 5.3}, 8, 243, "NVIDIA Quadro P4000 datasheet, 2017"),
    _kind("titan-rtx", {"fp32": 16.3, "fp16": 130}, 24, 672,
          "NVIDIA TITAN RTX product page, 2018; fp32 derived: 4608 cores x 1770 MHz x 2"),
    _kind("rtx-6000", {"fp32": 16.3, "fp16": 130.5}, 24, 672,
          "NVIDIA Turing architecture whitepaper, 2018 (Quadro RTX 6000)"),
    _kind("a4000", _tensor(19.2, 38.4, 76.7), 16, 448,
          "NVIDIA RTX A4000 datasheet, 2021; tensor-core figures derived from the sparse 153.4 TFLOP/s: "
          "fp16 and bf16 half, tf32 a quarter"),
    _kind("a5000", _tensor(27.8, 55.6, 111.1), 24, 768,
          "NVIDIA RTX A5000 datasheet, 2021; tensor-core figures derived from the sparse 222.2 TFLOP/s: "
          "fp16 and bf16 half, tf32 a quarter"),
    _kind("a6000", _tensor(38.7, 77.4, 154.8), 48, 768,
          "NVIDIA RTX A6000 datasheet, 2020; tensor-core figures derived from the sparse 309.7 TFLOP/s: "
          "fp16 and bf16 half, tf32 a quarter"),
    # Desktop: the boards at reference clocks; tensor cores run at half rate with 32-bit accumulation
    _kind("rtx-2080", {"fp32": 10.1, "fp16": 40.3}, 8, 448,
          "NVIDIA Turing architecture whitepaper, 2018; fp32 derived: 2944 cores x 1710 MHz x 2"),
    _kind("rtx-2080-ti", {"fp32": 13.4, "fp16": 53.8}, 11, 616,
          "NVIDIA Turing architecture whitepaper, 2018"),
    _kind("rtx-3090", _tensor(35.6, 35.6, 71), 24, 936, "NVIDIA Ampere GA102 architecture whitepaper, 2020"),
    _kind("rtx-4090", _tensor(82.6, 82.6, 165.2, 330.3), 24, 1008, "NVIDIA Ada architecture whitepaper, 2022"),
    # Embedded; CPU and GPU share the memory
    _kind("jetson-nano", {"fp32": 0.236, "fp16": 0.472}, 4, 25.6,
          "NVIDIA Jetson Nano datasheet, 2019; fp32 derived: 128 cores x 921.6 MHz x 2"),
    _kind("jetson-tx2", {"fp32": 0.666, "fp16": 1.33}, 8, 59.7,
          "NVIDIA Jetson TX2 datasheet, 2017; fp32 derived: 256 cores x 1.3 GHz x 2"),
    _kind("jetson-xavier-nx", {"fp32": 0.845, "fp16": 6.76}, 8, 51.2,
          "NVIDIA Jetson Xavier NX datasheet v1.3, 2020; derived: fp32 384 cores x 1.1 GHz x 2, fp16 48 "
          "tensor cores x 128 x 1.1 GHz, bandwidth 128 bit x 3.2 Gbit/s / 8"),
    _kind("jetson-agx-xavier", {"fp32": 1.41, "fp16": 11.3}, 32, 136.5,
          "NVIDIA Jetson AGX Xavier datasheet (32 GB), 2019; derived: fp32 512 cores x 1.377 GHz x 2, fp16 "
          "64 tensor cores x 128 x 1.377 GHz"),
    _kind("jetson-orin-nano", {"fp32": 1.28, "fp16": 10}, 8, 68,
          "NVIDIA Jetson Orin Nano datasheet (8 GB, 15 W), 2023; derived: fp32 1024 cores x 625 MHz x 2, "
          "fp16 a quarter of the sparse 40 INT8 TOPS"),
    _kind("jetson-agx-orin", {"fp32": 5.3, "fp16": 42.5}, 64, 204.8,
          "NVIDIA Jetson AGX Orin technical brief (64 GB), 2022; fp16 derived: a quarter of the GPU's "
          "sparse 170 INT8 TOPS"),
    _kind("raspberry-pi-4", {"fp32": 0.048}, 4, 12.8,
          "Raspberry Pi 4 Model B product brief (4 GB), 2019; derived: 4 Cortex-A72 x 1.5 GHz x 8 (one "
          "128-bit FMA a cycle), bandwidth 32 bit x 3.2 Gbit/s / 8"),
)
# fmt: on

DATASHEET: Mapping[str, DeviceKind] = MappingProxyType({kind.name: kind for kind in _KINDS})


@dataclass(frozen=True)
class InterconnectKind:
    """How the GPUs of a host are connected.

    Attributes:
        bandwidth_bps: Rate of each GPU, each way, as the vendor gives it, bits per second.
        latency_s: Time for one hop of a collective operation, seconds.
        source: Document of the vendor.
    """

    bandwidth_bps: float
    latency_s: float
    source: str


# Share of the vendor's rate that all-reduces reach: 208 of 300 GB/s between two A100 over NVLink 3
# (github.com/NVIDIA/nccl-tests, issue 178, large messages). Assumed for the others too.
REACHED_SHARE = 0.69

# Time for a hop. Assumption: all-reduces of a few bytes over 8 GPUs, of 14 hops, take 25 us over NVLink, and twice as
# long over PCIe.
_NVLINK_S, _PCIE_S = 1.8e-6, 3.6e-6


def _gigabytes(gigabytes_per_s: float, latency_s: float, source: str) -> InterconnectKind:
    return InterconnectKind(8e9 * gigabytes_per_s, latency_s, source)


INTERCONNECTS: Mapping[str, InterconnectKind] = MappingProxyType(
    {
        "nvlink-2": _gigabytes(150, _NVLINK_S, "NVIDIA V100 datasheet (SXM2), 2018: 300 GB/s both ways"),
        "nvlink-3": _gigabytes(300, _NVLINK_S, "NVIDIA A100 datasheet (SXM4), 2020: 600 GB/s both ways"),
        "nvlink-4": _gigabytes(450, _NVLINK_S, "NVIDIA H100 datasheet (SXM5), 2023: 900 GB/s both ways"),
        "pcie-3": _gigabytes(15.75, _PCIE_S, "PCI Express Base Specification 3.0, 2010: 16 lanes"),
        "pcie-4": _gigabytes(31.5, _PCIE_S, "PCI Express Base Specification 4.0, 2017: 16 lanes"),
        "pcie-5": _gigabytes(63, _PCIE_S, "PCI Express Base Specification 5.0, 2019: 16 lanes"),
    }
)

# How GPUs reach their host's memory: by 16 lanes of PCIe, in the documents of `_KINDS`, or by a link of their own.
# Boards whose GPU shares the memory with the CPU are left out, as are CPUs.
_HOST_LINKS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("p100", "v100-16", "v100-32", "t4", "p4000", "titan-rtx", "rtx-6000"), "pcie-3"),
        **dict.fromkeys(("rtx-2080", "rtx-2080-ti"), "pcie-3"),
        **dict.fromkeys(("a100-40", "a100-80", "a10g", "l4", "l40s", "a4000", "a5000", "a6000"), "pcie-4"),
        **dict.fromkeys(("rtx-3090", "rtx-4090"), "pcie-4"),
        **dict.fromkeys(("h100-80", "h200"), "pcie-5"),
        # NVLink-C2C carries 900 GB/s both ways.
        "gh200-96": "nvlink-4",
    }
)


def host_link_bps(kind: str) -> float:
    """Return the rate of copies between the memories of a kind and of its host, each way, bits per second.

    It is infinite for kinds whose memory is the host's, as that of CPUs.

    Raises:
        InputError: The datasheet does not contain the kind.
    """
    if not is_gpu(kind):
        return math.inf
    link = _HOST_LINKS.get(find_kind(kind).name)
    return math.inf if link is None else INTERCONNECTS[link].bandwidth_bps


def has_nccl(kind: str) -> bool:
    """Return whether torch can use NCCL on a kind: NVIDIA's GPUs but those of Jetson boards, whose torch lacks it."""
    return kind in _HOST_LINKS
