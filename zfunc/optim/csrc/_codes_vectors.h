/* 8-bit moments over vectors, in the order and the stages of _update_vectors.h.
 *
 * Two codes side by side come apart in a 16-bit lane as two elements do in one of 32 bits. What packing needs first,
 * the largest and the smallest of a block, is known last: a turn of the loop is a whole block, and its packing follows
 * its new weights. A block with an infinite exp_avg_sq is left to zf_update_block too. */
#ifndef ZFUNC_CODES_VECTORS_H
#define ZFUNC_CODES_VECTORS_H

/* Beta1, `keep`, times a decoded exp_avg: in the product the unit goes to beta, and no bit changes while beta stays a normal
 * float. */
ZF_INLINE int zf_ordinary(const zf_update_args *a) { return a->k.keep >= 0x1p-46f && a->k.keep < 2; }

#define v_codes ZF_OF_SET(v_codes)
#define v_block ZF_OF_SET(v_block)
#define v_prepare_codes ZF_OF_SET(v_prepare_codes)
#define v_load_codes ZF_OF_SET(v_load_codes)
#define v_opened ZF_OF_SET(v_opened)
#define v_close ZF_OF_SET(v_close)
#define v_open ZF_OF_SET(v_open)
#define v_start_codes ZF_OF_SET(v_start_codes)
#define v_scale_beside_zeros ZF_OF_SET(v_scale_beside_zeros)
#define v_pack_block ZF_OF_SET(v_pack_block)
#define v_pack_exp_avg_sq ZF_OF_SET(v_pack_exp_avg_sq)
#define v_pack_exp_avg ZF_OF_SET(v_pack_exp_avg)
#define v_turn_block ZF_OF_SET(v_turn_block)
#define v_blocks ZF_OF_SET(v_blocks)
#endif

/* What is the same for all blocks. Of a float whose lower half is 0, `_16` is its upper half, twice a lane. */
typedef struct {
    v_call call;
    vu root, exponent, significand; /* bits of `keep` in exp_avg's unit */
    vu sign, binade, normal;
    vh exponent_16;
    vf largest;
} v_codes;

/* The groups of a block between their stages. */
typedef struct {
    v_pending group[ZF_GROUPS];
    uint32_t range[2]; /* the bits of the largest exp_avg_sq, and of the smallest */
    int infinite;      /* whether an old exp_avg_sq is */
} v_block;

ZF_V_INLINE void v_prepare_codes(v_codes *k, const zf_update_args *a, const zf_dithers *d) {
    const uint32_t beta = zf_bits(a->k.keep), exponent = (beta & ZF_INF) + ((uint32_t)ZF_DECODED << 23) - (127u << 23);
    v_prepare(&k->call, a, d, ZF_MOMENTS_8BIT);
    for (int i = 0; i < ZF_SHARED; i++) k->call.dither[0][i] -= ZF_NORMAL; /* from where exp_avg's codes count */
    k->root = v_set(ZF_ROOT + exponent), k->exponent = v_set(ZF_INF), k->significand = v_set(beta & 0x7fffff);
    k->sign = v_set(0x80000000), k->binade = v_set(1 << 23), k->normal = v_set(ZF_NORMAL);
    k->exponent_16 = v_set_16(ZF_INF >> 16);
    k->largest = v_setf(zf_float(ZF_LARGEST));
}

/* ---- unpacking ------------------------------------------------------------------------------------------ */

/* Beta times the moments of a group. */
ZF_V_INLINE void v_load_codes(const v_codes *k, vf *m, vf *v, const uint8_t *exp_avg, const uint8_t *exp_avg_sq,
                              v_bits shift, vh base, int zeros) {
    vf bits[4];
    ZF_EACH_PAIR(i) {
        v_decode(m + i, exp_avg + ZF_LANES * i);
        v_widen(&k->call, bits + i, v_shift_left_16(v_from_bytes(exp_avg_sq + ZF_LANES * i), shift) + base, ZF_EVEN_ODD);
    }
    ZF_EACH_OF_4(i) v[i] = k->call.keep_sq * bits[i];
    if (zeros) /* their codes are 0, so their bits are those of the base */
        ZF_EACH_OF_4(i) v[i] = v_unless_equal(v[i], (vu)bits[i], (vu)base << 16);
    ZF_EACH_OF_4(i) m[i] = m[i] * (vf)(((((vu)bits[i] >> 1) + k->root) & k->exponent) | k->significand);
}

/* How the exp_avg_sq of a block was packed, and the range of the new one so far. */
typedef struct {
    v_bits shift;
    vh base;
    int zeros;
    vu large, small;
} v_opened;

