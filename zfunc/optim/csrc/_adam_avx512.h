/* Compact state with AVX-512, by hand: a compiler's loops over halves of floats leave most of the time to shuffles.
 *
 * The same operations as zf_compact_block, so the same bits; included by _adam_kernel.h alone. The time goes to
 * vector instructions, of which a core starts two a cycle, so what counts is their number. What saves most is the
 * order in registers: a vector holds the even or the odd elements of half a block. Two 16-bit elements side by side
 * are the halves of a 32-bit lane, so they come apart and together again by a shift and a selection, 32 at a time.
 * A block of 64 is four vectors: the even elements of both halves, then the odd ones.
 *
 * Each stage runs over all four before the next one begins: so something is always ready while results of the slow
 * divider are waited for. A block with a weight that becomes NaN is left to zf_compact_block. */
#ifndef ZFUNC_ADAM_AVX512_H
#define ZFUNC_ADAM_AVX512_H

#define ZF_512 __attribute__((target(ZF_TARGET_AVX512)))
#define ZF_512_INLINE ZF_512 static inline ZF_INLINED

enum { ZF_HALF = ZF_SHARED / 2, ZF_ODD = 2, ZF_VECTORS = 4 }; /* half a block is in x[half] and x[half + ZF_ODD] */
#define ZF_EACH(i) for (int i = 0; i < ZF_VECTORS; i++)

/* From here on the compiler knows of x only that it lies in memory. What is loaded, whole or broadcast, costs no
 * vector instruction; what it would make of an integer or of a part of a register does. */
#define ZF_512_IN_MEMORY(x) __asm__ volatile("" : "+m"(x))

/* What is the same for all blocks. */
typedef struct {
    __m512 scale, b1, c1, b2, c2, bias, eps, rate, decay;
    __m512i grad_floor, grad_floor_bf16, l2_floor, exp_avg_floor, exp_avg_sq_floor; /* bits of floats */
    __m512i size, size_bf16, low, high, half;
    uint32_t dither[1 + ZF_NUM_SHIFTS][ZF_SHARED]; /* of m, and as many as zf_dithers has of v; even and odd apart */
} zf512_call;

ZF_512_INLINE __m512i zf512_int(__m512 x) { return _mm512_castps_si512(x); }
ZF_512_INLINE __m512 zf512_float(__m512i x) { return _mm512_castsi512_ps(x); }
ZF_512_INLINE __m512i zf512_32(uint32_t x) { return _mm512_set1_epi32((int32_t)x); }
ZF_512_INLINE __m512i zf512_16(uint16_t x) { return _mm512_set1_epi16((int16_t)x); }

/* The low halves of one, the high halves of the other. */
ZF_512_INLINE __m512i zf512_halves(const zf512_call *k, __m512i low, __m512i high) {
    return _mm512_ternarylogic_epi32(k->low, low, high, 0xca);
}

ZF_512_INLINE __m512 zf512_flush(const zf512_call *k, __m512 x, __m512i floor) {
    return _mm512_maskz_mov_ps(_mm512_cmpge_epi32_mask(_mm512_and_si512(zf512_int(x), k->size), floor), x);
}

ZF_512_INLINE void zf512_prepare(zf512_call *k, const zf_adam_args *a, const zf_dithers *d) {
    const uint32_t floor = zf_bits(a->grad_floor);
    k->scale = _mm512_set1_ps(a->grad_scale), k->decay = _mm512_set1_ps(a->decay);
    k->b1 = _mm512_set1_ps(a->beta1), k->c1 = _mm512_set1_ps(a->one_minus_beta1);
    k->b2 = _mm512_set1_ps(a->beta2), k->c2 = _mm512_set1_ps(a->one_minus_beta2);
    k->bias = _mm512_set1_ps(a->inv_sqrt_bias2), k->eps = _mm512_set1_ps(a->eps);
    k->rate = _mm512_set1_ps(a->step_size);
    k->grad_floor = zf512_32(floor);
    k->grad_floor_bf16 = zf512_16((uint16_t)((floor + 0xffff) >> 16)); /* the lower half of such a gradient is 0 */
    k->l2_floor = zf512_32(ZF_FLOOR_GRAD);
    k->exp_avg_floor = zf512_32(ZF_FLOOR_EXP_AVG), k->exp_avg_sq_floor = zf512_32(ZF_FLOOR_EXP_AVG_SQ);
    k->size = zf512_32(0x7fffffff), k->size_bf16 = zf512_16(0x7fff);
    k->low = zf512_32(0xffff), k->high = zf512_32(0xffff0000), k->half = zf512_32(0x8000);
    for (int i = 0; i < ZF_SHARED; i++) {
        const int from = i / 16 % 2 * ZF_HALF + i % 16 * 2 + i / ZF_HALF;
        k->dither[0][i] = d->exp_avg[from];
        for (int choice = 0; choice < ZF_NUM_SHIFTS; choice++) k->dither[1 + choice][i] = d->exp_avg_sq[choice][from];
    }
}

