"""Copies csrc/ to a folder and makes a host's C++ of what the emulation runs: asm becomes calls of emulation.h.

    python prepare.py SOURCES build/layer && g++ ... (README.md)
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
     ('uint32_t add_bf16(uint32_t a, uint32_t b)','{ abort(); }'))
edit('powers.cuh',('uint32_t larger_pair(uint32_t a, uint32_t b)','{ return emu_maxmag2(a,b); }'))
edit('nvfp4_halves.cuh',('uint32_t cut_to_halves(float low, float high)','{ return emu_rz16(low) | emu_rz16(high)<<16; }'),
     ('uint32_t operator()(uint32_t numbers) const','{ return emu_raise(numbers, share); }'),
     ('static __device__ __forceinline__ uint32_t place(uint32_t code)','{ return code & 0x7F; }'))
edit('nvfp4_transformed.cuh',('T* in_shared_memory(unsigned address)','{ return reinterpret_cast<T*>(emu_smem + address); }'),
     ('uint32_t smaller_pair(uint32_t a, uint32_t b)','{ return emu_minmag2(a,b); }'),
     ('void load_transposed(','{ emu_ldmatrix_trans(matrix, row); }'),
     ('void add_product(','{ emu_mma(a, b, sum); }'),
     ('float larger_magnitude(float a, float b)','{ return emu_maxmag(a,b); }'))
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
p=dst+'/cuda/row.cuh'; s=open(p).read()
s=body(s,'void meet() const','{ emu_team.arrive_and_wait(); }')
open(p,'w').write(s)
edit('common.cuh',('uint4 load_kept(const uint4* from, bool there, uint64_t keep)','{ return there ? *from : make_uint4(0,0,0,0); }'),('uint64_t keep_in_l2()','{ return 0; }'))
p=dst+'/cuda/clusters.cuh'; s=open(p).read()
s='#pragma once\n#include "boxes.cuh"\n#include "common.cuh"\nnamespace te_dist { namespace cuda {\nextern thread_local int emu_member;\ninline int cluster_member() { return emu_member; }\ninline void send_to_member(float* here, int, float value, Arrival*) { *here = value; }\ninline void cluster_arrive() {} inline void cluster_wait() {}\n#define TED_IN_CLUSTERS_OF(b)\n}}\n'
open(p,'w').write(s)
p=dst+'/cuda/nvfp4_amax_rows.cuh'; s=open(p).read()
i=s.index("// ---------------------------------------------------------------------------------------------- columns"); j=s.index("}  // namespace\n}  // namespace cuda")
s=s[:i]+s[j:]
s=s.replace('#include "nvfp4_amax.cuh"\n','#include "row.cuh"\n#include "made.cuh"\nconstexpr int kBlock=16;\n').replace('#include "nvfp4_unwritten.cuh"\n','')
open(p,'w').write(s)
p=dst+'/cuda/nvfp4_amax_layer_rows.cu'; s=open(p).read()
i=s.index("// ---------------------------------------------------------------------------------------------- columns"); j=s.index("}  // namespace\n\nbool launch_amax")
s=s[:i]+"}}}\n"
s=s.replace('#include "nvfp4_norm_nearly.cuh"\n','').replace('threadIdx.x','emu_thread()')
open(p,'w').write(s)
