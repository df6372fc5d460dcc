"""gradcomm: gradient compression for PyTorch DDP.

state = gradcomm.register(ddp, "onebit")
"""

from gradcomm import launch as launch
from gradcomm import optim as optim
from gradcomm.checkpoint import merge_states as merge_states
from gradcomm.codec import Auto as Auto
from gradcomm.codec import Cast as Cast
from gradcomm.codec import Codec as Codec
from gradcomm.codec import Dense as Dense
from gradcomm.codec import OneBit as OneBit
from gradcomm.codec import PowerSGD as PowerSGD
from gradcomm.codec import Quantize as Quantize
from gradcomm.codec import TopK as TopK
from gradcomm.codec import TwoBit as TwoBit
from gradcomm.handshake import DisagreementError as DisagreementError
from gradcomm.hook import comm_hook as comm_hook
from gradcomm.hook import register as register
from gradcomm.lane import LaneError as LaneError
from gradcomm.ops import show_config as show_config
from gradcomm.state import CommState as CommState
from gradcomm.transport.mpi_register import register as _register_mpi_backend
from gradcomm.version import __version__ as __version__

_register_mpi_backend()  # imports no mpi4py and starts no MPI
