/* SGD, Lion, Adagrad and Muon's direction on the host: optimizers with at most one buffer beside the weights, one sweep over memory.
 *
 * The meaning is the rules in optim/sgd.py, lion.py, adagrad.py and muon.py, as adamw.py's is that of _adam_kernel.h, whose rules about bits hold
 * here too. A block of ZF_BLOCK elements lies in L1 while it is widened, updated and rounded; rule, formats and kind of
 * decay are constants of inlined calls in the loop that computes. */
#ifndef ZFUNC_ONE_BUFFER_KERNEL_H
#define ZFUNC_ONE_BUFFER_KERNEL_H

#include "_adam_kernel.h"

enum { ZF_SGD = 0, ZF_NESTEROV = 1, ZF_LION = 2, ZF_ADAGRAD = 3, ZF_DIRECTION = 4 }; /* rules */
/* What the buffer is kept in: nothing, fp32, bf16, or 8-bit codes with a sign or without. */
enum { ZF_BUFFER_NONE = 0, ZF_BUFFER_FP32 = 1, ZF_BUFFER_BF16 = 2, ZF_BUFFER_SIGNED = 3, ZF_BUFFER_UNSIGNED = 4 };

typedef struct {
    void *master;   /* [n] fp32, or bf16: the high half of a split master; NULL for a direction */
    int16_t *low;   /* [n] the low half, or NULL */
    void *buffer;   /* [n] or NULL */
    int16_t *scale; /* [ceil(n / ZF_SHARED)], codes only */
} zf_one_state;

typedef struct {
    zf_one_state state; /* IN    */
    zf_one_state into;  /* OUT   the very same buffers, or others that overlap with none here */
    const void *grad;   /* IN    [n] of grad_type */
    void *out;          /* OUT   [n] of out_type, or NULL: the new weights, or the direction */
    int rule, buffer_type, grad_type, out_type, decay_mode;
    uint32_t dither; /* of a block's first element */
    float grad_scale, grad_floor, rate, decay, keep, add, look_keep, look_add, eps, initial;
    int stream, stream_state; /* whether the copy, and state that goes elsewhere, bypass the caches */
} zf_one_args;

ZF_INLINE int zf_one_in_place(const zf_one_args *a) {
    return a->into.master == a->state.master && a->into.buffer == a->state.buffer;
}

/* ---- the rules -------------------------------------------------------------------------------------- */

/* x, but 0 where it is none and NaN where it is that; elsewhere `size` with the sign of x. */
ZF_INLINE float zf_signed(float x, float size) {
    const uint32_t b = zf_bits(x), magnitude = b & 0x7fffffff;
    uint32_t y = zf_bits(size) | (b & 0x80000000u);
    y = zf_select((int32_t)magnitude > 0x7f800000, b, y);
    return zf_float(zf_select(magnitude == 0, 0, y));
}

ZF_INLINE void zf_one_core(const zf_one_args *a, float *restrict p, float *restrict m, const float *restrict grad,
                           size_t n, int rule, int mode) {
    const float scale = a->grad_scale, rate = a->rate, decay = a->decay, keep = a->keep, add = a->add;
    const float look_keep = a->look_keep, look_add = a->look_add, eps = a->eps, initial = a->initial;
    const int32_t floor = (int32_t)zf_bits(a->grad_floor);
    for (size_t i = 0; i < n; i++) {
        float g = zf_flush(grad[i], floor) * scale, change;
        if (mode == ZF_L2) g = zf_flush(g + decay * p[i], ZF_FLOOR_GRAD);
        if (rule == ZF_ADAGRAD) {
            m[i] = m[i] + g * g;
            change = rate * (g / (sqrtf(m[i] + initial) + eps));
        } else {
            const float next = zf_flush(keep * m[i] + add * g, ZF_FLOOR_EXP_AVG);
            if (rule == ZF_DIRECTION) {
                p[i] = look_keep * next + look_add * g;
                m[i] = next;
                continue;
            }
            if (rule == ZF_LION) change = zf_signed(look_keep * m[i] + look_add * g, rate);
            else if (rule == ZF_NESTEROV) change = rate * (g + keep * next);
            else change = rate * next;
            m[i] = next;
        }
        if (mode == ZF_DECOUPLED) change = change + decay * p[i];
        p[i] = p[i] - change;
    }
}

