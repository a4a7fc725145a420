"""te_dist.launch: what a person starts: ``te-dist doctor`` and ``te-dist demo``."""
