/* 8-bit moments with AVX-512, by hand, in the order and the stages of _adam_avx512.h.
 *
 * Two codes side by side come apart in a 16-bit lane as two elements do in one of 32 bits. The packing of the block
 * before stands among the roots and the divisions of a block, because what it needs first, the largest of all 64, is
 * known last. A block with exponents at the far ends is left to zf_compact_block too. */
#ifndef ZFUNC_CODES_AVX512_H
#define ZFUNC_CODES_AVX512_H

/* A beta as the bits of a float, to whose exponent a block adds the one it has stored; `num` of those, from `from`
 * on, can be added. */
typedef struct {
    uint32_t bits, from, num;
} zf512_beta;

/* What is the same for all blocks. */
typedef struct {
    zf512_call call;
    __m512i sign, signed_code, code, binade, sign_to_byte, order;
    zf512_beta beta1, beta2;
} zf512_codes;

/* The moments of a block between its update and its packing. */
typedef struct {
    __m512 m[ZF_VECTORS], v[ZF_VECTORS];
    __mmask16 kept[ZF_VECTORS]; /* where v is not below its floor */
    uint32_t largest[2];        /* the bits of m's and v's */
    size_t at;
} zf512_moments;

typedef struct {
    int exponent_bits, has_sign, lowest;
} zf512_code;
static const zf512_code zf512_avg = {ZF_AVG_CODE}, zf512_avg_sq = {ZF_AVG_SQ_CODE};

/* A code with zeros around it is a number in fp16, subnormal if the code is, and a power of two away from its value.
 * In a product with beta that power goes to beta: no bit changes as long as beta stays a normal float. */
ZF_512_INLINE zf512_beta zf512_beta_of(float beta, zf512_code c) {
    const int power = c.lowest - (1 << c.exponent_bits) - 111, first = (int)(zf_bits(beta) >> 23) + power;
    const int from = first < 1 ? 1 - first : 0, to = 254 - (first > c.lowest ? first : c.lowest);
    zf512_beta b = {zf_bits(beta) + ((uint32_t)power << 23), (uint32_t)from, 0};
    if (beta >= 0x1p-126f && beta < 2 && to >= from) b.num = (uint32_t)(to - from + 1);
    return b;
}

/* Beta times the moments of a block. */
ZF_512_INLINE void zf512_decay(const zf512_codes *k, __m512 *x, const uint8_t *code, uint8_t stored, zf512_code c) {
    uint16_t fp16[ZF_SHARED] __attribute__((aligned(64)));
    uint32_t beta = (c.has_sign ? k->beta1.bits : k->beta2.bits) + ((uint32_t)stored << 23);
    __m512i both = _mm512_loadu_si512(code), kept = c.has_sign ? k->signed_code : k->code;
    __m512i even = c.has_sign ? _mm512_srai_epi16(_mm512_slli_epi16(both, 8), 2) : _mm512_slli_epi16(both, 6);
    __m512i odd = c.has_sign ? _mm512_srai_epi16(both, 2) : _mm512_srli_epi16(both, 2);
    _mm512_store_si512(fp16, _mm512_and_si512(even, kept));
    _mm512_store_si512(fp16 + ZF_HALF, _mm512_and_si512(odd, kept));
    ZF_512_IN_MEMORY(fp16);
    ZF_512_IN_MEMORY(beta);
    ZF_EACH(i) x[i] = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(fp16 + 16 * i)));
    ZF_EACH(i) x[i] = _mm512_mul_ps(x[i], zf512_float(zf512_32(beta)));
}

/* The codes of a block in order; `normal` are the bits of its smallest value that is not subnormal. */
ZF_512_INLINE __m512i zf512_encode(const zf512_codes *k, const __m512 *x, uint32_t normal, zf512_code c) {
    uint32_t normal_halves = (normal >> 16) * 0x10001;
    ZF_512_IN_MEMORY(normal);
    ZF_512_IN_MEMORY(normal_halves);
    __m512i u[ZF_VECTORS], q[2];
    ZF_EACH(i) { /* the larger of two readings, as in zf_pack_codes; a sign stays where it is */
        __m512i one = zf512_32(normal), bits = zf512_int(x[i]);
        if (c.has_sign) one = _mm512_ternarylogic_epi32(one, bits, k->sign, 0xf8); /* one | (bits & sign) */
        __m512i linear = zf512_int(_mm512_add_ps(x[i], zf512_float(one)));
        u[i] = _mm512_max_epu32(linear, _mm512_add_epi32(bits, k->binade));
        u[i] = _mm512_add_epi32(u[i], _mm512_load_si512(k->call.dither[!c.has_sign] + 16 * i));
    }
    for (int half = 0; half < 2; half++) {
        q[half] = zf512_halves(&k->call, _mm512_srli_epi32(u[half], 16), u[half + ZF_ODD]);
        q[half] = _mm512_srli_epi16(_mm512_sub_epi16(q[half], zf512_32(normal_halves)), ZF_CUT - 16);
        if (c.has_sign) q[half] = _mm512_maddubs_epi16(q[half], k->sign_to_byte);
    }
    return _mm512_permutexvar_epi64(k->order, _mm512_packus_epi16(q[0], q[1]));
}

