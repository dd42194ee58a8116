/* Number formats, one element or one block at a time; free of torch and of Python.
 *
 * The meaning is rules.py (rounding, floors) and formats.py (the split master, bfloat16 and 8-bit moments). Everything
 * is integer arithmetic, exact float sums, or one float operation rounded once, so it gives the same bits on every CPU.
 * The payload of a NaN is not promised. */
#ifndef ZFUNC_NUMBER_FORMATS_H
#define ZFUNC_NUMBER_FORMATS_H

#ifdef __CUDACC__ /* part of a kernel for a device: zfunc/optim/rules_in_cuda.py */
#define ZF_INLINE static __device__ __forceinline__
#define restrict __restrict__
#else
#define ZF_INLINE static inline __attribute__((always_inline))
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { ZF_BASELINE = 0, ZF_AVX2 = 1, ZF_AVX512 = 2, ZF_NUM_ISA = 3 }; /* instruction sets */

#ifndef ZF_INLINED /* a build with sanitizers leaves operations of vectors as calls: it takes a quarter of the time */
#define ZF_INLINED __attribute__((always_inline))
#endif

/* ---- floats of 16 and 32 bits ----------------------------------------------------------------------- */

#ifdef __CUDACC__
ZF_INLINE uint32_t zf_bits(float x) { return __float_as_uint(x); }
ZF_INLINE float zf_float(uint32_t b) { return __uint_as_float(b); }
#else
ZF_INLINE uint32_t zf_bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
ZF_INLINE float zf_float(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
#endif

/* 0 if |x| is below the floor. Compared as integers: NaN and inf are above every floor, and the result
 * does not depend on the CPU's denormal modes. */
ZF_INLINE float zf_flush(float x, int32_t floor_bits) {
    uint32_t b = zf_bits(x);
    return zf_float((int32_t)(b & 0x7fffffff) < floor_bits ? 0 : b);
}

ZF_INLINE float zf_from_bf16(uint16_t h) { return zf_float((uint32_t)h << 16); }

/* yes where the condition holds, else no: with masks, because a branch would keep a loop scalar. */
ZF_INLINE uint32_t zf_select(int condition, uint32_t yes, uint32_t no) {
    uint32_t mask = (uint32_t)-condition;
    return (yes & mask) | (no & ~mask);
}

/* x, but 0 where it is none and NaN where it is that; elsewhere `size` with the sign of x. */
ZF_INLINE float zf_signed(float x, float size) {
    const uint32_t b = zf_bits(x), magnitude = b & 0x7fffffff;
    uint32_t y = zf_bits(size) | (b & 0x80000000u);
    y = zf_select((int32_t)magnitude > 0x7f800000, b, y);
    return zf_float(zf_select(magnitude == 0, 0, y));
}

ZF_INLINE float zf_from_fp16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = (uint32_t)(h & 0x7fff) << 13;
    int32_t exponent = (int32_t)(h & 0x7c00);
    uint32_t normal = mag + (112u << 23), special = mag + (224u << 23);
    /* 0.5 + mag has the fp16 subnormal in its last bits; the difference is exact and never denormal. */
    uint32_t small = zf_bits(zf_float((126u << 23) | (uint32_t)(h & 0x3ff)) - 0.5f);
    uint32_t b = zf_select(exponent == 0, small, zf_select(exponent == 0x7c00, special, normal));
    return zf_float(b | sign);
}

ZF_INLINE uint16_t zf_to_bf16(float x) {
    uint32_t b = zf_bits(x), rounded = b + 0x7fff + ((b >> 16) & 1);
    return (uint16_t)(zf_select((int32_t)(b & 0x7fffffff) > 0x7f800000, b | 0x400000, rounded) >> 16);
}

