"""Packing and unpacking: ``torch.ops.gradcomm.*`` (``schemas.py`` says what each does)."""

import torch

from . import schemas as schemas
from .format import CastFormat as CastFormat
from .format import Format as Format
from .format import OneBitFormat as OneBitFormat
from .format import QuantizeFormat as QuantizeFormat
from .format import format_of as format_of
from .layout import Layout as Layout
from .native import cpu_executor as cpu_executor

encode = torch.ops.gradcomm.encode
decode_mean = torch.ops.gradcomm.decode_mean
reduce_encode = torch.ops.gradcomm.reduce_encode
