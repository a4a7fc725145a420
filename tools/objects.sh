# CUDA objects of some files of a tree, made where nvcc is but no GPU, on those of another: device time is short.
#
#   tools/objects.sh TREE BASE_OBJECTS OUT FILE.cu ...   # OUT: BASE_OBJECTS with these instead
#
# Objects of all files: .ci/run leaves them in build/*/CMakeFiles/ted_cuda.dir/cuda. Put the differing ones of several
# variants into one archive (tar cJf objs.tar.xz base NAME ...; 10 MB), and link there: tools/link.sh.
set -e
tree=$1; base=$2; out=$3; shift 3
mkdir -p "$out"; cp "$base"/*.o "$out"/
printf '%s\n' "$@" | xargs -P 2 -I{} sh -c "nvcc -O3 -DNDEBUG -std=c++17 --generate-code=arch=compute_90,code=[compute_90,sm_90] -Xcompiler=-fPIC -Xcompiler=-fvisibility=hidden -fmad=false $DEFS --expt-relaxed-constexpr -Xcompiler=-ffp-contract=off -x cu -c $tree/csrc/cuda/{} -o $out/{}.o"
