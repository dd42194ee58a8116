/* 8-bit moments with AVX-512, by hand, in the order and the stages of _adam_avx512.h.
 *
 * Two codes side by side come apart in a 16-bit lane as two elements do in one of 32 bits. The packing of the block
 * before stands among the roots and the divisions of a block, because what it needs first, the largest and the
 * smallest of all 64, is known last. A block with an infinite exp_avg_sq is left to zf_compact_block too. */
#ifndef ZFUNC_CODES_AVX512_H
#define ZFUNC_CODES_AVX512_H

/* What is the same for all blocks. Of a float whose lower half is 0, `_16` is its upper half, twice a lane. */
typedef struct {
    zf512_call call;
    __m512i sign, signed_code, ones, sign_to_byte, order, binade;
    __m512i root, exponent, significand;            /* bits of beta1 in exp_avg's unit */
    __m512i exponent_16;
    __m512i normal, normal_16;
    __m512 largest;
} zf512_codes;

/* The moments of a block between its update and its packing. */
typedef struct {
    __m512 m[ZF_VECTORS], v[ZF_VECTORS];
    __mmask16 kept[ZF_VECTORS]; /* where v is not below its floor */
    uint32_t range[2];          /* the bits of the largest v, and 2^32 - 1 less those of the smallest */
    size_t at;
} zf512_moments;

/* Beta1 times a code of exp_avg: with zeros around it that is a number in fp16, subnormal if the code is, and 2^12
 * below its value. In the product this and the unit go to beta: no bit changes while beta stays a normal float. */
ZF_512_INLINE int zf512_ordinary(const zf_adam_args *a) { return a->beta1 >= 0x1p-46f && a->beta1 < 2; }

/* Beta times the moments of a block. */
ZF_512_INLINE void zf512_decay(const zf512_codes *k, __m512 *m, __m512 *v, const uint8_t *exp_avg,
                               const uint8_t *exp_avg_sq, int zeros, int16_t stored) {
    uint16_t fp16[ZF_SHARED] __attribute__((aligned(64)));
    const zf_scale s = zf_scale_of(stored);
    uint32_t base = (s.base >> 16) * 0x10001, shift = (uint32_t)(ZF_MIN_SHIFT - 16 + s.choice) * 0x10001;
    __m512i both = _mm512_loadu_si512(exp_avg);
    _mm512_store_si512(fp16, _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(both, 8), 2), k->signed_code));
    _mm512_store_si512(fp16 + ZF_HALF, _mm512_and_si512(_mm512_srai_epi16(both, 2), k->signed_code));
    ZF_512_IN_MEMORY(fp16);
    ZF_512_IN_MEMORY(base);
    ZF_512_IN_MEMORY(shift);
    __m512 bits[ZF_VECTORS];
    for (int half = 0; half < 2; half++) { /* the upper halves of floats; the lower ones are 0 */
        __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(exp_avg_sq + ZF_HALF * half)));
        code = _mm512_add_epi16(_mm512_sllv_epi16(code, zf512_32(shift)), zf512_32(base));
        zf512_widen(&k->call, bits, half, code);
    }
    ZF_EACH(i) v[i] = _mm512_mul_ps(k->call.b2, bits[i]);
    if (zeros) /* their codes are 0, so their bits are those of the base */
        ZF_EACH(i) {
            __m512i none = _mm512_slli_epi32(zf512_32(base), 16);
            v[i] = _mm512_maskz_mov_ps(_mm512_cmpneq_epi32_mask(zf512_int(bits[i]), none), v[i]);
        }
    ZF_EACH(i) {
        __m512i unit = _mm512_add_epi32(_mm512_srli_epi32(zf512_int(bits[i]), 1), k->root);
        unit = _mm512_ternarylogic_epi32(unit, k->exponent, k->significand, 0xea); /* unit & exponent | significand */
        m[i] = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(fp16 + 16 * i)));
        m[i] = _mm512_mul_ps(m[i], zf512_float(unit));
    }
}

