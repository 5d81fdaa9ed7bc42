"""What the process of the tests must have before anything is imported: a choice of Triton's, and interrupts."""

from __future__ import annotations

import os
import signal

import torch

# Without a GPU, Triton kernels run in Triton's interpreter; that choice is read when triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A job in the background of a script ignores interrupts, and so does whatever it starts; the tests send some.
signal.signal(signal.SIGINT, signal.default_int_handler)
