"""Benchmark clients, all giving the same Measurement: one small adapter each."""
