"""Packing and unpacking: ``torch.ops.gradcomm.*`` (``schemas.py`` says what each does)."""

import torch

from . import schemas as schemas
from .config import executors as executors
from .config import show_config as show_config
from .format import BFLOAT16 as BFLOAT16
from .format import EXACT as EXACT
from .format import FLOAT16 as FLOAT16
from .format import FLOAT32 as FLOAT32
from .format import INT8 as INT8
from .format import THRESHOLD as THRESHOLD
from .format import CastFormat as CastFormat
from .format import Format as Format
from .format import OneBitFormat as OneBitFormat
from .format import QuantizeFormat as QuantizeFormat
from .format import TopKBlockFormat as TopKBlockFormat
from .format import TopKSparseFormat as TopKSparseFormat
from .format import TwoBitFormat as TwoBitFormat
from .format import format_of as format_of
from .layout import Layout as Layout
from .native import cpu_executor as cpu_executor

encode = torch.ops.gradcomm.encode
decode_mean = torch.ops.gradcomm.decode_mean
reduce_encode = torch.ops.gradcomm.reduce_encode
topk_mask_ = torch.ops.gradcomm.topk_mask_
orthogonalize_ = torch.ops.gradcomm.orthogonalize_
lowrank_project_ = torch.ops.gradcomm.lowrank_project_
lowrank_back_project_ = torch.ops.gradcomm.lowrank_back_project_
