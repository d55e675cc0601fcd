"""Verbs that touch the world: SSH, jobs, facts, services, servers and benchmarks; they never judge a result."""