ZF_V_INLINE void v_open(const zf_update_args *a, v_opened *o, v_block *x, size_t at) {
    const uint8_t *exp_avg_sq = (const uint8_t *)a->state.moment[1] + at;
    const zf_scale s = zf_scale_of(a->state.scale[1][at / ZF_SHARED]);
    o->shift = v_number(ZF_MIN_SHIFT - 16 + s.choice), o->base = v_set_16((uint16_t)(s.base >> 16));
    o->zeros = v_any_byte(exp_avg_sq, 0), x->infinite = v_any_byte(exp_avg_sq, ZF_INFINITE);
    o->large = v_set(0), o->small = v_set(0xffffffff);
}

/* Flushes exp_avg_sq, if one of the block is below its floor. */
ZF_V_INLINE void v_close(const v_codes *k, const v_opened *o, v_block *x) {
    v_range(o->large, o->small, x->range);
    if (x->range[1] >= ZF_FLOOR_EXP_AVG_SQ) return;
    for (int i = 0; i < ZF_GROUPS; i++)
        ZF_EACH_OF_4(j) x->group[i].v[j] = v_flush(x->group[i].v[j], k->call.size, k->call.floor_exp_avg_sq);
}

ZF_V_INLINE void v_start_codes(const zf_update_args *a, const v_codes *k, v_opened *o, v_pending *x, size_t at) {
    vf m[4], v[4];
    v_load_codes(k, m, v, (const uint8_t *)a->state.moment[0] + at, (const uint8_t *)a->state.moment[1] + at, o->shift,
                 o->base, o->zeros);
    v_add_grad(a, &k->call, x, m, v, at, ZF_MOMENTS_8BIT);
    ZF_EACH_OF_4(i) o->large = v_max_u32(o->large, (vu)x->v[i]);
    ZF_EACH_OF_4(i) o->small = v_min_u32(o->small, (vu)x->v[i]);
}

/* ---- packing -------------------------------------------------------------------------------------------- */

/* The scale of a block in which some v are 0, which are raised to code 1 where codes do not reach. */
ZF_V_INLINE zf_scale v_scale_beside_zeros(v_block *x, int *reaches) {
    vu small = v_set(0x7fffffff), unused = v_set(0);
    uint32_t range[2];
    for (int i = 0; i < ZF_GROUPS; i++) /* less 1, a zero is above all */
        ZF_EACH_OF_4(j) small = v_min_u32(small, (vu)x->group[i].v[j] - 1);
    v_range(unused, small, range);
    return zf_scale_for((int32_t)x->range[0], range[1] == 0x7fffffff ? 0x7fffffff : (int32_t)range[1] + 1, 0, reaches);
}

/* Packs exp_avg_sq of a group; returns the inverses of exp_avg's units, as the upper halves of floats. */
ZF_V_INLINE void v_pack_exp_avg_sq(const zf_update_args *a, const v_codes *k, const vf *v, size_t at, vh *inverse,
                                   v_bits shift, v_bits shift_half, vh base, vh half_base, const uint32_t *dither,
                                   int zeros) {
    vu u[4];
    vh q[2];
    ZF_EACH_OF_4(i) u[i] = (vu)v[i] + v_load(dither + ZF_LANES * i);
    ZF_EACH_PAIR(i) {
        vh code = v_shift_right_16((vh)v_halves(u[i] >> 16, u[i + 1]) - base, shift);
        if (zeros) code = v_max_16(code, (vh){0});
        inverse[i / 2] = k->exponent_16 & ~(v_shift_left_16(code, shift_half) + half_base);
        q[i / 2] = code;
    }
    v_store((uint8_t *)a->into.moment[1] + at, v_to_bytes(q[0], q[1]));
}

ZF_V_INLINE void v_pack_exp_avg(const zf_update_args *a, const v_codes *k, const vf *m, size_t at, const vh *inverse,
                                const uint32_t *dither) {
    vf w[4];
    vu u[4];
    vh q[2];
    ZF_EACH_PAIR(i) v_widen(&k->call, w + i, inverse[i / 2], ZF_EVEN_ODD);
    ZF_EACH_OF_4(i) { /* the larger of two readings, as in zf_encode_beside; a sign stays where it is */
        w[i] = v_clip(m[i] * w[i], k->largest);
        const vu linear = (vu)(w[i] + (vf)(((vu)w[i] & k->sign) | k->normal));
        u[i] = v_max_u32(linear, (vu)w[i] + k->binade) + v_load(dither + ZF_LANES * i);
    }
    ZF_EACH_PAIR(i) q[i / 2] = v_sign_to_byte((vh)v_halves(u[i] >> 16, u[i + 1]) >> (ZF_CUT - 16));
    v_store((uint8_t *)a->into.moment[0] + at, v_to_bytes(q[0], q[1]));
}

