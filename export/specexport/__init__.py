"""Checkpoint in, engine folder out."""
