// One variant's kernels, by name.
#include "kernel.h"

#define TED_TEXT_OF(name) #name
#define TED_TEXT(name) TED_TEXT_OF(name)

TED_BEGIN_VARIANT

const KernelTable table{TED_TEXT(TED_VARIANT),
                        amax,
                        cast_scaled,
                        cast_current,
                        quantize_current,
                        quantize_block,
                        quantize_mxfp8,
                        amax_nvfp4,
                        quantize_nvfp4,
                        quantize_nvfp4_current,
                        dequantize_tensor,
                        dequantize_block,
                        dequantize_mxfp8,
                        dequantize_nvfp4,
                        transpose_bytes,
                        transpose_nibbles,
                        swizzle_scales,
                        produce,
                        norm_backward,
                        reduce_partials,
                        advance_scales};

TED_END_VARIANT