ZF_INLINE void zf_one_core_of_mode(const zf_one_args *a, float *p, float *m, const float *g, size_t n, int rule) {
    if (a->decay_mode == ZF_DECOUPLED) zf_one_core(a, p, m, g, n, rule, ZF_DECOUPLED);
    else if (a->decay_mode == ZF_L2) zf_one_core(a, p, m, g, n, rule, ZF_L2);
    else zf_one_core(a, p, m, g, n, rule, ZF_NO_DECAY);
}

ZF_INLINE void zf_one_core_of_rule(const zf_one_args *a, float *p, float *m, const float *g, size_t n) {
    if (a->rule == ZF_LION) zf_one_core_of_mode(a, p, m, g, n, ZF_LION);
    else if (a->rule == ZF_ADAGRAD) zf_one_core_of_mode(a, p, m, g, n, ZF_ADAGRAD);
    else if (a->rule == ZF_NESTEROV) zf_one_core_of_mode(a, p, m, g, n, ZF_NESTEROV);
    else if (a->rule == ZF_DIRECTION) zf_one_core(a, p, m, g, n, ZF_DIRECTION, ZF_NO_DECAY);
    else zf_one_core_of_mode(a, p, m, g, n, ZF_SGD);
}

/* ---- 8-bit codes of a buffer with a scale of its own: floats of exp_avg_sq's kind, of 7 bits beside a sign ------- */

ZF_INLINE void zf_one_decode(float *restrict m, const uint8_t *restrict codes, int16_t stored, size_t n, int is_signed) {
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

ZF_INLINE int16_t zf_one_encode(uint8_t *restrict codes, const float *restrict m, size_t n,
                                const uint32_t *restrict dither, int is_signed) {
    const int32_t most = is_signed ? 127 : 255, highest = most - 1;
    const int least_shift = ZF_MIN_SHIFT + is_signed;
    const int32_t coarsest = 1 << (least_shift + ZF_NUM_SHIFTS - 1), limit = ZF_LIMIT & -coarsest;
    int32_t largest = 0, smallest = limit;
    for (size_t i = 0; i < n; i++) {
        const int32_t size = (int32_t)(zf_bits(m[i]) & 0x7fffffff), finite = size > limit ? 0 : size;
        const int32_t positive = finite ? finite : limit;
        largest = finite > largest ? finite : largest;
        smallest = positive < smallest ? positive : smallest;
    }
    const int32_t reach = (highest - 1) << least_shift;
    const int32_t top = (largest + coarsest - 1) & -coarsest, span = top - smallest; /* below 0 if all are 0 */
    const int choice = (span > reach) + (span > reach << 1) + (span > reach << 2), shift = least_shift + choice;
    const int32_t lowest = top - (highest << shift);
    const uint32_t base = lowest > 0 ? (uint32_t)lowest : 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t b = zf_bits(m[i]);
        const int32_t size = (int32_t)(b & 0x7fffffff), least = size < 1 ? size : 1;
        int32_t code = (int32_t)((uint32_t)size - base + (dither[i] >> (32 - shift))) >> shift;
        code = code > least ? code : least; /* what is above 0 stays there */
        code = (int32_t)zf_select(size > limit, (uint32_t)most, (uint32_t)code);
        codes[i] = (uint8_t)((uint32_t)code | (is_signed ? zf_select(size > (int32_t)ZF_INF, 0, b >> 31 << 7) : 0));
    }
    return (int16_t)(base >> 16 | (uint32_t)choice);
}

