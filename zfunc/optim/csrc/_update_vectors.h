/* AdamW over vectors: a compiler's loops over halves of floats leave most of the time to shuffles.
 *
 * The rule is printed in _rules.h, in stages; formats and the order of stages are here, by hand. The bits are those of
 * zf_update_block. Included by _update_kernel.h alone, once for each instruction set, after the operations of its
 * vectors.
 *
 * A group is four vectors, two pairs: neighbours in memory, or the even and the odd elements of a stretch of it. The
 * latter is the order of compact state: two 16-bit elements side by side are the halves of a 32-bit lane, so they come
 * apart and together again by a shift and a selection.
 *
 * The time goes to vector instructions, of which a core starts two to four a cycle, and to the divider. What waits for
 * the divider soon fills the queues of a core. So a group is updated in three stages, its new moments, its roots, and
 * its division and weights, and a turn of the loop makes one of each, of three groups: none waits for another.
 *
 * A group with a weight that becomes NaN is left to the plain loops. */

#ifndef ZFUNC_UPDATE_VECTORS_H
#define ZFUNC_UPDATE_VECTORS_H

/* The state's format: all in fp32, that beside a split master, or compact. */
enum { ZF_MOMENTS_FP32 = 0, ZF_MOMENTS_16BIT = 1, ZF_MOMENTS_8BIT = 2, ZF_MOMENTS_FP32_SPLIT = 3 };
enum { ZF_IN_ORDER = 0, ZF_EVEN_ODD = 1 };
#define ZF_AS_VECTOR(name) vf name;
#define ZF_BROADCAST(name) k->name = v_setf(a->k.name);
#define ZF_EACH_OF_4(i) for (int i = 0; i < 4; i++)
#define ZF_EACH_PAIR(x) for (int x = 0; x < 4; x += 2)
#define ZF_GROUP (4 * ZF_LANES)          /* elements */
#define ZF_GROUPS (ZF_SHARED / ZF_GROUP) /* of a block that shares a scale */

ZF_INLINE int zf_order(int moments) {
    return moments == ZF_MOMENTS_16BIT || moments == ZF_MOMENTS_8BIT ? ZF_EVEN_ODD : ZF_IN_ORDER;
}

/* From here on the compiler knows of x only that it lies in memory. What is loaded, whole or broadcast, costs no
 * vector instruction; what it would make of an integer or of a part of a register does. */
#define ZF_IN_MEMORY(x) __asm__ volatile("" : "+m"(x))

#define v_call ZF_OF_SET(v_call)
#define v_pending ZF_OF_SET(v_pending)
#define v_prepare ZF_OF_SET(v_prepare)
#define v_prefetch_group ZF_OF_SET(v_prefetch_group)
#define v_widen ZF_OF_SET(v_widen)
#define v_grad ZF_OF_SET(v_grad)
#define v_load_weights ZF_OF_SET(v_load_weights)
#define v_split ZF_OF_SET(v_split)
#define v_copy ZF_OF_SET(v_copy)
#define v_load_moments ZF_OF_SET(v_load_moments)
#define v_round_moment ZF_OF_SET(v_round_moment)
#define v_store_state ZF_OF_SET(v_store_state)
#define v_start ZF_OF_SET(v_start)
#define v_root ZF_OF_SET(v_root)
#define v_change ZF_OF_SET(v_change)
#define v_add_grad ZF_OF_SET(v_add_grad)
#define v_weights ZF_OF_SET(v_weights)
#define v_plainly ZF_OF_SET(v_plainly)
#define v_turn ZF_OF_SET(v_turn)
#define v_range_of ZF_OF_SET(v_range_of)
#define v_groups ZF_OF_SET(v_groups)
#define v_of_format ZF_OF_SET(v_of_format)
#define v_update ZF_OF_SET(v_update)
#define v_adamw_keep ZF_OF_SET(v_adamw_keep)
#define v_adamw_moments ZF_OF_SET(v_adamw_moments)
#define v_adamw_root ZF_OF_SET(v_adamw_root)
#define v_adamw_change ZF_OF_SET(v_adamw_change)
#define v_with_l2 ZF_OF_SET(v_with_l2)
#endif

