"""Which executors there are, and why others are not."""

from __future__ import annotations

import torch

from . import native, nvrtc


def executors() -> dict[str, str]:
    """What runs ``torch.ops.gradcomm.*``: each executor, or "no: " and why it is not there."""
    cpu = f"yes, {native.cpu_executor()}" if native.missing is None else f"no: {native.missing}"
    why = native.cuda_missing
    cuda = "yes" if why is None else f"no: {why}"
    if why is None and not torch.cuda.is_available():
        cuda = "loaded, and no CUDA device (or no driver)"
    why = nvrtc.fault()
    jit = (
        f"no: {why}" if why is not None else "yes" if native.cuda_missing else "not needed: cuda library"
    )
    return {
        "reference": "yes: any device, and what the others have no kernels for",
        "cpu": cpu,
        "cuda library": cuda,
        "cuda nvrtc": jit,
    }


def show_config() -> None:
    """Prints the versions, the executors and what they have no kernels for."""
    from gradcomm.version import __version__

    print(f"gradcomm {__version__}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    for name, state in executors().items():
        print(f"  {name:13} {state}")
    names = ", ".join(nvrtc.FAMILIES.values())
    print(
        f"  kernels on CUDA: {names} (blocks up to 12288 elements; topk_sparse: of any size), "
        "orthogonalize (up to 32 rows); on the reference there: all else"
    )


# Where nvcc built nothing and CuPy can, the kernels are compiled when they are first wanted.
if native.cuda_missing is not None and nvrtc.fault() is None:
    _library = torch.library.Library("gradcomm", "IMPL")
    for _name, _operator in nvrtc.OPERATORS.items():
        _library.impl(_name, _operator, "CUDA")
