"""Checks the CUDA kernels against the reference with ==, and times each beside a device copy.

    python bench/gpu.py [--build] [--nvrtc] [--numel 67108864] [--json FILE]

``--build`` compiles the libraries with CMake into gradcomm/lib first (needs nvcc), ``--nvrtc`` takes
the run-time compiled kernels in their place. A row's "of copy": the bytes that a fused kernel must
move (read g, read and write e, the payload) over its time, as a share of the rate at which
``b.copy_(a)`` of float32 moves its 8 bytes an element in the same run. "at least" is the goal. The
script ends with 1 where bytes differ. Under five minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "ops"))

RANKS = 2


def build() -> None:
    folder = ROOT / "build" / "gpu"
    subprocess.run(
        [
            "cmake",
            "-S",
            ROOT,
            "-B",
            folder,
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DGRADCOMM_CUDA=ON",
        ],
        check=True,
    )
    subprocess.run(["cmake", "--build", folder, "--parallel"], check=True)
    library = ROOT / "gradcomm" / "lib"
    library.mkdir(exist_ok=True)
    for file in folder.glob("libgradcomm_*.so"):
        target = library / file.name
        target.unlink(missing_ok=True)  # another process may have it mapped
        target.write_bytes(file.read_bytes())


# Before gradcomm is imported, which loads them.
if "--build" in sys.argv and __name__ == "__main__":
    build()

import gradcomm  # noqa: E402
from gradcomm.ops import (  # noqa: E402
    EXACT,
    FLOAT16,
    FLOAT32,
    INT8,
    THRESHOLD,
    CastFormat,
    Format,
    Layout,
    OneBitFormat,
    QuantizeFormat,
    TopKBlockFormat,
    TopKSparseFormat,
    native,
    nvrtc,
)


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The median time of a call, on the device."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def check(operators: dict[str, Callable[..., None]]) -> list[str]:
    """Runs over odd sizes and special values, against the reference; what differs."""
    from cases import FORMATS, SPECIAL
    from compare import check_decoders, check_encode

    from tests.test_cuda import OnDevice

    ops, wrong = OnDevice(operators), []
    topk = [
        TopKBlockFormat(1600, 100),
        TopKBlockFormat(480, 30, 5, FLOAT16),
        TopKBlockFormat(4112, 257, 3, INT8),
        TopKSparseFormat(512, 2, 30),
        TopKSparseFormat(48, 3, 144, INT8, THRESHOLD),
    ]
    for format in [*FORMATS, *topk]:
        for seed, special in enumerate(SPECIAL):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                run = {
                    "sizes": [(0, 1), (0, 31), (0, 33), (1, -1), (1, 0), (1, 1), (3, 0)],
                    "gaps": [[0], [3, 0, 8]][seed % 2],
                    "chunks": 2,
                    "dtype": dtype,
                    "special": special,
                    "gain": None if seed % 2 else 0.5,
                    "feedback": True,
                    "steps": 2,
                    "key": 5,
                    "seed": seed,
                }
                try:
                    check_encode(ops, format, run)
                    check_decoders(ops, format, run, 1 + seed % 3)
                except AssertionError:
                    wrong.append(f"{format} {dtype} {special}")
    return wrong


Stages = dict[str, tuple[Callable[[], object], float]]


def stages(operators: dict[str, Callable[..., None]], format: Format, g: torch.Tensor) -> Stages:
    """What is timed on this gradient, and the bytes that it must move for an element."""
    numel, width = g.numel(), g.element_size()
    layout, ints = Layout.of([(0, numel)], format.block), format.ints()
    records = -(-layout.blocks // format.span)
    size, table = records * format.record_bytes, layout.table
    wire = size / numel
    e = torch.zeros(layout.blocks * format.block, device="cuda")
    payload = torch.zeros(1, size, dtype=torch.uint8, device="cuda")

    def encode() -> None:
        operators["encode"](g, table, ints, e, payload, None, 7)

    encode()
    payloads, out = payload.expand(RANKS, 1, size).contiguous(), torch.empty_like(g)

    def decode_mean() -> None:
        operators["decode_mean"](payloads, table, ints, 0, out)

    def reduce_encode() -> None:
        operators["reduce_encode"](payloads, table, ints, 0, e, payload[0], 7)

    found: Stages = {
        "encode": (encode, width + 8 + wire),
        "decode_mean": (decode_mean, RANKS * wire + width),
    }
    if g.dtype == torch.float32:  # it knows no bucket
        found["reduce_encode"] = (reduce_encode, RANKS * wire + 8 + wire)
    return found


def rows(operators: dict[str, Callable[..., None]], numel: int) -> list[dict[str, object]]:
    def whole_chunk(select: int) -> Format:
        return TopKSparseFormat(512, -(-numel // 512), max(1, numel // 100), FLOAT32, select)

    formats = {
        "onebit": (OneBitFormat(512), 0.85),
        "int8": (QuantizeFormat(512, 8), 0.85),
        "int8 stochastic": (QuantizeFormat(512, 8, False, True), None),
        "int4": (QuantizeFormat(512, 4), 0.85),
        "int2": (QuantizeFormat(512, 2), None),
        "fp16": (CastFormat(512, 1), None),
        "block top-k 1 %": (TopKBlockFormat(1600, 100), 0.8),
        "exact top-k 1 %": (whole_chunk(EXACT), 0.3),
        "threshold 1 %": (whole_chunk(THRESHOLD), None),
    }
    out: list[dict[str, object]] = []
    a, b = (torch.randn(numel, device="cuda") for _ in range(2))
    for name, (format, goal) in formats.items():
        for dtype in (torch.float32, torch.bfloat16):
            for stage, (run, moved) in stages(operators, format, a.to(dtype)).items():
                copy, ms = milliseconds(lambda: b.copy_(a)), milliseconds(run)
                share = moved / ms / (8 / copy)
                out.append(
                    {
                        "format": name,
                        "dtype": str(dtype),
                        "stage": stage,
                        "ms": ms,
                        "copy_ms": copy,
                        "gb_per_s": moved * numel / ms / 1e6,
                        "of_copy": share,
                        "at_least": goal,
                    }
                )
                print(
                    f"{name:16} {stage:14} {dtype!s:15} {ms:8.3f} ms  {share:5.2f} of copy", flush=True
                )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--nvrtc", action="store_true")
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    gradcomm.show_config()
    why = nvrtc.fault() if options.nvrtc else native.cuda_missing
    if why is not None:
        print(f"no such kernels: {why}", file=sys.stderr)
        return 2
    operators = dict(nvrtc.OPERATORS)
    if not options.nvrtc:
        operators = {name: getattr(torch.ops.gradcomm, name) for name in nvrtc.OPERATORS}
    wrong = check(operators)
    print("\n".join(f"DIFFERS: {line}" for line in wrong) or "all bytes equal those of the reference")
    result = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "executor": "nvrtc" if options.nvrtc else "native",
        "numel": options.numel,
        "differs": wrong,
        "rows": rows(operators, options.numel),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
