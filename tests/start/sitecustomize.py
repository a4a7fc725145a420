"""For each Python that `make test` starts, and those that tests start: the garbage collector comes by less often. What
an import or the compiler makes is no garbage, and looking through it every 700 objects takes a tenth of their time."""

import gc

gc.set_threshold(50_000, 10, 10)