/* The least code of v, four times: 1, because what is above 0 stays there. If some are 0 it is 0, and what is above
 * is raised to the value of code 1 instead. */
ZF_512_INLINE uint32_t zf512_least(zf512_moments *x, uint32_t normal) {
    uint64_t kept;
    memcpy(&kept, x->kept, sizeof(kept));
    if (kept == UINT64_MAX) return 0x01010101;
    const __m512 least = _mm512_set1_ps(zf_float(normal - (ZF_MANTISSA_BITS << 23)));
    ZF_EACH(i) x->v[i] = _mm512_maskz_max_ps(x->kept[i], x->v[i], least);
    return 0;
}

/* Packs one moment of a block; returns the stored exponent. */
ZF_512_INLINE uint8_t zf512_pack(const zf_adam_args *a, const zf512_codes *k, uint8_t *code, zf512_moments *x,
                                 zf512_code c) {
    uint32_t exponent = (x->largest[!c.has_sign] + ((1u << ZF_CUT) - 1)) >> 23;
    if (exponent < (uint32_t)c.lowest) exponent = (uint32_t)c.lowest;
    if (exponent >= 255) {
        memset(code, 0, ZF_SHARED);
        return ZF_NOT_FINITE;
    }
    const uint32_t normal = (exponent + 2 - (1u << c.exponent_bits)) << 23;
    uint32_t least = c.has_sign ? 0 : zf512_least(x, normal);
    ZF_512_IN_MEMORY(least);
    __m512i codes = zf512_encode(k, c.has_sign ? x->m : x->v, normal, c);
    zf512_store(a, code, c.has_sign ? codes : _mm512_max_epu8(codes, zf512_32(least)));
    return (uint8_t)(exponent - (uint32_t)c.lowest);
}

ZF_512_INLINE void zf512_pack_m(const zf_adam_args *a, const zf512_codes *k, zf512_moments *x) {
    uint8_t *code = (uint8_t *)a->into.exp_avg + x->at;
    a->into.exp_avg_exponent[x->at / ZF_SHARED] = zf512_pack(a, k, code, x, zf512_avg);
}

ZF_512_INLINE void zf512_pack_v(const zf_adam_args *a, const zf512_codes *k, zf512_moments *x) {
    uint8_t *code = (uint8_t *)a->into.exp_avg_sq + x->at;
    a->into.exp_avg_sq_exponent[x->at / ZF_SHARED] = zf512_pack(a, k, code, x, zf512_avg_sq);
}

/* ---- a block -------------------------------------------------------------------------------------------- */

/* The bits of the largest of each. */
ZF_512_INLINE void zf512_largest(uint32_t *bits, const __m512 *m, const __m512 *v) {
    __m512 all_m = _mm512_max_ps(_mm512_max_ps(m[0], m[1]), _mm512_max_ps(m[2], m[3]));
    __m512 all_v = _mm512_max_ps(_mm512_max_ps(v[0], v[1]), _mm512_max_ps(v[2], v[3]));
    __m512 both = _mm512_max_ps(_mm512_unpacklo_ps(all_m, all_v), _mm512_unpackhi_ps(all_m, all_v));
    __m256 half = _mm256_max_ps(_mm512_castps512_ps256(both), _mm512_extractf32x8_ps(both, 1));
    __m128 few = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storel_epi64((__m128i *)bits, _mm_castps_si128(_mm_max_ps(few, _mm_movehl_ps(few, few))));
}

