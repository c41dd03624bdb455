"""What the oldest supported versions of torch cannot do."""

import pytest
import torch

traced_whole_after_2_7 = pytest.mark.skipif(
    torch.__version__ < "2.8",
    reason="torch 2.7's compiler breaks at NamedTuple._replace and torch.amp.is_autocast_available",
)