/* ---- one block --------------------------------------------------------------------------------------- */

ZF_INLINE size_t zf_one_width(int buffer_type) {
    return buffer_type == ZF_BUFFER_NONE ? 0 : buffer_type == ZF_BUFFER_FP32 ? 4 : buffer_type == ZF_BUFFER_BF16 ? 2 : 1;
}

/* A block's buffer, `m` having room for it; `to` is where it is kept. */
ZF_INLINE void zf_one_unpack(const zf_one_args *a, float *m, size_t at, size_t n) {
    const void *from = a->state.buffer;
    if (a->buffer_type == ZF_BUFFER_FP32) memcpy(m, (const float *)from + at, n * sizeof(float));
    else if (a->buffer_type == ZF_BUFFER_BF16) zf_unpack_bf16(m, (const uint16_t *)from + at, n);
    else if (a->buffer_type == ZF_BUFFER_NONE) memset(m, 0, n * sizeof(float));
    else
        for (size_t i = 0; i < n; i += ZF_SHARED) {
            const size_t few = n - i < ZF_SHARED ? n - i : ZF_SHARED;
            const uint8_t *codes = (const uint8_t *)from + at + i;
            const int16_t stored = a->state.scale[(at + i) / ZF_SHARED];
            if (a->buffer_type == ZF_BUFFER_SIGNED) zf_one_decode(m + i, codes, stored, few, 1);
            else zf_one_decode(m + i, codes, stored, few, 0);
        }
}

ZF_INLINE void zf_one_pack(const zf_one_args *a, const uint32_t *dither, const float *m, size_t at, size_t n) {
    if (a->buffer_type == ZF_BUFFER_NONE) return;
    void *to = (char *)a->into.buffer + zf_one_width(a->buffer_type) * at;
    if (a->buffer_type == ZF_BUFFER_FP32) {
        memcpy(to, m, n * sizeof(float));
        return;
    }
    for (size_t i = 0; i < n; i += ZF_SHARED) {
        const size_t few = n - i < ZF_SHARED ? n - i : ZF_SHARED;
        if (a->buffer_type == ZF_BUFFER_BF16) {
            uint16_t *h = (uint16_t *)to + i;
            for (size_t j = 0; j < few; j++)
                h[j] = (uint16_t)(zf_select(m[i + j] != m[i + j], 0x7fc00000, zf_bits(m[i + j]) + (dither[j] >> 16)) >> 16);
        } else if (a->buffer_type == ZF_BUFFER_SIGNED) {
            a->into.scale[(at + i) / ZF_SHARED] = zf_one_encode((uint8_t *)to + i, m + i, few, dither, 1);
        } else {
            a->into.scale[(at + i) / ZF_SHARED] = zf_one_encode((uint8_t *)to + i, m + i, few, dither, 0);
        }
    }
}

