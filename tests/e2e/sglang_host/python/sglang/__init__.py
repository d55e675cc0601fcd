"""A stand-in for the package of that name: its programs and their words, no model and no GPU. Tests alone run it."""
