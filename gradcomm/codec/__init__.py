"""What is sent: one file a family."""

from .auto import Auto as Auto
from .base import Codec as Codec
from .base import Recipe as Recipe
from .base import RecordCodec as RecordCodec
from .cast import Cast as Cast
from .dense import Dense as Dense
from .onebit import OneBit as OneBit
from .parse import parse as parse
from .powersgd import PowerSGD as PowerSGD
from .quantize import Quantize as Quantize
from .topk import TopK as TopK
from .twobit import TwoBit as TwoBit
