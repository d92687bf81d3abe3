"""Drafters: what proposes tokens for the target to verify. See :mod:`specrun.drafters.base`."""