/* Flushes the new moments and keeps them for their packing. */
ZF_512_INLINE void zf512_keep(const zf512_codes *k, zf512_moments *x, __m512 *m, const __m512 *v, __m512 *root) {
    __m512 size[ZF_VECTORS];
    __mmask16 kept[ZF_VECTORS];
    ZF_EACH(i) size[i] = zf512_float(_mm512_and_si512(zf512_int(m[i]), k->call.size));
    /* A NaN is above the floor, with a sign as well. */
    ZF_EACH(i) kept[i] = _mm512_cmpge_epu32_mask(zf512_int(v[i]), k->call.exp_avg_sq_floor);
    ZF_EACH(i) m[i] = _mm512_maskz_mov_ps(_mm512_cmpge_epi32_mask(zf512_int(size[i]), k->call.exp_avg_floor), m[i]);
    ZF_EACH(i) x->v[i] = v[i], x->m[i] = m[i];
    ZF_EACH(i) {
        x->kept[i] = kept[i];
        ZF_512_IN_MEMORY(x->kept[i]); /* else the four are joined into one store, by vector instructions */
    }
    ZF_EACH(i) root[i] = _mm512_maskz_sqrt_ps(kept[i], v[i]);
    zf512_largest(x->largest, size, v); /* what is flushed is below the lowest exponent anyway */
}

/* Updates a block, or returns 0 with nothing of it written; packs the one before in any case. */
ZF_512_INLINE int zf512_update_8bit(const zf_adam_args *a, const zf512_codes *k, zf512_moments *x, zf512_moments *last,
                                    size_t at, int mode, int type) {
    const zf_state *s = &a->state;
    const size_t block = at / ZF_SHARED;
    __m512 p[ZF_VECTORS], g[ZF_VECTORS], m[ZF_VECTORS], v[ZF_VECTORS], root[ZF_VECTORS];
    x->at = at;
    zf512_start(a, &k->call, p, g, at, mode, type);
    zf512_decay(k, m, (const uint8_t *)s->exp_avg + at, s->exp_avg_exponent[block], zf512_avg);
    zf512_decay(k, v, (const uint8_t *)s->exp_avg_sq + at, s->exp_avg_sq_exponent[block], zf512_avg_sq);
    zf512_add_grad(&k->call, m, v, g);
    zf512_keep(k, x, m, v, root);
    if (last) zf512_pack_m(a, k, last);
    zf512_divide(&k->call, m, root);
    if (last) zf512_pack_v(a, k, last);
    return zf512_finish(a, &k->call, p, m, at, mode);
}

/* ---- a range of blocks ---------------------------------------------------------------------------------- */

ZF_512_INLINE void zf512_prepare_codes(zf512_codes *k, const zf_adam_args *a, const zf_dithers *d) {
    zf512_prepare(&k->call, a, d);
    k->beta1 = zf512_beta_of(a->beta1, zf512_avg), k->beta2 = zf512_beta_of(a->beta2, zf512_avg_sq);
    k->sign = zf512_32(0x80000000), k->binade = zf512_32(1 << 23);
    k->signed_code = zf512_16(0x9fc0), k->code = zf512_16(0x3fc0);
    k->sign_to_byte = zf512_16(0x0801); /* the low byte + 8 times the high one: bit 12 becomes bit 7 */
    k->order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
}

ZF_512_INLINE int zf512_ordinary(const zf_adam_args *a, const zf512_codes *k, size_t block) {
    return a->state.exp_avg_exponent[block] - k->beta1.from < k->beta1.num &&
           a->state.exp_avg_sq_exponent[block] - k->beta2.from < k->beta2.num;
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
        int done = zf512_ordinary(a, &k, at / ZF_SHARED);
        if (done) done = zf512_update_8bit(a, &k, now, last, at, mode, type);
        else if (last) zf512_pack_m(a, &k, last), zf512_pack_v(a, &k, last);
        if (!done) zf512_any_8bit(a, d, at);
        last = done ? now : NULL;
    }
    if (last) zf512_pack_m(a, &k, last), zf512_pack_v(a, &k, last);
    return at;
}

/* The whole blocks of a range; returns where the rest begins. */
ZF_512 static size_t zf_8bit_avx512(const zf_adam_args *a, const zf_dithers *d, size_t at, size_t end) {
    if (a->decay_mode == ZF_DECOUPLED && a->grad_type == ZF_BF16)
        return zf512_8bit_of_mode(a, d, at, end, ZF_DECOUPLED, ZF_BF16); /* what training does, without branches */
    return zf512_8bit_of_mode(a, d, at, end, a->decay_mode, a->grad_type);
}

#endif
