"""Before training begins: the kernels that a codec needs on a device."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from gradcomm.codec import Codec, PowerSGD, RecordCodec
from gradcomm.codec.base import STEADY
from gradcomm.ops import Format, native, nvrtc

logger = logging.getLogger("gradcomm")

_told: set[tuple[str, str]] = set()


def prepare(codecs: Iterable[Codec], device: torch.device) -> None:
    """Compiles the CUDA kernels of ``codecs`` where no library holds them, so that the first backward
    does not wait for it. Warns, once a codec, where there is no way to have them: the codec is then run
    by the reference, which is right and slow."""
    if device.type != "cuda":
        return
    for codec in codecs:
        if isinstance(codec, PowerSGD) and native.cuda_missing is not None and nvrtc.fault() is None:
            nvrtc.prepare("orthogonalize", device)
        if not isinstance(codec, RecordCodec):
            continue
        for format in dict.fromkeys(codec.format(1, step) for step in (0, STEADY)):
            _prepare(codec, format, device)


def _prepare(codec: RecordCodec, format: Format, device: torch.device) -> None:
    why = _fault(format)
    if why is None and native.cuda_missing is not None:
        nvrtc.prepare(format, device)
    elif why is not None and (codec.spec(), why) not in _told:
        _told.add((codec.spec(), why))
        logger.warning(
            "gradcomm: %s on %s runs on the PyTorch reference, slowly, and the host waits: %s",
            codec.spec(),
            device,
            why,
        )


def _fault(format: Format) -> str | None:
    """Why there are no kernels for this format, or None."""
    if native.cuda_missing is None:
        there = bool(torch.ops.gradcomm.cuda_has_kernels(format.ints()))
    elif why := nvrtc.fault():
        return f"{native.cuda_missing}; kernels compiled at run time: {why}"
    else:
        there = nvrtc.has_kernels(format)
    return None if there else "gradcomm has no CUDA kernels for these options"
