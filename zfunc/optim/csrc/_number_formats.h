/* Number formats, one element or one block at a time; free of torch and of Python.
 *
 * The meaning is reference.py and rules.py (rounding, floors) and compact_reference.py (the split master, bfloat16 and
 * 8-bit moments). Everything is integer arithmetic, exact float sums, or one float operation rounded once, so
 * it gives the same bits on every CPU. The payload of a NaN is not promised. */
#ifndef ZFUNC_NUMBER_FORMATS_H
#define ZFUNC_NUMBER_FORMATS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { ZF_BASELINE = 0, ZF_AVX2 = 1, ZF_AVX512 = 2, ZF_NUM_ISA = 3 }; /* instruction sets */

#define ZF_INLINE static inline __attribute__((always_inline))
#ifndef ZF_INLINED /* a build with sanitizers leaves operations of vectors as calls: it takes a quarter of the time */
#define ZF_INLINED __attribute__((always_inline))
#endif

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
        h[i] = (uint16_t)(zf_select(x[i] != x[i], 0x7fc00000, zf_bits(x[i]) + dither[i]) >> 16);
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

/* A block of at most ZF_SHARED elements of both moments; `infinite` is a constant of the inlined call: whether an
 * element of exp_avg_sq may be so.
 *
 * A code of exp_avg is subnormal or not; both readings are computed, and which one holds is their order: below
 * ZF_NORMAL the linear scale lies above the logarithmic one when packing, and beneath it when unpacking. Its unit is
 * the power of two at or below the root of exp_avg_sq, as that code and scale would be read if none was special. */
ZF_INLINE void zf_decode(float *restrict m, float *restrict v, const uint8_t *restrict m_code,
                         const uint8_t *restrict v_code, zf_scale s, size_t n, int infinite) {
    const int shift = ZF_MIN_SHIFT + s.choice;
    for (size_t i = 0; i < n; i++) {
        const int32_t code = v_code[i];
        const uint32_t bits = s.base + ((uint32_t)code << shift), unit = ((bits >> 1) + ZF_ROOT) & ZF_INF;
        const uint32_t c = (uint32_t)(int8_t)m_code[i], shifted = ((c & 127) << ZF_CUT) + ZF_NORMAL;
        int32_t linear = (int32_t)zf_bits(zf_float(shifted) - zf_float(ZF_NORMAL));
        int32_t size = (int32_t)(shifted - (1u << 23));
        size = linear < size ? linear : size;
        m[i] = zf_float((uint32_t)size | (c & 0x80000000u)) * zf_float(unit);
        v[i] = zf_float(zf_select(code == 0, 0, infinite ? zf_select(code == ZF_INFINITE, ZF_INF, bits) : bits));
    }
}

ZF_INLINE void zf_unpack_codes(float *restrict m, float *restrict v, const uint8_t *restrict m_code,
                               const uint8_t *restrict v_code, int16_t stored, size_t n) {
    uint8_t most = 0;
    for (size_t i = 0; i < n; i++) most = v_code[i] > most ? v_code[i] : most;
    if (most == ZF_INFINITE) zf_decode(m, v, m_code, v_code, zf_scale_of(stored), n, 1);
    else zf_decode(m, v, m_code, v_code, zf_scale_of(stored), n, 0);
}

/* The scale with which codes reach from the largest to the smallest; `reaches` is 0 if none does. */
ZF_INLINE zf_scale zf_scale_for(int32_t largest, int32_t smallest, int *reaches) {
    const int32_t coarsest = 1 << (ZF_MIN_SHIFT + ZF_NUM_SHIFTS - 1), reach = (ZF_HIGHEST_CODE - 1) << ZF_MIN_SHIFT;
    const int32_t top = (largest + coarsest - 1) & -coarsest, span = top - smallest; /* top: the highest code's */
    zf_scale s = {0, (span > reach) + (span > reach << 1) + (span > reach << 2)};
    const int32_t base = top - (ZF_HIGHEST_CODE << (ZF_MIN_SHIFT + s.choice));
    s.base = base > 0 ? (uint32_t)base : 0;
    *reaches = span <= reach << 3;
    return s;
}

