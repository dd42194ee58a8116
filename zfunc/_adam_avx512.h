/* 8-bit state with AVX-512, by hand: a compiler's loops over bytes and floats leave most of the time to shuffles.
 *
 * The same operations as zf_compact_block, so the same bits; included by _adam_kernel.h alone. Unpacking and splitting
 * stand in one loop with the division and the square root, which leave room for them. */
#ifndef ZFUNC_ADAM_AVX512_H
#define ZFUNC_ADAM_AVX512_H

#define ZF_512 __attribute__((target(ZF_TARGET_AVX512)))
#define ZF_512_INLINE ZF_512 static inline __attribute__((always_inline))

ZF_512_INLINE __m512i zf512_int(__m512 x) { return _mm512_castps_si512(x); }
ZF_512_INLINE __m512 zf512_float(__m512i x) { return _mm512_castsi512_ps(x); }
ZF_512_INLINE __m512i zf512_size(__m512 x) { return _mm512_and_si512(zf512_int(x), _mm512_set1_epi32(0x7fffffff)); }

/* a | (b & c) */
ZF_512_INLINE __m512i zf512_or_and(__m512i a, __m512i b, __m512i c) {
    return _mm512_ternarylogic_epi32(a, b, c, 0xf8);
}

ZF_512_INLINE __m512 zf512_flush(__m512 x, __m512i floor) {
    return zf512_float(_mm512_maskz_mov_epi32(_mm512_cmpge_epi32_mask(zf512_size(x), floor), zf512_int(x)));
}

