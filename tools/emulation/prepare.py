"""Copies csrc/ to a folder and makes a host's C++ of what the emulation runs: asm becomes calls of emulation.h.

    python prepare.py SOURCES build/whole && g++ ... (README.md)
"""
import sys

import os,re,shutil
src=sys.argv[1]; dst=sys.argv[2]
shutil.rmtree(dst,ignore_errors=True); shutil.copytree(src,dst)
def body(s,sig,new):
    if sig not in s: return s
    i=s.index(sig); j=s.index('{',i+len(sig)-1 if sig.endswith('{') else i)
    d=0;k=j
    while True:
        if s[k]=='{': d+=1
        if s[k]=='}':
            d-=1
            if d==0: break
        k+=1
    return s[:j]+new+s[k+1:]
def edit(f,*reps):
    p=dst+'/cuda/'+f
    if not os.path.exists(p): return
    s=open(p).read()
    for sig,new in reps: s=body(s,sig,new)
    open(p,'w').write(s)
edit('common.cuh',('uint32_t pack_bf16(float low, float high)','{ return emu_bf16(low) | emu_bf16(high)<<16; }'),
     ('uint32_t add_bf16(uint32_t a, uint32_t b)','{ return emu_fma2(a, 0x3F803F80u, b); }'),('uint32_t subtract_bf16(uint32_t a, uint32_t b)','{ return emu_fma2(b, 0xBF80BF80u, a); }'))
edit('powers.cuh',('uint32_t larger_pair(uint32_t a, uint32_t b)','{ return emu_maxmag2(a,b); }'),('float scaled(uint32_t word, int i, uint32_t power) const','{ float v = float_of(i ? word & 0xFFFF0000u : word << 16); return v * float_of(power) + (std::isinf(v) ? NAN : 0.0f * 0); }'))
edit('nvfp4_halves.cuh',('uint32_t cut_to_halves(float low, float high)','{ return emu_rz16(low) | emu_rz16(high)<<16; }'),
     ('uint32_t operator()(uint32_t numbers) const','{ return emu_raise(numbers, share); }'),
     ('static __device__ __forceinline__ uint32_t place(uint32_t code)','{ return code & 0x7F; }'))
edit('nvfp4_halves.cuh',('void add(float largest)','{ largest_ = emu_maxmag(largest_, largest); }'))
edit('activation_fast.cuh',('float approximate_power(float exponent)','{ return exp2f(exponent); }'),('float approximate_reciprocal(float x)','{ return 1.0f / x; }'))
p=dst+'/cuda/nvfp4_whole_activation.cu'; s=open(p).read()
s=s[:s.index('}  // namespace\n\nbool is_nvfp4_whole_activation')]+'}}}\n'
s=s.replace('threadIdx.x','emu_thread()').replace('#include "nvfp4_unwritten.cuh"\n','')
open(p,'w').write(s)
edit('nvfp4_transformed.cuh',('T* in_shared_memory(unsigned address)','{ return reinterpret_cast<T*>(emu_smem + address); }'),
     ('uint32_t smaller_pair(uint32_t a, uint32_t b)','{ return emu_minmag2(a,b); }'),
     ('void load_transposed(','{ emu_ldmatrix_trans(matrix, row); }'),
     ('void add_product(','{ emu_mma(a, b, sum); }'),
)
p=dst+'/cuda/boxes.cuh'; s=open(p).read()
s=body(s,'unsigned shared_address(const void* of)','{ return (unsigned)((const char*)of - emu_smem); }')
s=re.sub(r'#if !defined\(__CUDA_ARCH__\).*?#endif','#define TED_BOX_COPIES(...) abort()',s,flags=re.S)
open(p,'w').write(s)
for root,_,fs in os.walk(dst):
    for f in fs:
        p=os.path.join(root,f)
        if p.endswith(('.h','.cuh')):
            s=open(p).read()
            s=s.replace('threadIdx.x','emu_thread()')
            open(p,'w').write(s)
p=dst+'/cuda/common.cuh'; s=open(p).read()
s=s.replace("  kernel<<<blocks, threads, 0, stream_of(lane)>>>(arguments...);\n","")
s=re.sub(r'inline void check_cuda.*?\n}\n','inline void check_cuda(cudaError_t, const char*) {}\n',s,flags=re.S,count=1)
open(p,'w').write(s)
p=dst+'/cuda/nvfp4_halves.cuh'; s=open(p).read()
s=s.replace("convert_fp8x2<E4M3>(amax * scales.encode, 0.0f)","encode_fp8<E4M3>(amax * scales.encode)")
open(p,'w').write(s)
p=dst+'/cuda/nvfp4_kernel.cuh'; s=open(p).read()
i=s.index("__global__ void __launch_bounds__"); i=s.rindex("template",0,i); 
j=s.index("template <typename T>\nNvPlane nv_row_plane",i)
s=s[:i]+s[j:]
k=s.index("template <bool kRandom>\nvoid launch_nvfp4("); j=s.index("// nvfp4_random.cu's")
s=s[:k]+s[j:]
open(p,'w').write(s)
p=dst+'/cuda/common.cuh'; s=open(p).read()
i=s.index("template <cudaDeviceAttr kWhat>"); j=s.index("int multiprocessors();")
s=s[:i]+"template <int kWhat> int device_attribute() { return 9; }\n"+s[j:]
open(p,'w').write(s)
p=dst+'/cuda/boxes.cuh'; s=open(p).read()
s=body(s,'unsigned shared_address(const void* of)','{ return (unsigned)(uintptr_t)of; }')
s=re.sub(r'struct Arrival \{.*?\n\};\n','struct Arrival { std::atomic<int> phase; void init() { phase = 0; } void expect(unsigned) {} void wait(unsigned turn) const { while (phase.load() <= (int)turn) std::this_thread::yield(); } };\n',s,flags=re.S)
for sig,new in [('void load_box(','{ emu_load_box(to, (const BoxedMatrix&)from, x, y, z); arrival.phase.fetch_add(1); }'),('void show_to_copies()','{}'),('void store_box(','{ emu_store_box(from, (const BoxedMatrix&)to, x, y, z); }'),('void wait_for_stores()','{}')]:
    s=body(s,sig,new)
