rm -rf /tmp/emuY; cp -r $(dirname "$0") /tmp/emuY; cd /tmp/emuY; python3 prepare_activation_amax.py $1/csrc csrc
sed -i 's/extern __shared__ __align__(128) uint4 memory\[\];/uint4* memory = (uint4*)emu_boxes;/' csrc/cuda/nvfp4_amax_activation.cu
sed -i 's#^namespace te_dist { namespace check { void fail#namespace te_dist { namespace cuda { CUtensorMap map_of(const BoxedMatrix\& m) { CUtensorMap r; memcpy(\&r, \&m, sizeof m); return r; } bool runs_hopper_code() { return true; } } }\n&#; s#nvfp4_amax_activation_kernel<kKind>((const bf16_t\*)x.data(), cols, #nvfp4_amax_activation_kernel<kKind>(map, #; s#^template <Activation kKind> void run(#char emu_box_memory[1 << 17];\n&#' activation_amax.cpp
sed -i 's#^  for (unsigned block = 0; block < 2; ++block) {#  CUtensorMap map = WarpBoxes::map((const bf16_t*)x.data(), rows, cols, cols);\n&#; s/^extern EmuNamed emu_nameds/alignas(128) inline char emu_boxes[1 << 17];\n&/' activation_amax.cpp
g++ -std=c++20 -O1 -DEMU_CLUSTER -ffp-contract=off -frounding-math -fpermissive -w -no-pie -I. -I/usr/local/cuda/include activation_amax.cpp -o amax -pthread 2>&1 | grep -i "error" | head
for s in 1 2; do timeout 250 ./amax $s | tail -2; done
