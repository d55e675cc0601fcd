"""Parts of `benchmarks/chaos.py`: whole sessions on real parts under faults at random times, judged from outside."""
