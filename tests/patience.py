"""How long tests wait. It is generous, since nobody waits as long unless something hangs: a shared machine may give two
workers and their ranks half of a core, and then an import takes a minute."""

HUNG = 900.0  # seconds after which what a test waits for will not come; pytest's own limit is above it
