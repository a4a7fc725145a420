"""Times cases of benchmarks/kernels.py, the kernels of each, and whether results stay the same, for settings of one
environment variable that the sources under test read: python variants.py "case;case" 0,1,2. Not for the tree."""
import collections, os, statistics, sys, warnings
import torch
sys.path.insert(0, "benchmarks")
import kernels as K
from torch.profiler import ProfilerActivity, profile
warnings.filterwarnings("ignore")
torch.manual_seed(0)
xs = [torch.randn(16384, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
names, settings = sys.argv[1].split(";"), sys.argv[2].split(",")
bandwidth = K.copy_bandwidth(30)
PARTS = ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise", "_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise")
for case in (c for c in (*K.quantize_cases(), *K.producer_cases()) if c.name in names):
    for setting in settings:
        os.environ["TED_V"] = setting
        kept = [None] * len(xs)
        def call(i): kept[i] = case.call(xs[i])
        us = K.median_us([lambda i=i: call(i) for i in range(len(xs))], 40)
        now = [getattr(kept[0], n).clone() for n in PARTS if getattr(kept[0], n, None) is not None]
        base = now if setting == settings[0] else base
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(base, now, strict=True))
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for i in range(9): call(i % len(xs))
            torch.cuda.synchronize()
        found = collections.defaultdict(list)
        for e in seen.events():
            if e.device_type == torch.autograd.DeviceType.CUDA:
                found[e.name.replace("te_dist::cuda::", "").replace("(anonymous namespace)::", "")[:60]].append(e.device_time)
        of = "; ".join(f"{k.split('(')[0][:46]} {statistics.median(t):.1f}" for k, t in found.items() if statistics.median(t) > 3)
        limit = case.bytes * 16384 * 8192 / bandwidth
        print(f"{setting:5} {'=' if same else 'DIFFER'} {case.name:50} {us:6.1f} us {100 * limit / us:5.1f} %  {of}")