/* Flushes v, and raises what is above 0 and below the value of code 1 to that where codes do not reach. */
ZF_512_INLINE void zf512_raise(zf512_moments *x, zf_scale s, int reaches) {
    const uint32_t least = reaches ? 0 : s.base + (1u << (ZF_MIN_SHIFT + s.choice));
    ZF_EACH(i) x->v[i] = _mm512_maskz_max_ps(x->kept[i], x->v[i], _mm512_set1_ps(zf_float(least)));
}

/* The scale of a block in which some v are below the floor. */
ZF_512_INLINE zf_scale zf512_scale_beside_zeros(const zf512_moments *x, int *reaches) {
    __m512i low = zf512_32(0x7fffffff);
    ZF_EACH(i) low = _mm512_mask_min_epu32(low, x->kept[i], low, zf512_int(x->v[i]));
    const int32_t smallest = (int32_t)_mm512_reduce_min_epu32(low);
    return zf_scale_for(smallest == 0x7fffffff ? 0 : (int32_t)x->range[0], smallest, reaches);
}

/* Codes, one in each 16-bit lane, in the order of the block. */
ZF_512_INLINE void zf512_store_codes(const zf512_codes *k, void *to, const __m512i *q) {
    _mm512_storeu_si512((uint8_t *)to, _mm512_permutexvar_epi64(k->order, _mm512_packus_epi16(q[0], q[1])));
}

/* Packs v of a block; returns the inverses of m's units, as the upper halves of floats. */
ZF_512_INLINE void zf512_pack_v(const zf_adam_args *a, const zf512_codes *k, zf512_moments *x, __m512i *inverse) {
    const int32_t smallest = (int32_t)~x->range[1], zeros = smallest < ZF_FLOOR_EXP_AVG_SQ;
    int reaches;
    const zf_scale s = zeros ? zf512_scale_beside_zeros(x, &reaches)
                             : zf_scale_for((int32_t)x->range[0], smallest, &reaches);
    uint32_t shift = (uint32_t)(ZF_MIN_SHIFT - 16 + s.choice) * 0x10001, base = (s.base >> 16) * 0x10001;
    uint32_t shift_half = shift - 0x10001, half_base = ((s.base >> 17) + (ZF_ROOT >> 16) + (1 << 7)) * 0x10001;
    ZF_512_IN_MEMORY(shift);
    ZF_512_IN_MEMORY(base);
    ZF_512_IN_MEMORY(shift_half);
    ZF_512_IN_MEMORY(half_base);
    if (zeros || !reaches) zf512_raise(x, s, reaches);
    __m512i u[ZF_VECTORS], q[2];
    ZF_EACH(i) u[i] = _mm512_add_epi32(zf512_int(x->v[i]), _mm512_load_si512(k->call.dither[1 + s.choice] + 16 * i));
    for (int half = 0; half < 2; half++) {
        q[half] = zf512_halves(&k->call, _mm512_srli_epi32(u[half], 16), u[half + ZF_ODD]);
        q[half] = _mm512_srav_epi16(_mm512_sub_epi16(q[half], zf512_32(base)), zf512_32(shift));
        if (zeros) q[half] = _mm512_max_epi16(q[half], _mm512_setzero_si512());
        __m512i unit = _mm512_add_epi16(_mm512_sllv_epi16(q[half], zf512_32(shift_half)), zf512_32(half_base));
        inverse[half] = _mm512_andnot_si512(unit, k->exponent_16);
    }
    zf512_store_codes(k, (uint8_t *)a->into.exp_avg_sq + x->at, q);
    a->into.exp_avg_sq_scale[x->at / ZF_SHARED] = zf_stored(s);
}

