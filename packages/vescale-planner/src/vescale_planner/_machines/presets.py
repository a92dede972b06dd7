"""Numbers of machines by name, each with where it is from.

Peaks are dense ones, without sparsity, by bytes of an element: 2 is bfloat16, 4 float32 as torch
computes it by default (no TF32), 8 float64. Links are in one direction: half of what data sheets
call NVLink bandwidth. What kernels reach of these is not in data sheets: see ``EFFICIENCY``.

Memory is what the device's runtime reports and torch calls ``total_memory``, as its messages of
full devices quote it ("GPU 0 has a total capacity of 79.10 GiB"): data sheets call up to 6 % less.
"""

from __future__ import annotations

from typing import Any

GB = 10**9
GIB = 2**30
TERA = 10**12

# One InfiniBand or Ethernet card of 400 Gbit/s a GPU: NVIDIA DGX H100 and DGX B200 user guides,
# "ConnectX-7, 400 Gb/s"; GB200 NVL72 and AMD's reference nodes likewise.
_CARD_400 = 50 * GB

# Not fitted to measured runs. Matrix products: what cuBLAS reaches on large
# bfloat16 ones (an A100 250 of 312, an H100 650 to 700 of 989 TFLOP/s under its power limit, an
# MI300X 600 to 700 of 1307). Attention: FlashAttention-2 (Dao 2023) at length 2k to 8k on an A100,
# FlashAttention-3 (Shah et al. 2024) on an H100, forward and backward.
EFFICIENCY: dict[str, tuple[float, float]] = {
    "a100": (0.75, 0.55),
    "h100": (0.65, 0.5),
    "h200": (0.65, 0.5),
    "b200": (0.65, 0.5),
    "gb200": (0.65, 0.5),
    "mi300x": (0.45, 0.3),
    "cpu": (0.5, 0.25),
}

PRESETS: dict[str, dict[str, Any]] = {
    # "NVIDIA A100 Tensor Core GPU" data sheet, SXM 80 GB: 312 and 19.5 TFLOP/s, float64 tensor
    # cores 19.5, 2,039 GB/s, NVLink 600 GB/s. DGX A100: eight cards of 200 Gbit/s.
    "a100": {
        "memory_bytes": round(79.15 * GIB),
        "reserved_bytes": 2 * GB,
        "flops_per_second": {2: 312 * TERA, 4: 19.5 * TERA, 8: 19.5 * TERA},
        "memory_bytes_per_second": 2039 * GB,
        "ranks_per_node": 8,
        "intra_bytes_per_second": 300 * GB,
        "inter_bytes_per_second": 25 * GB,
    },
    # "NVIDIA H100 Tensor Core GPU" data sheet, SXM: with sparsity 3,958 and 1,979 TFLOP/s in FP8
    # and bfloat16, half of it without; 67 and 67; 3.35 TB/s; NVLink 900 GB/s.
    "h100": {
        "memory_bytes": round(79.10 * GIB),
        "reserved_bytes": 2 * GB,
        "flops_per_second": {1: 1979 * TERA, 2: 989 * TERA, 4: 67 * TERA, 8: 67 * TERA},
        "memory_bytes_per_second": 3350 * GB,
        "ranks_per_node": 8,
        "intra_bytes_per_second": 450 * GB,
        "inter_bytes_per_second": _CARD_400,
    },
    # "NVIDIA H200 Tensor Core GPU" data sheet, SXM: as H100, with 141 GB at 4.8 TB/s.
    "h200": {
        "memory_bytes": round(139.80 * GIB),
        "reserved_bytes": 2 * GB,
        "flops_per_second": {1: 1979 * TERA, 2: 989 * TERA, 4: 67 * TERA, 8: 67 * TERA},
        "memory_bytes_per_second": 4800 * GB,
        "ranks_per_node": 8,
        "intra_bytes_per_second": 450 * GB,
        "inter_bytes_per_second": _CARD_400,
    },
    # "NVIDIA HGX B200" data sheet, an eighth of eight GPUs: 72 and 36 PFLOP/s with sparsity in FP8
    # and bfloat16, 600 and 296 TFLOP/s; DGX B200: 1,440 GB at 64 TB/s; NVLink 1.8 TB/s a GPU.
    "b200": {
        "memory_bytes": round(178.35 * GIB),
        "reserved_bytes": 2 * GB,
        "flops_per_second": {1: 4500 * TERA, 2: 2250 * TERA, 4: 75 * TERA, 8: 37 * TERA},
        "memory_bytes_per_second": 8000 * GB,
        "ranks_per_node": 8,
        "intra_bytes_per_second": 900 * GB,
        "inter_bytes_per_second": _CARD_400,
    },
    # "NVIDIA GB200 NVL72" data sheet, a 72nd of a rack: 720 and 360 PFLOP/s with sparsity, 5,760
    # and 2,880 TFLOP/s, 13.4 TB at 576 TB/s, NVLink 130 TB/s. All 72 are connected by NVLink.
    "gb200": {
        "memory_bytes": 186 * GB,
        "reserved_bytes": 2 * GB,
        "flops_per_second": {1: 5000 * TERA, 2: 2500 * TERA, 4: 80 * TERA, 8: 40 * TERA},
        "memory_bytes_per_second": 8000 * GB,
        "ranks_per_node": 72,
        "intra_bytes_per_second": 900 * GB,
        "inter_bytes_per_second": _CARD_400,
    },
    # "AMD Instinct MI300X" data sheet: 2,614.9, 1,307.4, 163.4 and 163.4 TFLOP/s (matrix), 192 GB
    # at 5.3 TB/s; seven Infinity Fabric links of 128 GB/s in both directions.
    "mi300x": {
        "memory_bytes": round(191.98 * GIB),
        "reserved_bytes": 2 * GB,
        "flops_per_second": {1: 2614 * TERA, 2: 1307 * TERA, 4: 163 * TERA, 8: 163 * TERA},
        "memory_bytes_per_second": 5300 * GB,
        "ranks_per_node": 8,
        "intra_bytes_per_second": 448 * GB,
        "inter_bytes_per_second": _CARD_400,
    },
    # One core of a server a rank; gloo between two processes of one machine, measured at 0.2 ms
    # and 1.6 GB/s, so that nothing is taken off; one card of 10 Gbit/s a machine.
    "cpu": {
        "memory_bytes": 4 * GB,
        "reserved_bytes": GB // 2,
        "flops_per_second": {4: 50e9, 8: 25e9},
        "memory_bytes_per_second": 10 * GB,
        "ranks_per_node": 64,
        "intra_bytes_per_second": 1.6 * GB,
        "inter_bytes_per_second": 1.25 * GB,
        "nics_per_node": 1,
        "intra_latency_seconds": 2e-4,
        "inter_latency_seconds": 5e-4,
        "overlap": 0.0,
        "link_efficiency": 1.0,
        "memory_efficiency": 1.0,
        "fragmentation": 1.0,
        "keeps_buffers": True,
        "runs_ahead": False,
    },
}
