"""Words for a language model, one file each, loaded by name."""
