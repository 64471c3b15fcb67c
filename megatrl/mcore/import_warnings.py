"""Hides what megatron-core 0.16.1 is known to say and what nobody can act on.

Missing kernels are the plan on CPU; the others come from Megatron's own lines under torch 2.13.
Imported by the package's __init__, before the first `import megatron`.
"""

import warnings

for _category, _message in (
    (UserWarning, "Transformer Engine and Apex are not installed"),
    (UserWarning, "Apex is not installed"),
    (UserWarning, "full scope is deprecated"),  # a field that Megatron fills itself
    (UserWarning, "The .grad attribute of a Tensor that is not a leaf"),  # the distributed optimizer's shards
    (FutureWarning, "`torch.distributed.reduce_scatter_tensor` is deprecated"),
    (FutureWarning, "`load_state_dict` is deprecated"),  # dist_checkpointing's own call
    (FutureWarning, "Please use DTensor instead"),
    (FutureWarning, "`torch.distributed.all_gather_into_tensor` is deprecated"),
):
    warnings.filterwarnings("ignore", message=_message, category=_category)
