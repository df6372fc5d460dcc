"""Before training begins: the kernels that a codec needs on a device."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from gradcomm.codec import Codec, RecordCodec
from gradcomm.ops import native, nvrtc

logger = logging.getLogger("gradcomm")

_told: set[tuple[str, str]] = set()


def prepare(codecs: Iterable[Codec], device: torch.device) -> None:
    """Compiles the CUDA kernels of ``codecs`` where no library holds them, so that the first backward
    does not wait for it. Warns, once a codec, where there is no way to have them: the codec is then run
    by the reference, right and slow."""
    if device.type != "cuda" or native.cuda_missing is None:
        return
    why = nvrtc.fault()
    for codec in codecs:
        if not isinstance(codec, RecordCodec):
            continue
        if why is None:
            nvrtc.prepare(codec.format(1, 0), device)
        elif (codec.name, why) not in _told:
            _told.add((codec.name, why))
            logger.warning(
                "gradcomm: %s on %s runs on the slow PyTorch reference: %s; compiled at run time: %s",
                codec.name,
                device,
                native.cuda_missing,
                why,
            )
