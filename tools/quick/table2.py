import json, sys, glob, os
out = sys.argv[1]; order = sys.argv[2].split(",")
r = {v: json.load(open(f"{out}/res.{v}.json")) for v in order if os.path.exists(f"{out}/res.{v}.json")}
names = list(r[order[0]]["digests"])
print(f"{'':30s}", *(f"{v:>13s}" for v in r))
print(f"{'copy TB/s':30s}", *(f"{' '.join(f'{b:.3f}' for b in r[v]['res']['bw']):>13s}" for v in r))
for n in names:
    print(f"{n.replace(' + nvfp4 1x16 RHT','')[:30]:30s}", *(f"{' '.join(f'{u:.1f}' for u, f in r[v]['res'][n]):>13s}" for v in r))
    print(f"{'   %':30s}", *(f"{' '.join(f'{f:.1f}' for u, f in r[v]['res'][n]):>13s}" for v in r))
    bad = [v for v in r if r[v]["digests"][n] != r[order[0]]["digests"][n]]
    if bad: print("   DIFFERENT BYTES:", bad)
print({n: r[order[0]]["digests"][n].split(":")[0] for n in names})