ZF_512_INLINE void zf512_prefetch(const void *at, size_t width) {
    for (size_t line = 0; line < ZF_SHARED * width; line += 64) zf_prefetch((const char *)at + line, ZF_AHEAD * width);
}

ZF_512_INLINE void zf512_prefetch_block(const zf_adam_args *a, size_t at, size_t width, size_t grad_width) {
    const zf_state *s = &a->state;
    zf512_prefetch((const uint16_t *)s->master + at, 2);
    zf512_prefetch(s->low + at, 2);
    zf512_prefetch((const char *)s->exp_avg + width * at, width);
    zf512_prefetch((const char *)s->exp_avg_sq + width * at, width);
    zf512_prefetch((const char *)a->grad + grad_width * at, grad_width);
}

/* ---- weights and gradients ------------------------------------------------------------------------------ */

ZF_512_INLINE void zf512_join(const zf512_call *k, __m512 *p, const uint16_t *high, const int16_t *low) {
    for (int half = 0; half < 2; half++) {
        __m512i h = _mm512_loadu_si512(high + ZF_HALF * half), l = _mm512_loadu_si512(low + ZF_HALF * half);
        h = _mm512_add_epi16(h, _mm512_srai_epi16(l, 15)); /* a low half below 0 takes one from the high half */
        p[half] = zf512_float(zf512_halves(k, l, _mm512_slli_epi32(h, 16)));
        p[half + ZF_ODD] = zf512_float(zf512_halves(k, _mm512_srli_epi32(l, 16), h));
    }
}

ZF_512_INLINE void zf512_split(const zf_adam_args *a, const zf512_call *k, const __m512 *p, size_t at) {
    uint16_t *high = (uint16_t *)a->into.master + at;
    int16_t *low = a->into.low + at;
    for (int half = 0; half < 2; half++) {
        __m512i even = zf512_int(p[half]), odd = zf512_int(p[half + ZF_ODD]);
        __m512i up = _mm512_srli_epi32(_mm512_add_epi32(even, k->half), 16);
        _mm512_storeu_si512(high + ZF_HALF * half, zf512_halves(k, up, _mm512_add_epi32(odd, k->half)));
        _mm512_storeu_si512(low + ZF_HALF * half, zf512_halves(k, even, _mm512_slli_epi32(odd, 16)));
    }
}

ZF_512_INLINE void zf512_copy(const zf_adam_args *a, const __m512 *p, size_t at) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    float x[ZF_SHARED] __attribute__((aligned(64)));
    for (int half = 0; half < 2; half++) {
        _mm512_store_ps(x + ZF_HALF * half, _mm512_permutex2var_ps(p[half], first, p[half + ZF_ODD]));
        _mm512_store_ps(x + ZF_HALF * half + 16, _mm512_permutex2var_ps(p[half], second, p[half + ZF_ODD]));
    }
    zf_round(a->out, a->out_type, x, at, ZF_SHARED, a->stream, ZF_AVX512);
}

ZF_512_INLINE void zf512_widen(const zf512_call *k, __m512 *x, int half, __m512i both) {
    x[half] = zf512_float(_mm512_slli_epi32(both, 16));
    x[half + ZF_ODD] = zf512_float(_mm512_and_si512(both, k->high));
}

