"""te_dist.launch: what a person starts: ``te-dist train``, ``compare``, ``doctor``, ``demo``; and the accelerate plugin."""
