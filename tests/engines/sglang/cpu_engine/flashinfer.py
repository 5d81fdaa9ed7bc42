"""In the place of flashinfer, which is for CUDA and takes six seconds to import in each of a server's processes.

Its absence is an ImportError to sglang.
"""

raise ImportError("flashinfer is left out of servers on the CPU")
