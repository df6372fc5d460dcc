"""The CUDA kernels compile at run time, without a GPU; and what stands for CUDA's host code in Python
says the same as csrc/cuda/launch.h."""

from __future__ import annotations

import pytest
import torch

import gradcomm
from gradcomm.ops import CastFormat, Layout, OneBitFormat, QuantizeFormat, TopKBlockFormat, nvrtc

FORMATS = {
    0: [CastFormat(512)],
    1: [OneBitFormat(512)],
    2: [QuantizeFormat(512, bits) for bits in (2, 4, 8)],
    3: [TopKBlockFormat(1600, 100)],
}


def compile_for(family: int, arch: str) -> bytes:
    """A cubin, by NVIDIA's own Python binding."""
    rtc = pytest.importorskip(
        "cuda.bindings.nvrtc", reason="cuda-bindings or nvidia-cuda-nvrtc is missing"
    )
    error, program = rtc.nvrtcCreateProgram(nvrtc.source(family).encode(), b"kernel.cu", 0, [], [])
    assert error == 0
    flags = [option.encode() for option in nvrtc.options(arch)]
    (error,) = rtc.nvrtcCompileProgram(program, len(flags), flags)
    _, size = rtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    rtc.nvrtcGetProgramLog(program, log)
    assert error == 0, log.decode()
    _, size = rtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    rtc.nvrtcGetCUBIN(program, cubin)
    return cubin


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("family", nvrtc.FAMILIES)
def test_kernels_compile_without_a_gpu(family: int, arch: str) -> None:
    cubin = compile_for(family, arch)
    for format in FORMATS[family]:
        for stage in nvrtc.STAGES[: 4 if isinstance(format, TopKBlockFormat) else 3]:
            for dtype in nvrtc._TYPE_NAMES if stage in ("encode", "decode_mean") else (None,):
                assert nvrtc.kernel_name(format, stage, dtype).encode() in cubin


def test_every_record_is_in_one_launch() -> None:
    layout = Layout.of([(300 * i, 1 + i) for i in range(290)], 128)
    rows = layout.table.tolist()
    for begin, records in ((0, layout.blocks), (0, layout.blocks + 5), (7, 200), (layout.blocks + 3, 4)):
        found = nvrtc.launches(nvrtc.Task(block_begin=begin), rows, records)
        at = 0
        for task, count in found:
            assert task.begin == at and task.end == at + count
            at = task.end
            segments = [task.segments[4 * i : 4 * i + 4] for i in range(task.num_segments)]
            for block in range(begin + task.begin, begin + task.end):
                owner = max((r for r in rows if r[2] <= block), key=lambda r: r[2])
                assert owner in segments or block >= layout.blocks
        assert at == records


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(RuntimeError, match="cannot compile CUDA kernels at run time"):
        nvrtc.prepare(OneBitFormat(512), torch.device("cuda", 0))


def test_the_configuration_names_all_executors(capsys: pytest.CaptureFixture[str]) -> None:
    gradcomm.show_config()
    said = capsys.readouterr().out
    for name, state in gradcomm.ops.executors().items():
        assert name in said and state in said
