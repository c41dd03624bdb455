"""The `torch.library` operations. Nothing outside this folder registers one."""
