import contextlib

import torch

# Importing PyTorch's own test lists forbids, for the whole process, to set flags such as
# torch.backends.cudnn.deterministic. Import them first, and allow it again.
with contextlib.suppress(ImportError):
    import torch.testing._internal.autocast_test_lists  # noqa: F401

    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
