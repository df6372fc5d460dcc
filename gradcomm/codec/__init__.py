"""What is sent: one file a family."""

from .base import Codec as Codec
from .base import Recipe as Recipe
from .base import RecordCodec as RecordCodec
from .dense import Dense as Dense
from .onebit import OneBit as OneBit
from .powersgd import PowerSGD as PowerSGD
from .parse import parse as parse
