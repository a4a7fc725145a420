#!/usr/bin/env bash
# The same benchmark cases with the kernels of several commits, in one go on a machine with a GPU. (For history, not for
# the tree.)
#
#   tools/variants.sh export NAME=COMMIT ...   # where the repository is: trees to variants/NAME
#   tools/variants.sh time CASE ...            # where the GPU is: builds all at once, then two rounds of each case
set -euo pipefail
cd "$(dirname "$0")/.."
verb=$1
shift
if [ "$verb" = export ]; then
  rm -rf variants
  for pair in "$@"; do
    mkdir -p "variants/${pair%%=*}"
    git archive "${pair#*=}" csrc te_dist benchmarks | tar x -C "variants/${pair%%=*}"
  done
  exit
fi
build() {
  cmake -S "$1/csrc" -B "$1/build" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v python3)" \
    >"$1/log" 2>&1 &&
    cmake --build "$1/build" -j 8 >>"$1/log" 2>&1 && cp "$1"/build/_kernels*.so "$1/te_dist/" || tail -20 "$1/log"
}
for tree in variants/*; do build "$tree" & done
wait
for round in 1 2; do
  for tree in variants/*; do
    (cd "$tree" && PYTHONPATH=$PWD python3 benchmarks/kernels.py --shape 16384x8192 --only "$@" --json "round$round.json" >"log$round" 2>&1) ||
      tail -5 "$tree/log$round"
  done
done
python3 - <<'TABLE'
import json
from pathlib import Path
shares = {}
for path in sorted(Path("variants").glob("*/round*.json")):
    for row in json.loads(path.read_text())["results"]:
        shares.setdefault(row["kernel"], {}).setdefault(path.parent.name, []).append(100 * row.get("fraction", 0))
names = sorted({name for of in shares.values() for name in of})
print(f"{'share of the copy, two rounds':56s}", *(f"{name:>13s}" for name in names))
for kernel, of in shares.items():
    print(f"{kernel:56s}", *(f"{'  '.join(f'{v:.1f}' for v in of.get(name, [])):>13s}" for name in names))
TABLE
