"""Speculative decoding over exported engines: draft, verify, roll back, without PyTorch."""