/* The gradient at 16 elements; `at` counts elements. */
ZF_512_INLINE __m512 zf512_grad(const void *grad, int type, size_t at) {
    if (type == ZF_FP32) return _mm512_loadu_ps((const float *)grad + at);
    __m256i h = _mm256_loadu_si256((const __m256i *)((const uint16_t *)grad + at));
    if (type == ZF_FP16) return _mm512_cvtph_ps(h);
    return zf512_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

ZF_512_INLINE __m512 zf512_decode(__m512i c, uint8_t stored, int exponent_bits, int has_sign, int lowest) {
    const uint32_t exponent = stored + (uint32_t)lowest, top = (1u << exponent_bits) - 1;
    const __m512i normal = _mm512_set1_epi32((int32_t)((exponent - top + 1) << 23));
    const __m512i most = _mm512_set1_epi32((1 << (exponent_bits + ZF_MANTISSA_BITS)) - 1);
    __m512i code = has_sign ? _mm512_and_si512(c, most) : c;
    __m512i shifted = _mm512_add_epi32(_mm512_slli_epi32(code, ZF_CUT), normal);
    __m512i linear = zf512_int(_mm512_sub_ps(zf512_float(shifted), zf512_float(normal)));
    __m512i size = _mm512_min_epi32(linear, _mm512_sub_epi32(shifted, _mm512_set1_epi32(1 << 23)));
    if (has_sign) size = zf512_or_and(size, c, _mm512_set1_epi32(INT32_MIN));
    if (exponent >= 255) size = _mm512_set1_epi32(0x7fc00000);
    return zf512_float(size);
}

/* One block from fp32 m, of which `largest` are the bits of the largest size; returns the stored exponent. */
ZF_512_INLINE uint8_t zf512_pack(uint8_t *code, const __m512 *x, uint32_t largest, const uint32_t *dither,
                                 int exponent_bits, int has_sign, int lowest) {
    const uint32_t top = (1u << exponent_bits) - 1;
    uint32_t exponent = (largest + ((1u << ZF_CUT) - 1)) >> 23;
    if (exponent < (uint32_t)lowest) exponent = (uint32_t)lowest;
    if (exponent >= 255) {
        memset(code, 0, ZF_SHARED);
        return ZF_NOT_FINITE;
    }
    const uint32_t smallest = (exponent - top + 1) << 23;
    const __m512i normal = _mm512_set1_epi32((int32_t)smallest);
    const __m512i below = _mm512_set1_epi32((int32_t)(smallest - (1u << 23)));
    for (int i = 0; i < ZF_SHARED / 16; i++) {
        __m512i size = has_sign ? zf512_size(x[i]) : zf512_int(x[i]);
        __m512 sum = _mm512_add_ps(zf512_float(size), zf512_float(normal));
        __m512i units = _mm512_max_epi32(_mm512_sub_epi32(zf512_int(sum), normal), _mm512_sub_epi32(size, below));
        __m512i q = _mm512_add_epi32(units, _mm512_loadu_si512(dither + 16 * i));
        q = _mm512_srli_epi32(q, ZF_CUT);
        if (has_sign)
            q = zf512_or_and(q, _mm512_srli_epi32(zf512_int(x[i]), 24), _mm512_set1_epi32(0x80));
        else
            q = _mm512_max_epi32(q, _mm512_min_epi32(size, _mm512_set1_epi32(1)));
        _mm_storeu_si128((__m128i *)(code + 16 * i), _mm512_cvtepi32_epi8(q));
    }
    return (uint8_t)(exponent - (uint32_t)lowest);
}

/* The moments of a block between its update and its packing. */
typedef struct {
    __m512 m[ZF_SHARED / 16], v[ZF_SHARED / 16];
    __m512i largest, largest_sq;
    size_t at;
} zf512_moments;

ZF_512_INLINE void zf512_pack_moments(const zf_adam_args *a, const zf_dithers *d, const zf512_moments *x) {
    int32_t largest = _mm512_reduce_max_epi32(x->largest);
    uint32_t largest_sq = _mm512_reduce_max_epu32(x->largest_sq);
    a->exp_avg_exponent[x->at / ZF_SHARED] =
        zf512_pack((uint8_t *)a->exp_avg + x->at, x->m, (uint32_t)largest, d->exp_avg, ZF_AVG_CODE);
    a->exp_avg_sq_exponent[x->at / ZF_SHARED] =
        zf512_pack((uint8_t *)a->exp_avg_sq + x->at, x->v, largest_sq, d->exp_avg_sq, ZF_AVG_SQ_CODE);
}

ZF_512_INLINE void zf512_update(const zf_adam_args *a, zf512_moments *x, size_t at, int mode, int type) {
    const __m512 b1 = _mm512_set1_ps(a->beta1), c1 = _mm512_set1_ps(a->one_minus_beta1);
    const __m512 b2 = _mm512_set1_ps(a->beta2), c2 = _mm512_set1_ps(a->one_minus_beta2);
    const __m512 bias = _mm512_set1_ps(a->inv_sqrt_bias2), eps = _mm512_set1_ps(a->eps);
    const __m512 rate = _mm512_set1_ps(a->step_size), decay = _mm512_set1_ps(a->decay);
    const __m512 scale = _mm512_set1_ps(a->grad_scale);
    const __m512i floor = _mm512_set1_epi32((int32_t)zf_bits(a->grad_floor));
    uint16_t *high = (uint16_t *)a->master + at;
    int16_t *low = a->low + at;
    const uint8_t *exp_avg = (const uint8_t *)a->exp_avg + at, *exp_avg_sq = (const uint8_t *)a->exp_avg_sq + at;
    const uint8_t stored = a->exp_avg_exponent[at / ZF_SHARED], stored_sq = a->exp_avg_sq_exponent[at / ZF_SHARED];
    __m512i largest = _mm512_setzero_si512(), largest_sq = _mm512_setzero_si512();
    __m512 p[ZF_SHARED / 16], *m = x->m, *v = x->v;
    for (int i = 0; i < ZF_SHARED / 16; i++) {
        __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(high + 16 * i)));
        __m512i lower = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(low + 16 * i)));
        __m512 w = zf512_float(_mm512_add_epi32(_mm512_slli_epi32(upper, 16), lower));
        __m512i code = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(exp_avg + 16 * i)));
        __m512i code_sq = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(exp_avg_sq + 16 * i)));
        __m512 g = zf512_grad(a->grad, type, at + 16 * (size_t)i);
        g = _mm512_maskz_mul_ps(_mm512_cmpge_epi32_mask(zf512_size(g), floor), g, scale);
        if (mode == ZF_L2)
            g = zf512_flush(_mm512_add_ps(g, _mm512_mul_ps(decay, w)), _mm512_set1_epi32(ZF_FLOOR_GRAD));
        m[i] = _mm512_mul_ps(b1, zf512_decode(code, stored, ZF_AVG_CODE));
        m[i] = _mm512_add_ps(m[i], _mm512_mul_ps(c1, g));
        __m512i size = zf512_size(m[i]);
        largest = _mm512_max_epi32(largest, size); /* what is flushed is below the lowest exponent anyway */
        __mmask16 kept = _mm512_cmpge_epi32_mask(size, _mm512_set1_epi32(ZF_FLOOR_EXP_AVG));
        m[i] = _mm512_maskz_mov_ps(kept, m[i]);
        v[i] = _mm512_mul_ps(b2, zf512_decode(code_sq, stored_sq, ZF_AVG_SQ_CODE));
        v[i] = _mm512_add_ps(v[i], _mm512_mul_ps(c2, _mm512_mul_ps(g, g)));
        largest_sq = _mm512_max_epu32(largest_sq, zf512_int(v[i])); /* only a NaN has a sign: it is the largest */
        kept = _mm512_cmpge_epu32_mask(zf512_int(v[i]), _mm512_set1_epi32(ZF_FLOOR_EXP_AVG_SQ));
        v[i] = _mm512_maskz_mov_ps(kept, v[i]);
        __m512 divisor = _mm512_add_ps(_mm512_mul_ps(_mm512_sqrt_ps(v[i]), bias), eps);
        __m512 change = _mm512_mul_ps(rate, _mm512_div_ps(m[i], divisor));
        if (mode == ZF_DECOUPLED) change = _mm512_add_ps(change, _mm512_mul_ps(decay, w));
        p[i] = _mm512_sub_ps(w, change);
        __mmask16 nan = _mm512_cmp_ps_mask(p[i], p[i], _CMP_UNORD_Q);
        __m512i bits = _mm512_mask_mov_epi32(zf512_int(p[i]), nan, _mm512_set1_epi32(0x7fc00000));
        __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
        _mm256_storeu_si256((__m256i *)(high + 16 * i), _mm512_cvtepi32_epi16(rounded));
        _mm256_storeu_si256((__m256i *)(low + 16 * i), _mm512_cvtepi32_epi16(bits));
    }
    x->largest = largest, x->largest_sq = largest_sq, x->at = at;
    if (a->out_type != ZF_NONE)
        zf_round(a->out, a->out_type, (const float *)p, at, ZF_SHARED, a->stream, ZF_AVX512);
}