/* `special`, a constant of the inlined call: an element of v may be infinite, or below what codes reach. */
ZF_INLINE void zf_encode(uint8_t *restrict m_code, uint8_t *restrict v_code, const float *restrict m,
                         const float *restrict v, size_t n, const uint32_t *restrict m_dither,
                         const uint32_t *restrict v_dither, zf_scale s, int special) {
    const int shift = ZF_MIN_SHIFT + s.choice;
    const uint32_t half = (s.base >> 1) + ZF_ROOT + (1u << 23);
    float inverse[ZF_SHARED] __attribute__((aligned(64))); /* of the unit, whose exponent is 254 less its own */
    for (size_t i = 0; i < n; i++) {
        const int32_t size = (int32_t)(zf_bits(v[i]) & 0x7fffffff);
        int32_t code = (int32_t)((uint32_t)size - s.base + v_dither[i]) >> shift;
        code = code > 0 ? code : 0;
        if (special) {
            const int32_t least = size < 1 ? size : 1; /* what is above 0 stays there: it divides */
            code = (int32_t)zf_select(size > ZF_LIMIT, ZF_INFINITE, (uint32_t)(code > least ? code : least));
        }
        v_code[i] = (uint8_t)code;
        inverse[i] = zf_float(~(((uint32_t)code << (shift - 1)) + half) & ZF_INF);
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t x = zf_bits(m[i] * inverse[i]);
        int32_t size = (int32_t)(x & 0x7fffffff);
        if (special) x = zf_select(size > (int32_t)ZF_INF, 0, x); /* no CPU's sign of a NaN */
        size = size < ZF_LARGEST ? size : ZF_LARGEST;
        const int32_t linear = (int32_t)zf_bits(zf_float((uint32_t)size) + zf_float(ZF_NORMAL)), log = size + (1 << 23);
        const uint32_t units = (uint32_t)(linear > log ? linear : log) - ZF_NORMAL + m_dither[i];
        m_code[i] = (uint8_t)((units | (x >> 31 << (ZF_CUT + 7))) >> ZF_CUT);
    }
}

/* Returns the stored scale. The dither of v is one for each choice of a scale. */
ZF_INLINE int16_t zf_pack_codes(uint8_t *restrict m_code, uint8_t *restrict v_code, const float *restrict m,
                                const float *restrict v, size_t n, const uint32_t *restrict m_dither,
                                const uint32_t (*restrict v_dithers)[ZF_SHARED]) {
    int32_t largest = 0, smallest = 0x7fffffff; /* moved down by 2^31, but for 0, which is above all then */
    int reaches;
    for (size_t i = 0; i < n; i++) {
        const int32_t size = (int32_t)(zf_bits(v[i]) & 0x7fffffff), moved = (int32_t)((uint32_t)size + 0x7fffffff);
        largest = size > largest ? size : largest;
        smallest = moved < smallest ? moved : smallest;
    }
    smallest = smallest < 0 ? (int32_t)((uint32_t)smallest - 0x7fffffff) : 0x7fffffff;
    const int finite = largest <= ZF_LIMIT;
    if (!finite) {
        largest = 0;
        for (size_t i = 0; i < n; i++) {
            const int32_t size = (int32_t)(zf_bits(v[i]) & 0x7fffffff);
            if (size <= ZF_LIMIT && size > largest) largest = size;
        }
    }
    const zf_scale s = zf_scale_for(largest, smallest, &reaches);
    if (finite && reaches) zf_encode(m_code, v_code, m, v, n, m_dither, v_dithers[s.choice], s, 0);
    else zf_encode(m_code, v_code, m, v, n, m_dither, v_dithers[s.choice], s, 1);
    return zf_stored(s);
}

#endif
