set -e
tree=$1; base=$2; out=$3; shift 3
mkdir -p "$out"; [ "$base" = "$out" ] || cp -n "$base"/*.o "$out"/
printf '%s\n' "$@" | xargs -P 2 -I{} sh -c "nvcc -O3 -DNDEBUG -std=c++17 --generate-code=arch=compute_90,code=[compute_90,sm_90] -Xcompiler=-fPIC -Xcompiler=-fvisibility=hidden -fmad=false $DEFS --expt-relaxed-constexpr -Xcompiler=-ffp-contract=off -x cu -c $tree/csrc/cuda/{} -o $out/{}.o"
