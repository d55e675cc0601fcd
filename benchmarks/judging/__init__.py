"""Parts of benchmarks/judge.py: the noise it is shown, and the rules it is compared with."""