ZF_INLINE uint16_t zf_to_fp16(float x) {
    uint32_t b = zf_bits(x), mag = b & 0x7fffffff, sign = (b >> 16) & 0x8000;
    uint32_t normal = (mag - (112u << 23) + 0xfff + ((mag >> 13) & 1)) >> 13;
    /* Below 2^-14 adding 0.5 lets the float adder round at the last bit of an fp16 subnormal. */
    uint32_t small = zf_bits(zf_float(mag) + 0.5f) - (126u << 23);
    uint32_t h = zf_select((int32_t)mag < (113 << 23), small, normal);
    h = zf_select((int32_t)mag >= (143 << 23), 0x7c00, h); /* from 65520 on it rounds to inf by itself */
    h = zf_select((int32_t)mag > 0x7f800000, 0x7e00, h);
    return (uint16_t)(h | sign);
}

#if defined(__x86_64__)
/* The same bits in one instruction, wherever there is AVX2. */
#define ZF_F16C __attribute__((target("avx2,f16c")))
ZF_F16C static void zf_widen_f16c(float *restrict g, const uint16_t *restrict h, size_t n) {
    size_t whole = n & ~(size_t)7;
    for (size_t i = 0; i < whole; i += 8)
        _mm256_storeu_ps(g + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(h + i))));
    for (size_t i = whole; i < n; i++) g[i] = zf_from_fp16(h[i]);
}
ZF_F16C static void zf_narrow_f16c(uint16_t *restrict h, const float *restrict p, size_t n) {
    size_t whole = n & ~(size_t)7;
    for (size_t i = 0; i < whole; i += 8)
        _mm_storeu_si128((__m128i *)(h + i), _mm256_cvtps_ph(_mm256_loadu_ps(p + i), 0 /* to nearest */));
    for (size_t i = whole; i < n; i++) h[i] = zf_to_fp16(p[i]);
}
#endif

ZF_INLINE void zf_widen_fp16(float *restrict g, const uint16_t *restrict h, size_t n, int isa) {
#if defined(__x86_64__)
    if (isa != ZF_BASELINE) {
        zf_widen_f16c(g, h, n);
        return;
    }
#endif
    (void)isa;
    for (size_t i = 0; i < n; i++) g[i] = zf_from_fp16(h[i]);
}

ZF_INLINE void zf_narrow_fp16(uint16_t *restrict h, const float *restrict p, size_t n, int isa) {
#if defined(__x86_64__)
    if (isa != ZF_BASELINE) {
        zf_narrow_f16c(h, p, n);
        return;
    }
#endif
    (void)isa;
    for (size_t i = 0; i < n; i++) h[i] = zf_to_fp16(p[i]);
}

/* ---- compact state: formats.py ------------------------------------------------------------ */

#define ZF_SHARED 64          /* elements that share a scale, and the period of the dither */
#define ZF_SPREAD 0x9e3779b9u /* dither from an element to the next */

/* Codes of exp_avg_sq: bits of a float, `base` + code << shift, for codes that are neither zero nor infinite. */
enum { ZF_MIN_SHIFT = 18, ZF_NUM_SHIFTS = 4, ZF_HIGHEST_CODE = 254, ZF_INFINITE = 255 };
#define ZF_LIMIT 0x7f600000  /* bits of the largest that is not taken as infinite */
#define ZF_INF 0x7f800000u

/* Codes of exp_avg: floats of 4 mantissa bits, in units of a power of two near the root of exp_avg_sq. */
#define ZF_CUT 19             /* bits of a float below those that a code keeps */
#define ZF_NORMAL 0x3e800000u /* bits of the smallest that is not subnormal, 2^-2 */
#define ZF_LARGEST 0x41f80000 /* bits of the largest, 31 */
#define ZF_ROOT 0x1fc00000u   /* half the bits of x, and this, are near those of its root */

ZF_INLINE void zf_join(float *restrict p, const uint16_t *restrict high, const int16_t *restrict low, size_t n) {
    for (size_t i = 0; i < n; i++) p[i] = zf_float(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i]);
}

ZF_INLINE void zf_split(uint16_t *restrict high, int16_t *restrict low, const float *restrict p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t b = p[i] != p[i] ? 0x7fc00000 : zf_bits(p[i]); /* a NaN could round over to a zero */
        high[i] = (uint16_t)((b + 0x8000) >> 16);
        low[i] = (int16_t)(uint16_t)b;
    }
}

