"""te_dist.launch: ``te-dist train``, ``compare``, ``doctor``, ``demo``, and the accelerate plugin."""
