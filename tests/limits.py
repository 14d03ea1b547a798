"""How long a test waits before it gives up: a busy machine may take any time, and only a hang must end."""

HANG_S = 600.0