ZF_INLINE void zf_one_block(const zf_one_args *a, const uint32_t *dither, size_t at, size_t n, int isa) {
    float p[ZF_BLOCK] __attribute__((aligned(64))), m[ZF_BLOCK] __attribute__((aligned(64)));
    float scratch[ZF_BLOCK] __attribute__((aligned(64)));
    const int weighted = a->state.master != NULL; /* else p becomes the direction */
    const int split = a->state.low != NULL, own = a->buffer_type == ZF_BUFFER_FP32 && zf_one_in_place(a);
    const size_t width = zf_one_width(a->buffer_type), grad_width = a->grad_type == ZF_FP32 ? 4 : 2;
    float *weights = weighted && !split && zf_one_in_place(a) ? (float *)a->state.master + at : p;
    float *moment = own ? (float *)a->state.buffer + at : m;
    if (weighted)
        zf_prefetch_lines((const char *)a->state.master + at * (split ? 2 : 4), n, split ? 2 : 4, ZF_AHEAD);
    if (split) zf_prefetch_lines(a->state.low + at, n, 2, ZF_AHEAD);
    if (width) zf_prefetch_lines((const char *)a->state.buffer + at * width, n, width, ZF_AHEAD);
    zf_prefetch_lines((const char *)a->grad + at * grad_width, n, grad_width, ZF_AHEAD);
    if (split) zf_join(p, (const uint16_t *)a->state.master + at, a->state.low + at, n);
    else if (weighted && weights == p) memcpy(p, (const float *)a->state.master + at, n * sizeof(float));
    if (!own) zf_one_unpack(a, m, at, n);
    const float *g = zf_load(scratch, a->grad, a->grad_type, at, n, isa);
    zf_one_core_of_rule(a, weights, moment, g, n);
    if (!own) zf_one_pack(a, dither, m, at, n);
    if (split) zf_split((uint16_t *)a->into.master + at, a->into.low + at, p, n);
    else if (weighted && weights == p) memcpy((float *)a->into.master + at, p, n * sizeof(float));
    if (a->out_type != ZF_NONE) zf_round(a->out, a->out_type, weights, at, n, a->stream, isa);
}

/* New state that goes elsewhere streams out as in zf_adam_body. */
ZF_INLINE void zf_one_body(const void *args, size_t begin, size_t end, int isa) {
    const zf_one_args *a = (const zf_one_args *)args;
    const size_t low = a->into.low ? 2 : 0, master = !a->into.master ? 0 : low ? 2 : 4;
    const size_t widths[3] = {master, low, zf_one_width(a->buffer_type)};
    const size_t most = a->stream_state ? ZF_ROOM : end - begin;
    char *const to[3] = {(char *)a->into.master, (char *)a->into.low, (char *)a->into.buffer};
    char room[3][4 * ZF_ROOM] __attribute__((aligned(64)));
    zf_one_args part = *a;
    uint32_t dither[ZF_SHARED];
    for (uint32_t i = 0; i < ZF_SHARED; i++) dither[i] = a->dither + i * ZF_SPREAD;
    for (size_t from = begin; from < end; from += most) {
        const size_t n = end - from < most ? end - from : most;
        size_t at = from;
        if (a->stream_state) {
            part.into.master = master ? zf_shifted(room[0], widths[0] * from) : NULL;
            part.into.low = (int16_t *)zf_shifted(room[1], widths[1] * from);
            part.into.buffer = zf_shifted(room[2], widths[2] * from);
        }
        for (; at + ZF_BLOCK <= from + n; at += ZF_BLOCK) zf_one_block(&part, dither, at, ZF_BLOCK, isa);
        if (at < from + n) zf_one_block(&part, dither, at, from + n - at, isa);
        for (int k = 0; k < 3; k++)
            if (a->stream_state && widths[k]) zf_store(to[k] + widths[k] * from, room[k], n * widths[k], 1);
    }
    zf_fence(a->stream || a->stream_state);
}

ZF_COPY(one, baseline, ZF_BASELINE, )
#if defined(__x86_64__)
ZF_COPY(one, avx2, ZF_AVX2, __attribute__((target("avx2,f16c"))))
ZF_COPY(one, avx512, ZF_AVX512, __attribute__((target(ZF_TARGET_AVX512))))
#endif
static const zf_range zf_one_table[ZF_NUM_ISA] = ZF_TABLE(one);

static void zf_one(zf_one_args *a, size_t n, int threads, int isa) {
    const uintptr_t any = (uintptr_t)a->into.master | (uintptr_t)a->into.low | (uintptr_t)a->into.buffer;
    a->stream = a->out_type != ZF_NONE && n >= ZF_STREAM_MIN;
    a->stream_state = !zf_one_in_place(a) && n >= ZF_STREAM_MIN && any % 64 == 0;
    zf_run(zf_one_table[isa], a, n, ZF_BLOCK, threads);
}

#endif