/* What is the same for all groups. */
typedef struct {
    ZF_FACTORS(ZF_AS_VECTOR)
    vu floor_of_grad, floor_grad, floor_exp_avg, floor_exp_avg_sq; /* bits of floats; the first is the call's */
    vh floor_of_grad_16;
    vu size, size_16, upper, half, below_half, one;
    uint32_t dither[1 + ZF_NUM_SHIFTS][ZF_SHARED]; /* of m; of v one for each choice of a scale, bfloat16 has the first;
                                                    * shifted below the last bit kept, in the order of groups */
} v_call;

#include "_rules.h"

/* A group between its stages. */
typedef struct {
    vf m[4], v[4], root[4];
} v_pending;

ZF_V_INLINE void v_prepare(v_call *k, const zf_update_args *a, const zf_dithers *d, int moments) {
    const uint32_t floor = zf_bits(a->k.grad_floor);
    const int bf16 = moments == ZF_MOMENTS_16BIT, m_cut = bf16 ? 16 : ZF_CUT, v_cut = bf16 ? 16 : ZF_MIN_SHIFT;
    ZF_FACTORS(ZF_BROADCAST)
    k->floor_of_grad = v_set(floor);
    k->floor_of_grad_16 = (vh)v_set(((floor + 0xffff) >> 16) * 0x10001); /* the lower half of such a gradient is 0 */
    k->floor_grad = v_set(ZF_FLOOR_GRAD);
    k->floor_exp_avg = v_set(ZF_FLOOR_EXP_AVG), k->floor_exp_avg_sq = v_set(ZF_FLOOR_EXP_AVG_SQ);
    k->size = v_set(0x7fffffff), k->size_16 = v_set(0x7fff7fff), k->upper = v_set(0xffff0000);
    k->half = v_set(0x8000), k->below_half = v_set(0x7fff), k->one = v_set(1);
    for (int i = 0; i < ZF_SHARED; i++) {
        const int from = i / (2 * ZF_LANES) * 2 * ZF_LANES + i % ZF_LANES * 2 + i / ZF_LANES % 2;
        k->dither[0][i] = d->of[0][from] >> (32 - m_cut);
        for (int choice = 0; choice < ZF_NUM_SHIFTS; choice++)
            k->dither[1 + choice][i] = d->of[1][from] >> (32 - v_cut - choice);
    }
}

ZF_V_INLINE void v_prefetch_group(const zf_update_args *a, size_t at, int moments) {
    const zf_state *s = &a->state;
    const size_t high = moments == ZF_MOMENTS_FP32 ? 4 : 2, grad = a->grad_type == ZF_FP32 ? 4 : 2;
    const size_t width = moments == ZF_MOMENTS_16BIT ? 2 : moments == ZF_MOMENTS_8BIT ? 1 : 4;
    zf_prefetch_lines((const char *)s->master + high * at, ZF_GROUP, high, ZF_AHEAD);
    if (moments != ZF_MOMENTS_FP32) zf_prefetch_lines(s->low + at, ZF_GROUP, 2, ZF_AHEAD);
    zf_prefetch_lines((const char *)s->moment[0] + width * at, ZF_GROUP, width, ZF_AHEAD);
    zf_prefetch_lines((const char *)s->moment[1] + width * at, ZF_GROUP, width, ZF_AHEAD);
    zf_prefetch_lines((const char *)a->grad + grad * at, ZF_GROUP, grad, ZF_AHEAD);
}

/* ---- gradients and weights ------------------------------------------------------------------------------ */

/* bfloat16 to floats. */
ZF_V_INLINE void v_widen(const v_call *k, vf *x, vh both, int order) {
    vu first = (vu)both << 16, second = (vu)both & k->upper;
    if (order == ZF_IN_ORDER) v_zip((vh){0}, both, &first, &second);
    x[0] = (vf)first, x[1] = (vf)second;
}

ZF_V_INLINE void v_grad(const zf_update_args *a, const v_call *k, vf *g, size_t at, int order) {
    const uint16_t *h = (const uint16_t *)a->grad + at;
    const float *f = (const float *)a->grad + at;
    ZF_EACH_PAIR(i) {
        if (a->grad_type == ZF_BF16) {
            v_widen(k, g + i, v_flush_16((vh)v_load(h + ZF_LANES * i), k->size_16, k->floor_of_grad_16), order);
            continue;
        }
        for (int j = i; j < i + 2; j++)
            g[j] = a->grad_type == ZF_FP32 ? (vf)v_load(f + ZF_LANES * j) : v_from_fp16(h + ZF_LANES * j);
        if (order == ZF_EVEN_ODD) v_even_odd(&g[i], &g[i + 1]);
        for (int j = i; j < i + 2; j++) g[j] = v_flush(g[j], k->size, k->floor_of_grad);
    }
    ZF_EACH_OF_4(i) g[i] = g[i] * k->grad_scale;
}

