"""The embedded torch backend: reuse of moved KV caches on transformers decoders."""

from torch_cacheslide.backend import TorchBackend

__all__ = ["TorchBackend"]