/* Beside fp32 moments a tie goes to even, as in a copy: then 16 bits cannot tell on which side of the high half the
 * weight is, and the sign of exp_avg_sq, which is never negative, says so. */
ZF_INLINE void zf_join_even(float *restrict p, float *restrict v, const uint16_t *restrict high,
                            const int16_t *restrict low, const float *restrict signed_v, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t b = zf_bits(signed_v[i]);
        p[i] = zf_float(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i] + (b >> 31 << 16));
        v[i] = zf_float(b & 0x7fffffff);
    }
}

ZF_INLINE void zf_split_even(uint16_t *restrict high, int16_t *restrict low, float *restrict signed_v,
                             const float *restrict p, const float *restrict v, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t b = p[i] != p[i] ? 0x7fc00000 : zf_bits(p[i]), down = (b & 0x1ffff) == 0x8000;
        high[i] = (uint16_t)((b + 0x8000 - down) >> 16);
        low[i] = (int16_t)(uint16_t)b;
        signed_v[i] = zf_float(zf_bits(v[i]) | down << 31);
    }
}

ZF_INLINE void zf_unpack_bf16(float *restrict x, const uint16_t *restrict h, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = zf_from_bf16(h[i]);
}

ZF_INLINE void zf_pack_bf16(uint16_t *restrict h, const float *restrict x, size_t n,
                            const uint32_t *restrict dither) {
    for (size_t i = 0; i < n; i++)
        h[i] = (uint16_t)(zf_select(x[i] != x[i], 0x7fc00000, zf_bits(x[i]) + (dither[i] >> 16)) >> 16);
}

/* The scale of a block of exp_avg_sq, apart. */
typedef struct {
    uint32_t base;
    int choice;
} zf_scale;

ZF_INLINE zf_scale zf_scale_of(int16_t stored) {
    zf_scale s = {(uint32_t)(stored & 0x7ff8) << 16, stored & (ZF_NUM_SHIFTS - 1)};
    return s;
}

ZF_INLINE int16_t zf_stored(zf_scale s) { return (int16_t)(s.base >> 16 | (uint32_t)s.choice); }

/* The scale with which codes reach from the largest to the smallest; `reaches` is 0 if none does. */
ZF_INLINE zf_scale zf_scale_for(int32_t largest, int32_t smallest, int is_signed, int *reaches) {
    const int highest = is_signed ? 126 : ZF_HIGHEST_CODE, least_shift = ZF_MIN_SHIFT + is_signed;
    const int32_t coarsest = 1 << (least_shift + ZF_NUM_SHIFTS - 1), reach = (highest - 1) << least_shift;
    const int32_t top = (largest + coarsest - 1) & -coarsest, span = top - smallest; /* top: the highest code's */
    zf_scale s = {0, (span > reach) + (span > reach << 1) + (span > reach << 2)};
    const int32_t base = top - (highest << (least_shift + s.choice));
    s.base = base > 0 ? (uint32_t)base : 0;
    *reaches = span <= reach << 3;
    return s;
}

/* A block of at most ZF_SHARED elements of a moment that has a scale of its own; `is_signed` is a constant of the
 * inlined call. */
ZF_INLINE void zf_decode(float *restrict m, const uint8_t *restrict codes, int16_t stored, size_t n, int is_signed) {
    const zf_scale s = zf_scale_of(stored);
    const int shift = ZF_MIN_SHIFT + is_signed + s.choice;
    const uint32_t most = is_signed ? 127 : 255;
    for (size_t i = 0; i < n; i++) {
        const uint32_t code = codes[i] & most, sign = (codes[i] & ~most) << 24;
        uint32_t b = s.base + (code << shift);
        b = zf_select(code == most, ZF_INF, b);
        m[i] = zf_float(zf_select(code == 0, 0, b) | sign);
    }
}

