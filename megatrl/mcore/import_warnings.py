"""Hides what megatron-core says at import about kernels that a CPU installation lacks on purpose.

Imported by the package's __init__, before the first `import megatron`.
"""

import warnings

for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",  # of a field that megatron-core 0.16.1 fills itself
):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
