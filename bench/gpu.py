"""Everything that only a GPU can show, in one run of under five minutes, as JSON.

    python bench/gpu.py [--build] [--nvrtc] [--numel 67108864] [--json FILE]

``--build`` compiles the libraries with CMake into gradcomm/lib first (needs nvcc), ``--nvrtc`` takes
the run-time compiled kernels in their place. Then:

1. every kernel against the reference with ==, at odd sizes and special values;
2. each kernel's time beside a device copy. "of copy": the bytes that a fused kernel must move (read g,
   read and write e, the payload) over its time, as a share of the rate at which ``b.copy_(a)`` of
   float32 moves its 8 bytes an element in the same run; "at least" is the goal. And how many launches
   the whole encode of a 25 MiB bucket takes;
3. DDP with every codec (``gpu_train.py``): NCCL on one rank, where nothing may make the host wait; Gloo
   on two ranks that share the GPU, which must end alike; and the same gradients on CPU and GPU, whose
   means must be equal bit for bit;
4. compute-sanitizer's memcheck and racecheck over small sizes, where the tool is installed.

Ends with 1 where anything is wrong, with 2 where there is no GPU or are no kernels.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

STARTED = time.monotonic()
ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "ops"))

RANKS = 2
BUDGET = 285.0  # seconds for all of it


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


def launches(run: Callable[[], object]) -> int | None:
    """Kernels that a call launches, as torch's profiler sees them; None where it sees nothing."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    on_device = [e for e in seen.key_averages() if e.device_type.name == "CUDA"]
    kernels = sum(e.count for e in on_device if not e.key.startswith("Mem"))
    return kernels or None


def check(operators: dict[str, Callable[..., None]], quick: bool = False) -> list[str]:
    """Runs over odd sizes and special values, against the reference; what differs. ``quick``: over
    usual values alone."""
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
        for seed, special in enumerate(SPECIAL[:1] if quick else SPECIAL):
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


def encode_launches(operators: dict[str, Callable[..., None]]) -> dict[str, int | None]:
    """Of a bucket of 25 MiB of float32, by format."""
    g = torch.randn(25 << 18, device="cuda")
    formats = {"onebit": OneBitFormat(512), "int8": QuantizeFormat(512, 8), "cast": CastFormat(512, 1)}
    formats["block top-k 1 %"] = TopKBlockFormat(1600, 100)
    return {name: launches(stages(operators, f, g)["encode"][0]) for name, f in formats.items()}


def sanitize(nvrtc_too: list[str], seconds: float) -> tuple[dict[str, str], list[str]]:
    """What compute-sanitizer says of every kernel at small sizes, and what is wrong."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        return {"none": "compute-sanitizer is not installed"}, []
    said, wrong = {}, []
    end = time.monotonic() + seconds
    for check_for in ("memcheck", "racecheck"):
        command = [tool, "--tool", check_for, "--error-exitcode", "9"]
        command += [sys.executable, __file__, "--check-only", *nvrtc_too]
        left = end - time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, left))
        except subprocess.TimeoutExpired:
            said[check_for] = f"not done within {left:.0f} s"
            continue
        lines = (done.stdout + done.stderr).splitlines()
        said[check_for] = next((x for x in reversed(lines) if "SUMMARY" in x), f"exit {done.returncode}")
        if done.returncode != 0:
            wrong.append(f"{check_for}: exit {done.returncode}: {lines[-30:]}")
    return said, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--nvrtc", action="store_true")
    parser.add_argument("--check-only", action="store_true", help="the first step, at few values")
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/gpu.py needs a CUDA GPU and a CUDA build of torch; there is none", file=sys.stderr)
        return 2
    gradcomm.show_config()
    why = nvrtc.fault() if options.nvrtc else native.cuda_missing
    if why is not None:
        print(f"no such kernels: {why}", file=sys.stderr)
        return 2
    operators = dict(nvrtc.OPERATORS)
    if not options.nvrtc:
        operators = {name: getattr(torch.ops.gradcomm, name) for name in nvrtc.OPERATORS}

    seconds: dict[str, float] = {}
    wrong = [f"differs: {line}" for line in check(operators, options.check_only)]
    seconds["check"] = time.monotonic() - STARTED
    print("\n".join(wrong) or "all bytes equal those of the reference", flush=True)
    if options.check_only:
        return 1 if wrong else 0
    from bench.gpu_train import every_codec

    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "executor": "nvrtc" if options.nvrtc else "native",
        "numel": options.numel,
        "rows": rows(operators, options.numel),
        "launches of an encode of 25 MiB": encode_launches(operators),
    }
    seconds["time"] = time.monotonic() - STARTED
    torch.cuda.empty_cache()  # ranks share the GPU
    result["training"], faulty = every_codec()
    wrong += faulty
    seconds["train"] = time.monotonic() - STARTED
    left = BUDGET - seconds["train"]
    result["sanitizer"], faulty = sanitize(["--nvrtc"] if options.nvrtc else [], left)
    wrong += faulty
    seconds["sanitize"] = time.monotonic() - STARTED
    result.update(wrong=wrong, seconds_at_the_end_of=seconds)
    print("\n".join(f"WRONG: {line}" for line in wrong) or "nothing is wrong")
    for tool, said in result["sanitizer"].items():
        print(f"{tool}: {said}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
