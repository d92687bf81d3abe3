"""The rules of :mod:`specgraphs.static_rules`, by subject."""