ZF_INLINE int16_t zf_encode(uint8_t *restrict codes, const float *restrict m, size_t n,
                                const uint32_t *restrict dither, int is_signed) {
    const int least_shift = ZF_MIN_SHIFT + is_signed;
    const int32_t most = is_signed ? 127 : 255, limit = ZF_LIMIT & -(1 << (least_shift + ZF_NUM_SHIFTS - 1));
    int32_t largest = 0, smallest = limit;
    int reaches;
    for (size_t i = 0; i < n; i++) {
        const int32_t size = (int32_t)(zf_bits(m[i]) & 0x7fffffff), finite = size > limit ? 0 : size;
        const int32_t positive = finite ? finite : limit;
        largest = finite > largest ? finite : largest;
        smallest = positive < smallest ? positive : smallest;
    }
    const zf_scale s = zf_scale_for(largest, smallest, is_signed, &reaches);
    const uint32_t base = s.base;
    const int shift = least_shift + s.choice;
    for (size_t i = 0; i < n; i++) {
        const uint32_t b = zf_bits(m[i]);
        const int32_t size = (int32_t)(b & 0x7fffffff), least = size < 1 ? size : 1;
        int32_t code = (int32_t)((uint32_t)size - base + (dither[i] >> (32 - shift))) >> shift;
        code = code > least ? code : least; /* what is above 0 stays there */
        code = (int32_t)zf_select(size > limit, (uint32_t)most, (uint32_t)code);
        codes[i] = (uint8_t)((uint32_t)code | (is_signed ? zf_select(size > (int32_t)ZF_INF, 0, b >> 31 << 7) : 0));
    }
    return zf_stored(s);
}

/* The same of an exp_avg whose unit is the power of two at or below the root of its exp_avg_sq, as that one's code and
 * scale would be read if none was special. Both readings of a code are computed, as subnormal or not, and which one
 * holds is their order: below ZF_NORMAL the linear scale lies above the logarithmic one when packing, and beneath it
 * when unpacking. */
ZF_INLINE uint32_t zf_unit(uint8_t code, zf_scale s) {
    const uint32_t bits = s.base + ((uint32_t)code << (ZF_MIN_SHIFT + s.choice));
    return ((bits >> 1) + ZF_ROOT) & ZF_INF;
}

ZF_INLINE void zf_decode_beside(float *restrict m, const uint8_t *restrict m_code, const uint8_t *restrict v_code,
                                int16_t stored, size_t n) {
    const zf_scale s = zf_scale_of(stored);
    for (size_t i = 0; i < n; i++) {
        const uint32_t c = (uint32_t)(int8_t)m_code[i], shifted = ((c & 127) << ZF_CUT) + ZF_NORMAL;
        int32_t linear = (int32_t)zf_bits(zf_float(shifted) - zf_float(ZF_NORMAL));
        int32_t size = (int32_t)(shifted - (1u << 23));
        size = linear < size ? linear : size;
        m[i] = zf_float((uint32_t)size | (c & 0x80000000u)) * zf_float(zf_unit(v_code[i], s));
    }
}

ZF_INLINE void zf_encode_beside(uint8_t *restrict m_code, const float *restrict m, const uint8_t *restrict v_code,
                                int16_t stored, size_t n, const uint32_t *restrict dither) {
    const zf_scale s = zf_scale_of(stored);
    for (size_t i = 0; i < n; i++) {
        const float inverse = zf_float((254u << 23) - zf_unit(v_code[i], s));
        uint32_t x = zf_bits(m[i] * inverse);
        int32_t size = (int32_t)(x & 0x7fffffff);
        x = zf_select(size > (int32_t)ZF_INF, 0, x); /* no CPU's sign of a NaN */
        size = size < ZF_LARGEST ? size : ZF_LARGEST;
        const int32_t linear = (int32_t)zf_bits(zf_float((uint32_t)size) + zf_float(ZF_NORMAL)), log = size + (1 << 23);
        const uint32_t units = (uint32_t)(linear > log ? linear : log) - ZF_NORMAL + (dither[i] >> (32 - ZF_CUT));
        m_code[i] = (uint8_t)((units | (x >> 31 << (ZF_CUT + 7))) >> ZF_CUT);
    }
}

#endif
