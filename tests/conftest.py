"""What has to be set before any test imports Triton."""

import os
from pathlib import Path

# Where no card is, kernels run under the interpreter, which Triton looks for when it is imported (bitsandbytes imports it too).
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
