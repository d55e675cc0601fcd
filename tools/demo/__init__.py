"""The parts that the demo brings along: a llama.cpp server, its model, and an SSH server on loopback."""
