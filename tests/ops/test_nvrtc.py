"""The CUDA kernels compile at run time, without a GPU; and what stands for CUDA's host code in Python
says the same as csrc/cuda/launch.h."""

from __future__ import annotations

import pytest
import torch

import gradcomm
from gradcomm.ops import (
    CastFormat,
    Layout,
    OneBitFormat,
    QuantizeFormat,
    TopKBlockFormat,
    TopKSparseFormat,
    TwoBitFormat,
    nvrtc,
)
from gradcomm.ops.checks import Job
from gradcomm.ops.nvrtc import compiler, plan
from gradcomm.ops.nvrtc.task import Task

FORMATS = {
    "cast": [CastFormat(512)],
    "onebit": [OneBitFormat(512)],
    "quantize": [QuantizeFormat(512, bits) for bits in (2, 4, 8)],
    "topk_block": [TopKBlockFormat(1600, 100)],
    "topk_sparse": [TopKSparseFormat(512, 4, 20)],
    "twobit": [TwoBitFormat(512)],
}


def compile_for(source: str, arch: str) -> bytes:
    """A cubin, by NVIDIA's own Python binding."""
    rtc = pytest.importorskip(
        "cuda.bindings.nvrtc", reason="cuda-bindings or nvidia-cuda-nvrtc is missing"
    )
    error, program = rtc.nvrtcCreateProgram(compiler.text(source).encode(), b"kernel.cu", 0, [], [])
    assert error == 0
    flags = [option.encode() for option in compiler.options(arch)]
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
@pytest.mark.parametrize("source", compiler.SOURCES)
def test_kernels_compile_without_a_gpu(source: str, arch: str) -> None:
    cubin = compile_for(source, arch)
    names = [name for format in FORMATS.get(source, []) for name in plan.kernels(format)]
    for name in names or [f"gradcomm_{source}"]:
        assert name.encode() + b"\0" in cubin


def test_every_kernel_of_csrc_is_compiled() -> None:
    found = {file.stem for file in (compiler.sources() / "cuda").glob("*.cu")} - {"run"}
    assert found == set(compiler.SOURCES)


def test_every_record_is_in_one_launch() -> None:
    layout = Layout.of([(300 * i, 1 + i) for i in range(290)], 128)
    rows = layout.table.tolist()
    for begin, records in ((0, layout.blocks), (0, layout.blocks + 5), (7, 200), (layout.blocks + 3, 4)):
        job = Job(OneBitFormat(128), rows, layout.blocks, records)
        found = plan.launches("encode", job, torch.float32, Task(block_begin=begin), 1000)
        at = 0
        for task in (launch.task for launch in found):
            assert task.begin == at
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
