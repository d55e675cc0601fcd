"""Changes that stand beside a server's command line: one small file for each kind, each with a way back."""