ZF_V_INLINE void v_load_weights(const zf_update_args *a, vf *p, size_t at, int moments) {
    if (moments == ZF_MOMENTS_FP32) {
        ZF_EACH_OF_4(i) p[i] = (vf)v_load((const float *)a->state.master + at + ZF_LANES * i);
        return;
    }
    ZF_EACH_PAIR(i) {
        const size_t from = at + ZF_LANES * i;
        const vh l = (vh)v_load(a->state.low + from);
        const vh h = (vh)v_load((const uint16_t *)a->state.master + from) + (vh)((vs)l >> 15); /* one less below 0 */
        vu first = v_halves((vu)l, (vu)h << 16), second = v_halves((vu)l >> 16, (vu)h);
        if (moments == ZF_MOMENTS_FP32_SPLIT) { /* the sign of exp_avg_sq says which way a tie went */
            const float *v = (const float *)a->state.moment[1] + from;
            v_zip(l, h, &first, &second);
            first += v_load(v) >> 31 << 16, second += v_load(v + ZF_LANES) >> 31 << 16;
        }
        p[i] = (vf)first, p[i + 1] = (vf)second;
    }
}

/* The rounded copy of the weights, none of which is NaN. */
ZF_V_INLINE void v_copy(const zf_update_args *a, const v_call *k, const vf *p, size_t at, int order) {
    const int stream = a->stream && (uintptr_t)a->out % sizeof(vf) == 0;
    vf x[4] __attribute__((aligned(64)));
    vu u[4];
    ZF_EACH_OF_4(i) x[i] = p[i];
    if (order == ZF_EVEN_ODD) ZF_EACH_PAIR(i) v_in_order(&x[i], &x[i + 1]);
    if (a->out_type != ZF_BF16) {
        zf_round(a->out, a->out_type, (const float *)x, at, ZF_GROUP, a->stream, ZF_ISA);
        return;
    }
    ZF_EACH_OF_4(i) u[i] = (vu)x[i] + k->below_half + ((vu)x[i] >> 16 & k->one);
    ZF_EACH_PAIR(i) {
        void *to = (uint16_t *)a->out + at + ZF_LANES * i;
        if (stream) v_stream(to, (vu)v_upper(u[i], u[i + 1]));
        else v_store(to, (vu)v_upper(u[i], u[i + 1]));
    }
}

/* ---- the state, but for 8-bit moments ------------------------------------------------------------------- */

ZF_V_INLINE void v_load_moments(const zf_update_args *a, const v_call *k, vf *m, vf *v, size_t at, int moments) {
    const zf_state *s = &a->state;
    if (moments == ZF_MOMENTS_16BIT) {
        ZF_EACH_PAIR(i) {
            v_widen(k, m + i, (vh)v_load((const uint16_t *)s->moment[0] + at + ZF_LANES * i), ZF_EVEN_ODD);
            v_widen(k, v + i, (vh)v_load((const uint16_t *)s->moment[1] + at + ZF_LANES * i), ZF_EVEN_ODD);
        }
    } else {
        ZF_EACH_OF_4(i) m[i] = (vf)v_load((const float *)s->moment[0] + at + ZF_LANES * i);
        ZF_EACH_OF_4(i) v[i] = (vf)v_load((const float *)s->moment[1] + at + ZF_LANES * i);
    }
    if (moments == ZF_MOMENTS_FP32_SPLIT) ZF_EACH_OF_4(i) v[i] = (vf)((vu)v[i] & k->size);
    ZF_EACH_OF_4(i) v_adamw_keep(k, &m[i], &v[i]);
}

ZF_V_INLINE void v_round_moment(void *to, const vf *x, const uint32_t *dither) {
    vu u[4];
    ZF_EACH_OF_4(i) u[i] = (vu)x[i] + v_load(dither + ZF_LANES * i);
    ZF_EACH_PAIR(i) v_store((uint16_t *)to + ZF_LANES * i, v_halves(u[i] >> 16, u[i + 1]));
}