/* Flushed before even and odd come apart. */
ZF_512_INLINE void zf512_grad_bf16(const zf512_call *k, __m512 *g, const uint16_t *grad) {
    for (int half = 0; half < 2; half++) {
        __m512i both = _mm512_loadu_si512(grad + ZF_HALF * half), size = _mm512_and_si512(both, k->size_bf16);
        zf512_widen(k, g, half, _mm512_maskz_mov_epi16(_mm512_cmpge_epu16_mask(size, k->grad_floor_bf16), both));
    }
}

ZF_512_INLINE __m512 zf512_load(const void *grad, int type, size_t at) {
    if (type == ZF_FP32) return _mm512_loadu_ps((const float *)grad + at);
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)grad + at)));
}

ZF_512_INLINE void zf512_grad(const zf512_call *k, __m512 *g, const void *grad, int type, size_t at) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    if (type == ZF_BF16) zf512_grad_bf16(k, g, (const uint16_t *)grad + at);
    else
        for (size_t half = 0; half < 2; half++) {
            __m512 first = zf512_load(grad, type, at + ZF_HALF * half);
            __m512 second = zf512_load(grad, type, at + ZF_HALF * half + 16);
            g[half] = zf512_flush(k, _mm512_permutex2var_ps(first, even, second), k->grad_floor);
            g[half + ZF_ODD] = zf512_flush(k, _mm512_permutex2var_ps(first, odd, second), k->grad_floor);
        }
    ZF_EACH(i) g[i] = _mm512_mul_ps(g[i], k->scale);
}

/* ---- the stages of Adam --------------------------------------------------------------------------------- */

ZF_512_INLINE void zf512_start(const zf_adam_args *a, const zf512_call *k, __m512 *p, __m512 *g, size_t at, int mode,
                               int type) {
    zf512_grad(k, g, a->grad, type, at);
    zf512_join(k, p, (const uint16_t *)a->state.master + at, a->state.low + at);
    if (mode == ZF_L2)
        ZF_EACH(i) g[i] = zf512_flush(k, _mm512_add_ps(g[i], _mm512_mul_ps(k->decay, p[i])), k->l2_floor);
}

/* From what is left of the old moments. */
ZF_512_INLINE void zf512_add_grad(const zf512_call *k, __m512 *m, __m512 *v, const __m512 *g) {
    ZF_EACH(i) v[i] = _mm512_add_ps(v[i], _mm512_mul_ps(k->c2, _mm512_mul_ps(g[i], g[i])));
    ZF_EACH(i) m[i] = _mm512_add_ps(m[i], _mm512_mul_ps(k->c1, g[i]));
}

ZF_512_INLINE void zf512_divide(const zf512_call *k, __m512 *m, const __m512 *root) {
    ZF_EACH(i) m[i] = _mm512_div_ps(m[i], _mm512_add_ps(_mm512_mul_ps(root[i], k->bias), k->eps));
}

/* Writes the new weights and returns 1, or 0 if one is NaN, as it is whenever a moment is: then nothing is written. */
ZF_512_INLINE int zf512_finish(const zf_adam_args *a, const zf512_call *k, __m512 *p, __m512 *change, size_t at,
                               int mode) {
    ZF_EACH(i) change[i] = _mm512_mul_ps(k->rate, change[i]);
    if (mode == ZF_DECOUPLED) ZF_EACH(i) change[i] = _mm512_add_ps(change[i], _mm512_mul_ps(k->decay, p[i]));
    ZF_EACH(i) p[i] = _mm512_sub_ps(p[i], change[i]);
    __mmask16 ordered = _mm512_cmp_ps_mask(p[0], p[1], _CMP_ORD_Q);
    if (_mm512_mask_cmp_ps_mask(ordered, p[2], p[3], _CMP_ORD_Q) != 0xffff) return 0;
    zf512_split(a, k, p, at);
    if (a->out_type != ZF_NONE) zf512_copy(a, p, at);
    return 1;
}