/* Packs m of a block. */
ZF_512_INLINE void zf512_pack_m(const zf_adam_args *a, const zf512_codes *k, const zf512_moments *x,
                                const __m512i *inverse) {
    __m512 w[ZF_VECTORS];
    __m512i u[ZF_VECTORS], q[2];
    for (int half = 0; half < 2; half++) zf512_widen(&k->call, w, half, inverse[half]);
    ZF_EACH(i) { /* the larger of two readings, as in zf_pack_codes; a sign stays where it is */
        w[i] = _mm512_range_ps(_mm512_mul_ps(x->m[i], w[i]), k->largest, 2); /* the smaller size, the first's sign */
        __m512i one = _mm512_ternarylogic_epi32(k->normal, zf512_int(w[i]), k->sign, 0xf8); /* normal | w & sign */
        __m512i linear = zf512_int(_mm512_add_ps(w[i], zf512_float(one)));
        u[i] = _mm512_max_epu32(linear, _mm512_add_epi32(zf512_int(w[i]), k->binade));
        u[i] = _mm512_add_epi32(u[i], _mm512_load_si512(k->call.dither[0] + 16 * i));
    }
    for (int half = 0; half < 2; half++) {
        q[half] = zf512_halves(&k->call, _mm512_srli_epi32(u[half], 16), u[half + ZF_ODD]);
        q[half] = _mm512_srli_epi16(_mm512_sub_epi16(q[half], k->normal_16), ZF_CUT - 16);
        q[half] = _mm512_maddubs_epi16(q[half], k->sign_to_byte);
    }
    zf512_store_codes(k, (uint8_t *)a->into.exp_avg + x->at, q);
}

/* ---- a block -------------------------------------------------------------------------------------------- */

/* Sets the range of v. */
ZF_512_INLINE void zf512_measure(const zf512_codes *k, zf512_moments *x, const __m512 *v) {
    __m512i bits[ZF_VECTORS];
    ZF_EACH(i) bits[i] = zf512_int(v[i]);
    __m512i large = _mm512_max_epu32(_mm512_max_epu32(bits[0], bits[1]), _mm512_max_epu32(bits[2], bits[3]));
    __m512i small = _mm512_min_epu32(_mm512_min_epu32(bits[0], bits[1]), _mm512_min_epu32(bits[2], bits[3]));
    small = _mm512_xor_si512(small, k->ones); /* so that the largest of both is wanted */
    __m512i both = _mm512_max_epu32(_mm512_unpacklo_epi32(large, small), _mm512_unpackhi_epi32(large, small));
    __m256i half = _mm256_max_epu32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    __m128i few = _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storel_epi64((__m128i *)x->range, _mm_max_epu32(few, _mm_unpackhi_epi64(few, few)));
}

/* Flushes the new moments and keeps them for their packing. */
ZF_512_INLINE void zf512_keep(const zf512_codes *k, zf512_moments *x, __m512 *m, const __m512 *v, __m512 *root) {
    __mmask16 kept[ZF_VECTORS];
    /* A NaN is above the floor, with a sign as well. */
    ZF_EACH(i) kept[i] = _mm512_cmpge_epu32_mask(zf512_int(v[i]), k->call.exp_avg_sq_floor);
    ZF_EACH(i) m[i] = zf512_flush(&k->call, m[i], k->call.exp_avg_floor);
    ZF_EACH(i) x->v[i] = v[i], x->m[i] = m[i];
    ZF_EACH(i) {
        x->kept[i] = kept[i];
        ZF_512_IN_MEMORY(x->kept[i]); /* else the four are joined into one store, by vector instructions */
    }
    ZF_EACH(i) root[i] = _mm512_maskz_sqrt_ps(kept[i], v[i]);
    zf512_measure(k, x, v);
}