ZF_V_INLINE void v_split(const zf_update_args *a, const v_call *k, const vf *p, size_t at) {
    ZF_EACH_PAIR(i) {
        const vu even = (vu)p[i], odd = (vu)p[i + 1], high = v_halves((even + k->half) >> 16, odd + k->half);
        v_store((uint16_t *)a->into.master + at + ZF_LANES * i, high);
        v_store(a->into.low + at + ZF_LANES * i, v_halves(even, odd << 16));
    }
}

ZF_V_INLINE void v_store_state(const zf_update_args *a, const v_call *k, const vf *p, const v_pending *x, size_t at,
                               int moments) {
    const zf_state *s = &a->into;
    if (moments == ZF_MOMENTS_16BIT) {
        v_split(a, k, p, at);
        v_round_moment((uint16_t *)s->moment[0] + at, x->m, k->dither[0] + at % ZF_SHARED);
        v_round_moment((uint16_t *)s->moment[1] + at, x->v, k->dither[1] + at % ZF_SHARED);
        return;
    }
    vu v[4], rounded[4], down;
    ZF_EACH_OF_4(i) v[i] = (vu)x->v[i];
    if (moments == ZF_MOMENTS_FP32_SPLIT) { /* a tie goes to even */
        ZF_EACH_OF_4(i) {
            down = (vu)(((vu)p[i] & 0x1ffff) == k->half);
            rounded[i] = (vu)p[i] + k->half + down;
            v[i] |= down << 31;
        }
        ZF_EACH_PAIR(i) {
            const size_t to = at + ZF_LANES * i;
            v_store((uint16_t *)s->master + to, (vu)v_upper(rounded[i], rounded[i + 1]));
            v_store(s->low + to, (vu)v_lower((vu)p[i], (vu)p[i + 1]));
        }
    } else {
        ZF_EACH_OF_4(i) v_store((float *)s->master + at + ZF_LANES * i, (vu)p[i]);
    }
    ZF_EACH_OF_4(i) v_store((float *)s->moment[0] + at + ZF_LANES * i, (vu)x->m[i]);
    ZF_EACH_OF_4(i) v_store((float *)s->moment[1] + at + ZF_LANES * i, v[i]);
}

/* ---- the stages of a group ------------------------------------------------------------------------------ */

/* The new moments, from what is kept of the old ones. */
ZF_V_INLINE void v_add_grad(const zf_update_args *a, const v_call *k, v_pending *x, vf *m, vf *v, size_t at, int moments) {
    vf p[4], g[4];
    v_grad(a, k, g, at, zf_order(moments));
    if (a->decay_mode == ZF_L2) {
        v_load_weights(a, p, at, moments);
        ZF_EACH_OF_4(i) g[i] = v_with_l2(k, g[i], p[i]);
    }
    ZF_EACH_OF_4(i) v_adamw_moments(k, moments == ZF_MOMENTS_8BIT, g[i], &m[i], &v[i]);
    ZF_EACH_OF_4(i) x->v[i] = v[i];
    ZF_EACH_OF_4(i) x->m[i] = m[i];
}

ZF_V_INLINE void v_start(const zf_update_args *a, const v_call *k, v_pending *x, size_t at, int moments) {
    vf m[4], v[4];
    v_load_moments(a, k, m, v, at, moments);
    v_add_grad(a, k, x, m, v, at, moments);
}

ZF_V_INLINE void v_root(v_pending *x) { ZF_EACH_OF_4(i) x->root[i] = v_adamw_root(x->m[i], x->v[i]); }

ZF_V_INLINE void v_change(const v_call *k, vf *change, const v_pending *x) {
    ZF_EACH_OF_4(i) change[i] = v_adamw_change(k, x->m[i], x->v[i], x->root[i]);
}

/* Returns 0 where a weight becomes NaN, as it does whenever a moment is one. */
ZF_V_INLINE int v_weights(const zf_update_args *a, const v_call *k, vf *p, vf *change, size_t at, int moments) {
    v_load_weights(a, p, at, moments);
    if (a->decay_mode == ZF_DECOUPLED) ZF_EACH_OF_4(i) change[i] = change[i] + k->decay * p[i];
    ZF_EACH_OF_4(i) p[i] = p[i] - change[i];
    return v_ordered(p);
}

