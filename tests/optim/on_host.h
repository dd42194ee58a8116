/* What a CUDA kernel of zfunc needs, on the CPU: a thread of the grid is an iteration of a loop. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define __CUDACC__
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
struct zf_dim { unsigned x; };
static zf_dim blockIdx, blockDim, threadIdx;
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline uint32_t __float_as_uint(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline float __uint_as_float(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