ZF_512_INLINE size_t zf512_8bit_of_mode(const zf_adam_args *a, const zf_dithers *d, size_t at, size_t end, int mode,
                                        int type) {
    const size_t width = type == ZF_FP32 ? 4 : 2;
    zf512_moments x[2];
    int now = 0, any = 0;
    for (; at + ZF_SHARED <= end; at += ZF_SHARED) {
        for (size_t line = 0; line < 128; line += 64) {
            zf_prefetch((const char *)a->master + 2 * at + line, ZF_AHEAD * 2);
            zf_prefetch((const char *)a->low + 2 * at + line, ZF_AHEAD * 2);
            zf_prefetch((const char *)a->grad + width * at + line, ZF_AHEAD * width);
        }
        zf_prefetch((const char *)a->exp_avg + at, ZF_AHEAD);
        zf_prefetch((const char *)a->exp_avg_sq + at, ZF_AHEAD);
        zf512_update(a, &x[now], at, mode, type);
        now ^= 1;
        if (any) zf512_pack_moments(a, d, &x[now]); /* a block later: by then the largest is known */
        any = 1;
    }
    if (any) zf512_pack_moments(a, d, &x[now ^ 1]);
    return at;
}

/* The whole blocks of a range; returns where the rest begins. */
ZF_512 static size_t zf_8bit_avx512(const zf_adam_args *a, const zf_dithers *d, size_t at, size_t end) {
    if (a->decay_mode == ZF_DECOUPLED && a->grad_type == ZF_BF16)
        return zf512_8bit_of_mode(a, d, at, end, ZF_DECOUPLED, ZF_BF16); /* what training does, without branches */
    return zf512_8bit_of_mode(a, d, at, end, a->decay_mode, a->grad_type);
}

#endif