/* ---- a range of groups ---------------------------------------------------------------------------------- */

ZF_V static __attribute__((noinline)) void v_plainly(const zf_update_args *a, const zf_dithers *d, size_t at, size_t n) {
    zf_update_block(a, d, at, n, ZF_ISA, ZF_MOMENTS);
}

/* Starts a group, takes the roots of the one before, finishes the one before that. */
ZF_V_INLINE void v_turn(const zf_update_args *a, const zf_update_args *given, const v_call *k, const zf_dithers *d,
                        v_pending *now, v_pending *before, v_pending *last, size_t at, int moments, int starts,
                        int finishes) {
    const size_t done = at - 2 * ZF_GROUP;
    vf p[4], change[4];
    if (finishes) v_change(k, change, last);
    if (starts) v_prefetch_group(a, at, moments);
    if (starts) v_start(a, k, now, at, moments);
    v_root(before);
    if (!finishes) return;
    if (!v_weights(a, k, p, change, done, moments)) {
        v_plainly(given, d, done, ZF_GROUP);
        return;
    }
    v_store_state(a, k, p, last, done, moments);
    if (a->out_type != ZF_NONE) v_copy(a, k, p, done, zf_order(moments));
}

ZF_V_INLINE void v_groups(const zf_update_args *a, const zf_update_args *given, const zf_dithers *d, size_t begin,
                          size_t end, int moments) {
    v_pending x[3], *now = x, *before = x + 1, *last = x + 2, *free;
    v_call k;
    v_prepare(&k, a, d, moments);
    memset(x, 0, sizeof x); /* the first turn takes roots of nothing */
    ZF_IN_MEMORY(k);
    for (size_t at = begin; at < end + 2 * ZF_GROUP; at += ZF_GROUP) {
        if (at < begin + 2 * ZF_GROUP) v_turn(a, given, &k, d, now, before, last, at, moments, 1, 0);
        else if (at >= end) v_turn(a, given, &k, d, now, before, last, at, moments, 0, 1);
        else v_turn(a, given, &k, d, now, before, last, at, moments, 1, 1);
        free = last, last = before, before = now, now = free;
    }
}

#include "_codes_vectors.h"

ZF_V_INLINE void v_range_of(const zf_update_args *a, const zf_update_args *given, const zf_dithers *d, size_t begin,
                            size_t end, int moments) {
    if (moments == ZF_MOMENTS_8BIT) v_blocks(a, given, d, begin, end);
    else v_groups(a, given, d, begin, end, moments);
}

/* `local` is a copy, in registers; what training does has no branches: its arguments are constants. */
ZF_V_INLINE size_t v_of_format(const zf_update_args *a, const zf_dithers *d, size_t at, size_t end, int moments) {
    zf_update_args local = *a;
    const int out_type = moments == ZF_MOMENTS_FP32 ? ZF_BF16 : ZF_NONE;
    end -= (end - at) % ZF_SHARED;
    if (end - at < 2 * ZF_SHARED) return at; /* the first turns start two groups or blocks */
    if (a->decay_mode == ZF_DECOUPLED && a->grad_type == ZF_BF16 && a->out_type == out_type && zf_in_place(a)) {
        local.decay_mode = ZF_DECOUPLED, local.grad_type = ZF_BF16, local.out_type = out_type;
        local.into = local.state;
        v_range_of(&local, a, d, at, end, moments);
    } else {
        v_range_of(&local, a, d, at, end, moments);
    }
    return end;
}

/* The whole blocks of ZF_SHARED in a range; returns where the rest begins. */
ZF_V static size_t v_update(const zf_update_args *a, const zf_dithers *d, size_t at, size_t end) {
    if (a->weights == ZF_MASTER) return v_of_format(a, d, at, end, ZF_MOMENTS_FP32);
    if (a->weights == ZF_HALVES_TO_EVEN) return v_of_format(a, d, at, end, ZF_MOMENTS_FP32_SPLIT);
    if (a->kept[0] == ZF_KEPT_BF16) return v_of_format(a, d, at, end, ZF_MOMENTS_16BIT);
    return zf_ordinary(a) ? v_of_format(a, d, at, end, ZF_MOMENTS_8BIT) : at;
}
