"""HuggingFace's and torch.distributed.checkpoint's files, and copies from format to format."""