/* Updates a block, or returns 0 with nothing of it written; packs the one before in any case. */
ZF_512_INLINE int zf512_update_8bit(const zf_adam_args *a, const zf512_codes *k, zf512_moments *x, zf512_moments *last,
                                    size_t at, int mode, int type) {
    const zf_state *s = &a->state;
    __m512 p[ZF_VECTORS], g[ZF_VECTORS], m[ZF_VECTORS], v[ZF_VECTORS], root[ZF_VECTORS];
    const uint8_t *exp_avg_sq = (const uint8_t *)s->exp_avg_sq + at;
    __m512i inverse[2], codes = _mm512_loadu_si512(exp_avg_sq);
    const int infinite = _mm512_cmpeq_epi8_mask(codes, k->ones) != 0;
    const int zeros = _mm512_testn_epi8_mask(codes, codes) != 0;
    x->at = at;
    zf512_start(a, &k->call, p, g, at, mode, type);
    zf512_decay(k, m, v, (const uint8_t *)s->exp_avg + at, exp_avg_sq, zeros,
                s->exp_avg_sq_scale[at / ZF_SHARED]);
    zf512_add_grad(&k->call, m, v, g);
    zf512_keep(k, x, m, v, root);
    if (last) zf512_pack_v(a, k, last, inverse);
    zf512_divide(&k->call, m, root);
    if (last) zf512_pack_m(a, k, last, inverse);
    return !infinite && x->range[0] <= ZF_LIMIT && zf512_finish(a, &k->call, p, m, at, mode);
}

/* ---- a range of blocks ---------------------------------------------------------------------------------- */

ZF_512_INLINE void zf512_prepare_codes(zf512_codes *k, const zf_adam_args *a, const zf_dithers *d) {
    const uint32_t beta = zf_bits(a->beta1), exponent = (beta & ZF_INF) + (12u << 23) - (127u << 23);
    zf512_prepare(&k->call, a, d);
    k->sign = zf512_32(0x80000000), k->binade = zf512_32(1 << 23);
    k->signed_code = zf512_16(0x9fc0), k->ones = zf512_32(0xffffffff);
    k->root = zf512_32(ZF_ROOT + exponent), k->exponent = zf512_32(ZF_INF);
    k->significand = zf512_32(beta & 0x7fffff);
    k->exponent_16 = zf512_16(ZF_INF >> 16);
    k->normal = zf512_32(ZF_NORMAL), k->normal_16 = zf512_16(ZF_NORMAL >> 16);
    k->largest = _mm512_set1_ps(zf_float(ZF_LARGEST));
    k->sign_to_byte = zf512_16(0x0801); /* the low byte + 8 times the high one: bit 12 becomes bit 7 */
    k->order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
}

ZF_512_INLINE void zf512_pack_8bit(const zf_adam_args *a, const zf512_codes *k, zf512_moments *x) {
    __m512i inverse[2];
    zf512_pack_v(a, k, x, inverse);
    zf512_pack_m(a, k, x, inverse);
}

ZF_512 static __attribute__((noinline)) void zf512_any_8bit(const zf_adam_args *a, const zf_dithers *d, size_t at) {
    zf_compact_block(a, d, at, ZF_SHARED, ZF_AVX512, ZF_MOMENTS_8BIT);
}

ZF_512_INLINE size_t zf512_8bit_of_mode(const zf_adam_args *a, const zf_dithers *d, size_t at, size_t end, int mode,
                                        int type) {
    zf512_codes k __attribute__((aligned(64)));
    zf512_moments x[2], *last = NULL;
    zf512_prepare_codes(&k, a, d);
    ZF_512_IN_MEMORY(k);
    for (; at + ZF_SHARED <= end; at += ZF_SHARED) {
        zf512_moments *now = last == x ? x + 1 : x;
        zf512_prefetch_block(a, at, 1, type == ZF_FP32 ? 4 : 2);
        int done = zf512_update_8bit(a, &k, now, last, at, mode, type);
        if (!done) zf512_any_8bit(a, d, at);
        last = done ? now : NULL;
    }
    if (last) zf512_pack_8bit(a, &k, last);
    return at;
}

/* The whole blocks of a range; returns where the rest begins. */
ZF_512 static size_t zf_8bit_avx512(const zf_adam_args *a, const zf_dithers *d, size_t at, size_t end) {
    if (!zf512_ordinary(a)) return at;
    if (a->decay_mode == ZF_DECOUPLED && a->grad_type == ZF_BF16)
        return zf512_8bit_of_mode(a, d, at, end, ZF_DECOUPLED, ZF_BF16); /* what training does, without branches */
    return zf512_8bit_of_mode(a, d, at, end, a->decay_mode, a->grad_type);
}

#endif