/* ---- bfloat16 moments ----------------------------------------------------------------------------------- */

ZF_512_INLINE void zf512_unpack_bf16(const zf512_call *k, __m512 *x, const uint16_t *from, __m512 beta) {
    for (int half = 0; half < 2; half++) zf512_widen(k, x, half, _mm512_loadu_si512(from + ZF_HALF * half));
    ZF_EACH(i) x[i] = _mm512_mul_ps(beta, x[i]);
}

ZF_512_INLINE void zf512_pack_bf16(const zf512_call *k, __m512i *packed, const __m512 *x, const uint32_t *dither) {
    __m512i u[ZF_VECTORS];
    ZF_EACH(i) u[i] = _mm512_add_epi32(zf512_int(x[i]), _mm512_load_si512(dither + 16 * i));
    for (int half = 0; half < 2; half++)
        packed[half] = zf512_halves(k, _mm512_srli_epi32(u[half], 16), u[half + ZF_ODD]);
}

ZF_512_INLINE int zf512_update_16bit(const zf_adam_args *a, const zf512_call *k, size_t at, int mode, int type) {
    uint16_t *exp_avg = (uint16_t *)a->into.exp_avg + at, *exp_avg_sq = (uint16_t *)a->into.exp_avg_sq + at;
    __m512 p[ZF_VECTORS], g[ZF_VECTORS], m[ZF_VECTORS], v[ZF_VECTORS], root[ZF_VECTORS];
    __m512i new_m[2], new_v[2];
    zf512_start(a, k, p, g, at, mode, type);
    zf512_unpack_bf16(k, m, (const uint16_t *)a->state.exp_avg + at, k->b1);
    zf512_unpack_bf16(k, v, (const uint16_t *)a->state.exp_avg_sq + at, k->b2);
    zf512_add_grad(k, m, v, g);
    ZF_EACH(i) v[i] = zf512_flush(k, v[i], k->exp_avg_sq_floor);
    ZF_EACH(i) root[i] = _mm512_sqrt_ps(v[i]);
    ZF_EACH(i) m[i] = zf512_flush(k, m[i], k->exp_avg_floor);
    zf512_pack_bf16(k, new_v, v, k->dither[1]);
    zf512_pack_bf16(k, new_m, m, k->dither[0]);
    zf512_divide(k, m, root);
    if (!zf512_finish(a, k, p, m, at, mode)) return 0;
    for (int half = 0; half < 2; half++) {
        _mm512_storeu_si512(exp_avg + ZF_HALF * half, new_m[half]);
        _mm512_storeu_si512(exp_avg_sq + ZF_HALF * half, new_v[half]);
    }
    return 1;
}

ZF_512 static __attribute__((noinline)) void zf512_any_16bit(const zf_adam_args *a, const zf_dithers *d, size_t at) {
    zf_compact_block(a, d, at, ZF_SHARED, ZF_AVX512, ZF_MOMENTS_16BIT);
}

ZF_512_INLINE size_t zf512_16bit_of_mode(const zf_adam_args *a, const zf_dithers *d, size_t at, size_t end, int mode,
                                         int type) {
    zf512_call k __attribute__((aligned(64)));
    zf512_prepare(&k, a, d);
    ZF_512_IN_MEMORY(k);
    for (; at + ZF_SHARED <= end; at += ZF_SHARED) {
        zf512_prefetch_block(a, at, 2, type == ZF_FP32 ? 4 : 2);
        if (!zf512_update_16bit(a, &k, at, mode, type)) zf512_any_16bit(a, d, at);
    }
    return at;
}

/* The whole blocks of a range; returns where the rest begins. */
ZF_512 static size_t zf_16bit_avx512(const zf_adam_args *a, const zf_dithers *d, size_t at, size_t end) {
    if (a->decay_mode == ZF_DECOUPLED && a->grad_type == ZF_BF16)
        return zf512_16bit_of_mode(a, d, at, end, ZF_DECOUPLED, ZF_BF16); /* what training does, without branches */
    return zf512_16bit_of_mode(a, d, at, end, a->decay_mode, a->grad_type);
}

#endif

