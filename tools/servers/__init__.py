"""What is known about each engine's command line and HTTP interface: one small adapter each."""