s=s.replace("CUtensorMap map_of(const BoxedMatrix& matrix);","""CUtensorMap map_of(const BoxedMatrix& matrix);
inline void emu_box(char* sm, const BoxedMatrix& m, int x0, int y0, int z0, bool load) {
  int es = m.type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 1; 
  for (unsigned z = 0; z < m.box[2]; ++z) for (unsigned y = 0; y < m.box[1]; ++y) for (unsigned x = 0; x < m.box[0]; ++x) {
    uintptr_t a = (uintptr_t)sm + (((size_t)z * m.box[1] + y) * m.box[0] + x) * es;
    if (m.places == BoxPlaces::kSpread) a ^= ((a >> 7) & 3) << 4;
    if ((int)m.places == 2) a ^= ((a >> 7) & 7) << 4;
    bool in = x0 + x < m.size[0] && y0 + y < m.size[1] && z0 + z < m.size[2];
    char* g = (char*)m.data + (size_t)(x0 + x) * es + (size_t)(y0 + y) * m.step[0] + (size_t)(z0 + z) * m.step[1];
    if (load) { if (in) memcpy((void*)a, g, es); else memset((void*)a, 0, es); } else if (in) memcpy(g, (void*)a, es); } }
inline void emu_load_box(void* to, const BoxedMatrix& m, int x, int y, int z) { emu_box((char*)to, m, x, y, z, true); }
inline void emu_store_box(const void* from, const BoxedMatrix& m, int x, int y, int z) { emu_box((char*)from, m, x, y, z, false); }
""")
open(p,'w').write(s)
edit('nvfp4_transformed.cuh',('T* in_shared_memory(unsigned address)','{ return reinterpret_cast<T*>((uintptr_t)address); }'))
edit('nvfp4_four_rows.cuh',('void store_scales(uint8_t* to, uint2 scales)','{ memcpy(to, &scales, 8); }'),('void store_scales(uint8_t* to, uint2 first, uint2 second)','{ memcpy(to, &first, 8); memcpy(to + 8, &second, 8); }'))
edit('nvfp4_whole.cuh',('T* computed_once(T* place)','{ return place; }'))
p=dst+'/cuda/common.cuh'; s=open(p).read()
i=s.index('void store_bulk('); 
print(s[i-80:i+200])
open(p,'w').write(s)
p=dst+'/cuda/nvfp4_whole.cuh'; s=open(p).read()
i=s.index("template <Codes kCodes = Codes::kNearest, typename From>\nvoid launch_whole("); j=s.index("}  // namespace\n",i)
s=s[:i]+s[j:]
open(p,'w').write(s)
p=dst+'/cuda/nvfp4_whole_norm.cu'; s=open(p).read()
s=s[:s.index("}  // namespace\n\nbool is_nvfp4_whole_norm")]+"}}}\n"
s=s.replace('threadIdx.x','emu_thread()')
open(p,'w').write(s)
edit('common.cuh',('void store_bulk(V* to, V value)','{ *to = value; }'),('V load_bulk(const V* from)','{ return *from; }'))
for f in ('row.cuh',):
    p=dst+'/cuda/'+f; s=open(p).read(); s=body(s,'void meet() const','{ abort(); }'); open(p,'w').write(s)
edit('common.cuh',('uint4 load_kept(const uint4* from, bool there, uint64_t keep)','{ return there ? *from : make_uint4(0,0,0,0); }'),('uint64_t keep_in_l2()','{ return 0; }'),('void prefetch_line(const void* from)','{}'))
p=dst+'/cuda/norm_rows.cuh'; s=open(p).read()
i=s.index("template", s.rindex("\n\n",0,s.index("int launch_norm_rows("))); j=s.index("\n}\n",i)+3
s=s[:i]+s[j:]
open(p,'w').write(s)

p=dst+'/cuda/nvfp4_find_activation.cuh'; s=open(p).read()
s=re.sub(r'asm\("\{.*?\);\n','made = emu_parabola(word, p, q, trough);\n',s,count=1,flags=re.S)
s=re.sub(r'asm\("max.NaN.bf16x2.*?\);\n','made = emu_max2(word, 0u);\n',s,flags=re.S)
s=re.sub(r'asm\("fma.rn.bf16x2.*?\);\n','made = emu_fma2(made, made, 0u);\n',s,flags=re.S)
open(p,'w').write(s)
edit('bands.cuh',('float peek(const float* from)','{ return *(const volatile float*)from; }'))
p=dst+'/cuda/bands.cuh'; s=open(p).read(); s=re.sub(r'asm volatile\("st.relaxed[^;]*;[^;]*;','abort();',s); open(p,'w').write(s)
edit('nvfp4_search.cuh',('uint4 read_state() const','{ unsigned done = std::atomic_ref<unsigned>(state->done).load(); return make_uint4(bits_of(*(volatile float*)&state->row), bits_of(*(volatile float*)&state->col), done, 0u); }'),
  ('void ask()','{ if (emu_thread() == 0) ticket_ = atomicAdd(&state().tickets, 1u); }'))
for f in os.listdir(dst+'/cuda'):
    p=dst+'/cuda/'+f; s=open(p).read(); s2=re.sub(r'\w+(<[^;{}]*>)?<<<[^;]*;','abort();',s)
    if s2!=s: open(p,'w').write(s2)
