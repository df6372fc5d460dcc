"""The CUDA kernels compiled at run time, for a CUDA torch where no nvcc built them (``gradcomm[jit]``).

CuPy brings NVRTC and launches; the sources are those of the native library (``csrc/cuda``).
``compiler``: from a source to a loaded module; ``task``: what a kernel is told, and ``plan``: an
operator as launches, both as in csrc/cuda; ``operators``: those of ``torch.ops.gradcomm``.
"""

from .compiler import FAMILIES as FAMILIES
from .compiler import fault as fault
from .operators import OPERATORS as OPERATORS
from .operators import prepare as prepare
from .plan import has_kernels as has_kernels
