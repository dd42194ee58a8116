/* Number formats, one element or one block at a time; free of torch and of Python.
 *
 * The meaning is adam_reference.py (rounding, floors) and compact_reference.py (the split master, bfloat16 and
 * 8-bit moments). Everything is integer arithmetic, exact float sums, or one float operation rounded once, so
 * it gives the same bits on every CPU. The payload of a NaN is not promised. */
#ifndef ZFUNC_NUMBER_FORMATS_H
#define ZFUNC_NUMBER_FORMATS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { ZF_BASELINE = 0, ZF_AVX2 = 1, ZF_AVX512 = 2, ZF_NUM_ISA = 3 }; /* instruction sets */

#define ZF_INLINE static inline __attribute__((always_inline))

/* ---- floats of 16 and 32 bits ----------------------------------------------------------------------- */

ZF_INLINE uint32_t zf_bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
ZF_INLINE float zf_float(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

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

/* ---- compact state: compact_reference.py ------------------------------------------------------------ */

#define ZF_SHARED 64          /* elements that share an exponent, and the period of the dither */
#define ZF_SPREAD 0x9e3779b9u /* dither from an element to the next */
#define ZF_NOT_FINITE 255     /* stored as the exponent of a block with an inf or a NaN in it */

/* The two 8-bit codes as constants of inlined calls: exponent bits, sign, the lowest exponent of a block. */
#define ZF_AVG_CODE 3, 1, 38
#define ZF_AVG_SQ_CODE 4, 0, 26
#define ZF_MANTISSA_BITS 4
#define ZF_CUT (23 - ZF_MANTISSA_BITS) /* bits of a float below those that a code keeps */

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

ZF_INLINE void zf_unpack_bf16(float *restrict x, const uint16_t *restrict h, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = zf_from_bf16(h[i]);
}

ZF_INLINE void zf_pack_bf16(uint16_t *restrict h, const float *restrict x, size_t n,
                            const uint32_t *restrict dither) {
    for (size_t i = 0; i < n; i++)
        h[i] = (uint16_t)(zf_select(x[i] != x[i], 0x7fc00000, zf_bits(x[i]) + dither[i]) >> 16);
}

/* A block of at most ZF_SHARED elements; of its exponent what is above `lowest` is stored. `normal` is the bits
 * of the smallest value that is not subnormal, that of a normal float: `lowest` is above `top`.
 *
 * A code is subnormal or not; both readings are computed, and which one holds is their order: below `normal`
 * the linear scale lies above the logarithmic one when packing, and beneath it when unpacking. */
ZF_INLINE void zf_unpack_codes(float *restrict x, const uint8_t *restrict code, uint8_t stored, size_t n,
                               int exponent_bits, int has_sign, int lowest) {
    const uint32_t top = (1u << exponent_bits) - 1, most = ((top + 1) << ZF_MANTISSA_BITS) - 1;
    const uint32_t normal = (stored + (uint32_t)lowest - top + 1) << 23;
    for (size_t i = 0; i < n; i++) {
        uint32_t c = has_sign ? (uint32_t)(int8_t)code[i] : code[i];
        uint32_t shifted = ((c & most) << ZF_CUT) + normal;
        int32_t linear = (int32_t)zf_bits(zf_float(shifted) - zf_float(normal));
        int32_t size = (int32_t)(shifted - (1u << 23));
        size = linear < size ? linear : size;
        x[i] = zf_float((uint32_t)size | (has_sign ? c & 0x80000000u : 0));
    }
    if (stored + lowest >= 255)
        for (size_t i = 0; i < n; i++) x[i] = zf_float(0x7fc00000);
}

/* Returns the stored exponent: of the largest after rounding up to what a code keeps, so no code overflows. */
ZF_INLINE uint8_t zf_pack_codes(uint8_t *restrict code, const float *restrict x, size_t n,
                                 const uint32_t *restrict dither, int exponent_bits, int has_sign, int lowest) {
    const uint32_t top = (1u << exponent_bits) - 1;
    int32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t size = (int32_t)(zf_bits(x[i]) & 0x7fffffff);
        largest = size > largest ? size : largest;
    }
    uint32_t exponent = ((uint32_t)largest + ((1u << ZF_CUT) - 1)) >> 23;
    if (exponent < (uint32_t)lowest) exponent = (uint32_t)lowest;
    if (exponent >= 255) {
        memset(code, 0, n);
        return ZF_NOT_FINITE;
    }
    const uint32_t normal = (exponent - top + 1) << 23;
    for (size_t i = 0; i < n; i++) {
        int32_t size = (int32_t)(zf_bits(x[i]) & 0x7fffffff);
        int32_t linear = (int32_t)(zf_bits(zf_float((uint32_t)size) + zf_float(normal)) - normal);
        int32_t units = size - (int32_t)(normal - (1u << 23));
        units = linear > units ? linear : units;
        int32_t q = (int32_t)(((uint32_t)units + dither[i]) >> ZF_CUT), nonzero = size < 1 ? size : 1;
        if (has_sign) q |= (int32_t)(zf_bits(x[i]) >> 24 & 0x80);
        else q = q > nonzero ? q : nonzero;
        code[i] = (uint8_t)q;
    }
    return (uint8_t)(exponent - (uint32_t)lowest);
}

#endif
