"""Nouns and their storage: what Ratchet knows, never what it does."""
