"""How a server process is held: one small adapter for each kind of service."""