ZF_V_INLINE void v_pack_block(const zf_update_args *a, const v_codes *k, v_block *x, size_t at) {
    const int zeros = (int32_t)x->range[1] < ZF_FLOOR_EXP_AVG_SQ;
    int reaches;
    const zf_scale s = zeros ? v_scale_beside_zeros(x, &reaches)
                             : zf_scale_for((int32_t)x->range[0], (int32_t)x->range[1], 0, &reaches);
    if (!reaches) {
        const vu least = v_set(s.base + (1u << (ZF_MIN_SHIFT + s.choice)));
        for (int i = 0; i < ZF_GROUPS; i++)
            ZF_EACH_OF_4(j) {
                const vu v = (vu)x->group[i].v[j];
                x->group[i].v[j] = v_unless_equal((vf)v_max_u32(v, least), v, v_set(0));
            }
    }
    const int bits = ZF_MIN_SHIFT - 16 + s.choice;
    const v_bits shift = v_number(bits), shift_half = v_number(bits - 1);
    const vh base = v_set_16((uint16_t)(s.base >> 16));
    const vh half_base = v_set_16((uint16_t)((s.base >> 17) + (ZF_ROOT >> 16) + (1 << 7)));
    for (int i = 0; i < ZF_GROUPS; i++) {
        const size_t to = at + ZF_GROUP * i;
        const v_pending *g = &x->group[i];
        vh inverse[2];
        v_pack_exp_avg_sq(a, k, g->v, to, inverse, shift, shift_half, base, half_base,
                          k->call.dither[1 + s.choice] + ZF_GROUP * i, zeros);
        v_pack_exp_avg(a, k, g->m, to, inverse, k->call.dither[0] + ZF_GROUP * i);
    }
    a->into.scale[1][at / ZF_SHARED] = zf_stored(s);
}

/* ---- a range of blocks ---------------------------------------------------------------------------------- */

/* Starts a block, finishes the one two before it. */
ZF_V_INLINE void v_turn_block(const zf_update_args *a, const zf_update_args *given, const v_codes *k, const zf_dithers *d,
                              v_block *now, v_block *before, v_block *last, size_t at,
                              int starts, int finishes) {
    const size_t done = at - 2 * ZF_SHARED;
    vf p[ZF_GROUPS][4], change[4];
    v_opened o;
    int ordered = 1;
    if (starts) v_open(a, &o, now, at);
    for (int i = 0; i < ZF_GROUPS; i++) {
        const size_t group = ZF_GROUP * i;
        if (starts) v_prefetch_group(a, at + group, ZF_MOMENTS_8BIT);
        if (finishes) v_change(&k->call, change, &last->group[i]);
        if (starts) v_start_codes(a, k, &o, &now->group[i], at + group);
        v_root(&before->group[i]);
        if (finishes) ordered &= v_weights(a, &k->call, p[i], change, done + group, ZF_MOMENTS_8BIT);
    }
    if (starts) v_close(k, &o, now);
    if (!finishes) return;
    if (last->infinite || last->range[0] > ZF_LIMIT || !ordered) {
        v_plainly(given, d, done, ZF_SHARED);
        return;
    }
    for (int i = 0; i < ZF_GROUPS; i++) {
        v_split(a, &k->call, p[i], done + ZF_GROUP * i);
        if (a->out_type != ZF_NONE) v_copy(a, &k->call, p[i], done + ZF_GROUP * i, ZF_EVEN_ODD);
    }
    v_pack_block(a, k, last, done);
}

ZF_V_INLINE void v_blocks(const zf_update_args *a, const zf_update_args *given, const zf_dithers *d, size_t begin,
                          size_t end) {
    v_block x[3], *now = x, *before = x + 1, *last = x + 2, *free;
    v_codes k;
    v_prepare_codes(&k, a, d);
    memset(x, 0, sizeof x); /* the first turn takes roots of nothing */
    ZF_IN_MEMORY(k);
    for (size_t at = begin; at < end + 2 * ZF_SHARED; at += ZF_SHARED) {
        if (at < begin + 2 * ZF_SHARED) v_turn_block(a, given, &k, d, now, before, last, at, 1, 0);
        else if (at >= end) v_turn_block(a, given, &k, d, now, before, last, at, 0, 1);
        else v_turn_block(a, given, &k, d, now, before, last, at, 1, 1);
        free = last, last = before, before = now, now = free;
    }
}
