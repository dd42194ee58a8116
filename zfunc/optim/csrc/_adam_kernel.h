/* Adam on the host, one sweep over memory; free of torch and of Python.
 *
 * The meaning is the rule in adamw.py, in the frame of rules.py: the same operations in the same order, each rounded once to float,
 * so the two agree to the bit. Compile with -ffp-contract=off (an FMA rounds once where the reference
 * rounds twice) and -fno-math-errno (else sqrtf is a call), and never with -ffast-math.
 *
 * Every loop is plain C in always_inline bodies, compiled once per instruction set; elements never meet
 * (or, in the sums, meet without rounding), so the instruction set and the thread count cannot
 * change a bit. The payload of a NaN is not promised.
 *
 * The time goes to the loops of _adam_vectors.h. What they leave goes through plain ones here, in blocks of at most
 * ZF_BLOCK elements: widening of the gradient and of compact state, Adam, rounding of what is kept and of the copy.
 * Several loops instead of one avoid a product of types and modes. */
#ifndef ZFUNC_ADAM_KERNEL_H
#define ZFUNC_ADAM_KERNEL_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "_number_formats.h"

#define ZF_BLOCK 128       /* elements between two loops; a multiple of 64 */
#define ZF_AHEAD 768       /* elements a prefetch runs ahead: they stay in L1 until their turn */
#define ZF_TOGETHER 4      /* blocks of 64 whose squares are summed at a time; no slice cuts through one */
#define ZF_PARTS 21        /* of an exact sum, each of 32 bits, from 2^-352 on */
#define ZF_CHUNK 65536     /* elements whose sums, 1,024 mantissas of 53 bits, are added in 64 */
#define ZF_LEAST_EXPONENT 723 /* of a double whose last bit is 2^-352; that of the least square, 2^-298, is 725 */
#define ZF_EXPONENTS 608   /* from that one on; the largest sum, below 2^263, has 1285 */
#define ZF_PIECE 65536     /* elements that a thread takes at a time */
#define ZF_FORK_MIN 32768  /* below this many elements a second thread costs more than it saves */
#define ZF_ROOM 2048      /* elements of new state that stream out at a time */
#define ZF_STREAM_MIN 262144 /* from this many elements on, the copy bypasses the caches */

/* Denormal operands cost an assist each. These floors keep every product of the steady state normal:
 * g*g >= 2^-112, (1-beta2)*g*g and beta*moment stay above 2^-126, sqrt(v) above 2^-60. They replace the
 * FTZ/DAZ modes, which are per thread and belong to the caller. */
#define ZF_FLOOR_GRAD 0x23800000       /* bits of 2^-56 */
#define ZF_FLOOR_EXP_AVG 0x0d800000    /* bits of 2^-100 */
#define ZF_FLOOR_EXP_AVG_SQ 0x03800000 /* bits of 2^-120 */

enum { ZF_NONE = 0, ZF_FP32 = 1, ZF_BF16 = 2, ZF_FP16 = 3 };          /* element types */
enum { ZF_NO_DECAY = 0, ZF_DECOUPLED = 1, ZF_L2 = 2 };                /* weight decay */
enum { ZF_HAS_INF = 1, ZF_HAS_NAN = 2 };                                   /* what no exact sum has */
/* What the state is kept in: all in fp32, or compact, which is any with a split master. */
enum { ZF_MOMENTS_FP32 = 0, ZF_MOMENTS_16BIT = 1, ZF_MOMENTS_8BIT = 2, ZF_MOMENTS_FP32_SPLIT = 3 };

typedef struct {
    void *master;                 /* [n] fp32; bf16 in compact state: the high half */
    int16_t *low;                 /* [n], compact state only: the low half */
    void *exp_avg, *exp_avg_sq;   /* [n] fp32, bf16 or 8-bit codes */
    int16_t *exp_avg_sq_scale;    /* [ceil(n / ZF_SHARED)], 8-bit codes only */
} zf_state;

typedef struct {
    zf_state state;   /* IN    */
    zf_state into;    /* OUT   the very same buffers, or others that overlap with none here */
    const void *grad; /* IN    [n] of grad_type */
    void *out;        /* OUT   [n] of out_type, or NULL */
    int moments, grad_type, out_type, decay_mode;
    uint32_t exp_avg_dither, exp_avg_sq_dither; /* of a block's first element */
    float grad_scale, grad_floor, beta1, one_minus_beta1, beta2, one_minus_beta2;
    float step_size, inv_sqrt_bias2, eps, decay; /* decay: lr * weight_decay, or weight_decay for L2 */
    int stream, stream_state; /* whether the copy, and state that goes elsewhere, bypass the caches */
} zf_adam_args;

typedef struct {
    float *acc;         /* INOUT [n], or NULL: sum the squares of grad itself */
    const void *grad;   /* IN    [n] of grad_type */
    int grad_type, first;
    int64_t *part;      /* OUT   [ZF_PARTS], before carrying */
    int *special;       /* OUT   ZF_HAS_INF, ZF_HAS_NAN */
} zf_sum_args;

typedef struct {
    void *state[4];     /* INOUT [n] of width[i] bytes each */
    size_t width[4];    /* 0: no more state */
    const uint16_t *in; /* IN    [n] */
    uint16_t *out;      /* OUT   [n], or NULL: `in` is read all the same */
    int stream;
} zf_skeleton_args;

ZF_INLINE int zf_in_place(const zf_adam_args *a) { return a->into.master == a->state.master; }

/* ---- one block ------------------------------------------------------------------------------------ */

/* Divisions and square roots fill the reorder window and loads would wait behind them, so lines are
 * fetched ahead, one by one: in a burst they queue. Past the end is harmless, a prefetch cannot fault. */
ZF_INLINE void zf_prefetch(const void *at, size_t bytes_ahead) {
    __builtin_prefetch((const void *)((uintptr_t)at + bytes_ahead), 0, 3);
}

/* As many lines as `n` elements of `width` bytes have, `ahead` elements further on. */
ZF_INLINE void zf_prefetch_lines(const void *at, size_t n, size_t width, size_t ahead) {
    for (size_t line = 0; line < n * width; line += 64) zf_prefetch((const char *)at + line, ahead * width);
}

/* The gradient at an element as fp32: in place, or widened into the scratch. */
ZF_INLINE const float *zf_load(float *restrict g, const void *grad, int type, size_t at, size_t n, int isa) {
    const uint16_t *restrict h = (const uint16_t *)grad + at;
    if (type == ZF_FP32) return (const float *)grad + at;
    if (type == ZF_BF16)
        for (size_t i = 0; i < n; i++) g[i] = zf_from_bf16(h[i]);
    else
        zf_widen_fp16(g, h, n, isa);
    return g;
}

ZF_INLINE void zf_core(const zf_adam_args *a, float *restrict p, float *restrict m, float *restrict v,
                       const float *restrict grad, size_t n, int mode) {
    const float b1 = a->beta1, c1 = a->one_minus_beta1, b2 = a->beta2, c2 = a->one_minus_beta2;
    const float size = a->step_size, bias = a->inv_sqrt_bias2, eps = a->eps, decay = a->decay;
    const float scale = a->grad_scale;
    const int32_t floor = (int32_t)zf_bits(a->grad_floor);
    for (size_t i = 0; i < n; i++) {
        float g = zf_flush(grad[i], floor) * scale;
        if (mode == ZF_L2) g = zf_flush(g + decay * p[i], ZF_FLOOR_GRAD);
        float m1 = zf_flush(b1 * m[i] + c1 * g, ZF_FLOOR_EXP_AVG);
        float v1 = zf_flush(b2 * v[i] + c2 * (g * g), ZF_FLOOR_EXP_AVG_SQ);
        float change = size * (m1 / (sqrtf(v1) * bias + eps));
        if (mode == ZF_DECOUPLED) change = change + decay * p[i];
        m[i] = m1;
        v[i] = v1;
        p[i] = p[i] - change;
    }
}

ZF_INLINE void zf_core_of_mode(const zf_adam_args *a, float *p, float *m, float *v, const float *g, size_t n) {
    if (a->decay_mode == ZF_DECOUPLED) zf_core(a, p, m, v, g, n, ZF_DECOUPLED);
    else if (a->decay_mode == ZF_L2) zf_core(a, p, m, v, g, n, ZF_L2);
    else zf_core(a, p, m, v, g, n, ZF_NO_DECAY);
}

/* The copy is written and not read: a streaming store saves reading its lines first. */
ZF_INLINE void zf_store(void *restrict out, const void *restrict in, size_t bytes, int stream) {
#if defined(__x86_64__)
    if (stream) {
        char *to = (char *)out;
        const char *from = (const char *)in;
        size_t head = (size_t)(-(uintptr_t)to & 15), i;
        if (head > bytes) head = bytes;
        memcpy(to, from, head);
        for (i = head; i + 16 <= bytes; i += 16)
            _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
        memcpy(to + i, from + i, bytes - i);
        return;
    }
#else
    (void)stream;
#endif
    memcpy(out, in, bytes);
}

ZF_INLINE void zf_round(void *out, int type, const float *restrict p, size_t at, size_t n, int stream,
                        int isa) {
    uint16_t h[ZF_BLOCK] __attribute__((aligned(64)));
    if (type == ZF_FP32) {
        zf_store((float *)out + at, p, n * sizeof(float), stream);
        return;
    }
    if (type == ZF_BF16)
        for (size_t i = 0; i < n; i++) h[i] = zf_to_bf16(p[i]);
    else
        zf_narrow_fp16(h, p, n, isa);
    zf_store((uint16_t *)out + at, h, n * sizeof(uint16_t), stream);
}

ZF_INLINE void zf_fence(int stream) {
#if defined(__x86_64__)
    if (stream) _mm_sfence(); /* streaming stores are weakly ordered: no barrier after this flushes them */
#else
    (void)stream;
#endif
}

/* Of a buffer whose bytes from `bytes` on are in `room`: where it would begin. */
ZF_INLINE void *zf_shifted(char *room, size_t bytes) { return (void *)((uintptr_t)room - bytes); }

/* ---- a range of blocks ---------------------------------------------------------------------------- */

ZF_INLINE void zf_adam_block(const zf_adam_args *a, size_t at, size_t n, int isa) {
    float scratch[ZF_BLOCK] __attribute__((aligned(64)));
    const float *old[] = {(const float *)a->state.master + at, (const float *)a->state.exp_avg + at,
                          (const float *)a->state.exp_avg_sq + at};
    float *new[] = {(float *)a->into.master + at, (float *)a->into.exp_avg + at, (float *)a->into.exp_avg_sq + at};
    const float *g = zf_load(scratch, a->grad, a->grad_type, at, n, isa);
    if (!zf_in_place(a))
        for (int k = 0; k < 3; k++) memcpy(new[k], old[k], n * sizeof(float));
    zf_core_of_mode(a, new[0], new[1], new[2], g, n);
    if (a->out_type != ZF_NONE) zf_round(a->out, a->out_type, new[0], at, n, a->stream, isa);
}

/* What rounding adds to each element of a block, shifted below the last bit kept. */
typedef struct {
    uint32_t exp_avg[ZF_SHARED];
    uint32_t exp_avg_sq[ZF_NUM_SHIFTS][ZF_SHARED]; /* for each choice of a scale; bfloat16 has the first */
} zf_dithers;

ZF_INLINE void zf_spread(zf_dithers *d, const zf_adam_args *a) {
    const int bf16 = a->moments == ZF_MOMENTS_16BIT, m_cut = bf16 ? 16 : ZF_CUT, v_cut = bf16 ? 16 : ZF_MIN_SHIFT;
    for (uint32_t i = 0; i < ZF_SHARED; i++) {
        d->exp_avg[i] = (a->exp_avg_dither + i * ZF_SPREAD) >> (32 - m_cut);
        for (int k = 0; k < ZF_NUM_SHIFTS; k++)
            d->exp_avg_sq[k][i] = (a->exp_avg_sq_dither + i * ZF_SPREAD) >> (32 - v_cut - k);
    }
}

/* Bytes of a moment. */
ZF_INLINE size_t zf_width(int moments) {
    return moments == ZF_MOMENTS_16BIT ? 2 : moments == ZF_MOMENTS_8BIT ? 1 : 4;
}

/* The state of blocks that begin at `at`, as fp32 and back; `moments` is a constant of the inlined call. */
ZF_INLINE void zf_unpack(const zf_adam_args *a, float *p, float *m, float *v, size_t at, size_t n, int moments) {
    const zf_state *s = &a->state;
    const uint16_t *high = (const uint16_t *)s->master + at;
    if (moments == ZF_MOMENTS_FP32_SPLIT) {
        zf_join_even(p, v, high, s->low + at, (const float *)s->exp_avg_sq + at, n);
        if (!zf_in_place(a)) memcpy(m, (const float *)s->exp_avg + at, n * sizeof(float));
        return;
    }
    zf_join(p, high, s->low + at, n);
    if (moments == ZF_MOMENTS_16BIT) {
        zf_unpack_bf16(m, (const uint16_t *)s->exp_avg + at, n);
        zf_unpack_bf16(v, (const uint16_t *)s->exp_avg_sq + at, n);
        return;
    }
    for (size_t i = 0; i < n; i += ZF_SHARED) {
        size_t few = n - i < ZF_SHARED ? n - i : ZF_SHARED, block = (at + i) / ZF_SHARED;
        zf_unpack_codes(m + i, v + i, (const uint8_t *)s->exp_avg + at + i, (const uint8_t *)s->exp_avg_sq + at + i,
                        s->exp_avg_sq_scale[block], few);
    }
}

/* p, m and v as they are kept: `to` has room for n elements, `at` is where they begin in the state. */
ZF_INLINE void zf_pack(const zf_adam_args *a, const zf_dithers *d, const float *p, const float *m,
                       const float *v, char *const *to, size_t at, size_t n, int moments) {
    if (moments == ZF_MOMENTS_FP32_SPLIT) {
        zf_split_even((uint16_t *)to[0], (int16_t *)to[1], (float *)to[3], p, v, n);
        if (!zf_in_place(a)) memcpy(to[2], m, n * sizeof(float));
        return;
    }
    zf_split((uint16_t *)to[0], (int16_t *)to[1], p, n);
    for (size_t i = 0; i < n; i += ZF_SHARED) {
        size_t few = n - i < ZF_SHARED ? n - i : ZF_SHARED, block = (at + i) / ZF_SHARED;
        if (moments == ZF_MOMENTS_16BIT) {
            const size_t first = (at + i) % ZF_SHARED;
            zf_pack_bf16((uint16_t *)to[2] + i, m + i, few, d->exp_avg + first);
            zf_pack_bf16((uint16_t *)to[3] + i, v + i, few, d->exp_avg_sq[0] + first);
        } else {
            a->into.exp_avg_sq_scale[block] = zf_pack_codes((uint8_t *)to[2] + i, (uint8_t *)to[3] + i, m + i, v + i,
                                                            few, d->exp_avg, d->exp_avg_sq);
        }
    }
}

ZF_INLINE void zf_compact_block(const zf_adam_args *a, const zf_dithers *d, size_t at, size_t n, int isa,
                                int moments) {
    float p[ZF_BLOCK] __attribute__((aligned(64))), room[ZF_BLOCK] __attribute__((aligned(64)));
    float v[ZF_BLOCK] __attribute__((aligned(64))), scratch[ZF_BLOCK] __attribute__((aligned(64)));
    const int own = moments == ZF_MOMENTS_FP32_SPLIT && zf_in_place(a); /* its exp_avg is updated where it lies */
    float *m = own ? (float *)a->state.exp_avg + at : room;
    const size_t width = zf_width(moments);
    zf_unpack(a, p, m, v, at, n, moments);
    const float *g = zf_load(scratch, a->grad, a->grad_type, at, n, isa);
    char *const into[4] = {(char *)a->into.master + 2 * at, (char *)(a->into.low + at),
                           (char *)a->into.exp_avg + width * at, (char *)a->into.exp_avg_sq + width * at};
    zf_core_of_mode(a, p, m, v, g, n);
    zf_pack(a, d, p, m, v, into, at, n, moments);
    if (a->out_type != ZF_NONE) zf_round(a->out, a->out_type, p, at, n, a->stream, isa);
}

ZF_INLINE void zf_compact_range(const zf_adam_args *a, const zf_dithers *d, size_t at, size_t end, int isa,
                                int moments) {
    for (; at + ZF_BLOCK <= end; at += ZF_BLOCK) zf_compact_block(a, d, at, ZF_BLOCK, isa, moments);
    if (at < end) zf_compact_block(a, d, at, end - at, isa, moments);
}

#if defined(__x86_64__)
#if defined(__clang__)
#define ZF_TARGET_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,f16c"
#else
#define ZF_TARGET_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512"
#endif
#include "_vectors_sse2.h"
#include "_adam_vectors.h"
#include "_vectors_avx2.h"
#include "_adam_vectors.h"
#include "_vectors_avx512.h"
#include "_adam_vectors.h"
#elif defined(__aarch64__)
#include "_vectors_neon.h"
#include "_adam_vectors.h"
#endif

/* Whole blocks have constant trip counts. */
ZF_INLINE void zf_adam_elements(const zf_adam_args *a, const zf_dithers *d, size_t at, size_t end, int isa) {
#if defined(__x86_64__)
    if (isa == ZF_BASELINE) at = v_adam_sse2(a, d, at, end);
    if (isa == ZF_AVX2) at = v_adam_avx2(a, d, at, end);
    if (isa == ZF_AVX512) at = v_adam_avx512(a, d, at, end);
#elif defined(__aarch64__)
    at = v_adam_neon(a, d, at, end);
#endif
    if (a->moments == ZF_MOMENTS_FP32) {
        for (; at + ZF_BLOCK <= end; at += ZF_BLOCK) zf_adam_block(a, at, ZF_BLOCK, isa);
        if (at < end) zf_adam_block(a, at, end - at, isa);
    } else if (a->moments == ZF_MOMENTS_FP32_SPLIT) {
        zf_compact_range(a, NULL, at, end, isa, ZF_MOMENTS_FP32_SPLIT);
    } else if (a->moments == ZF_MOMENTS_16BIT) {
        zf_compact_range(a, d, at, end, isa, ZF_MOMENTS_16BIT);
    } else {
        zf_compact_range(a, d, at, end, isa, ZF_MOMENTS_8BIT);
    }
}

/* New state that goes elsewhere passes through `room`, from where each buffer streams out in one piece: streaming
 * stores to three or four buffers in turn, a few lines each, took up to eight times as long on an AMD EPYC. */
ZF_INLINE void zf_adam_body(const void *args, size_t begin, size_t end, int isa) {
    const zf_adam_args *a = (const zf_adam_args *)args;
    const size_t split = a->moments == ZF_MOMENTS_FP32 ? 0 : 2, width = zf_width(a->moments);
    const size_t widths[4] = {split ? split : 4, split, width, width}, most = a->stream_state ? ZF_ROOM : end - begin;
    char *const to[4] = {(char *)a->into.master, (char *)a->into.low, (char *)a->into.exp_avg,
                         (char *)a->into.exp_avg_sq};
    char room[4][4 * ZF_ROOM] __attribute__((aligned(64)));
    zf_adam_args part = *a;
    zf_dithers d;
    if (a->moments == ZF_MOMENTS_16BIT || a->moments == ZF_MOMENTS_8BIT) zf_spread(&d, a);
    for (size_t at = begin; at < end; at += most) {
        const size_t n = end - at < most ? end - at : most;
        if (a->stream_state) {
            part.into.master = zf_shifted(room[0], widths[0] * at);
            part.into.low = (int16_t *)zf_shifted(room[1], widths[1] * at);
            part.into.exp_avg = zf_shifted(room[2], widths[2] * at);
            part.into.exp_avg_sq = zf_shifted(room[3], widths[3] * at);
        }
        zf_adam_elements(&part, &d, at, at + n, isa);
        for (int k = 0; k < 4; k++)
            if (a->stream_state && widths[k]) zf_store(to[k] + widths[k] * at, room[k], n * widths[k], 1);
    }
    zf_fence(a->stream || a->stream_state);
}

/* The sums of squares of ZF_TOGETHER blocks of 64, each in a fixed order: element i belongs to lane i % 16, and lanes
 * are added in pairs. Squares of floats are exact in double. Some blocks at a time, for vector units. */
ZF_INLINE void zf_squares(double *restrict sum, const float *restrict x) {
    double lane[ZF_TOGETHER][16], few[ZF_TOGETHER][4];
    for (size_t b = 0; b < ZF_TOGETHER; b++) {
        for (size_t j = 0; j < 16; j++) lane[b][j] = (double)x[64 * b + j] * (double)x[64 * b + j];
        for (size_t i = 16; i < 64; i += 16)
            for (size_t j = 0; j < 16; j++)
                lane[b][j] += (double)x[64 * b + i + j] * (double)x[64 * b + i + j];
        for (size_t j = 0; j < 8; j++) lane[b][j] += lane[b][j + 8];
        for (size_t j = 0; j < 4; j++) few[b][j] = lane[b][j] + lane[b][j + 4];
    }
    for (size_t b = 0; b < ZF_TOGETHER; b++) sum[b] = (few[b][0] + few[b][2]) + (few[b][1] + few[b][3]);
}

/* Mantissas of sums of squares by exponent, added without rounding. */
typedef struct {
    uint64_t of[ZF_EXPONENTS];
    int special; /* ZF_HAS_INF, ZF_HAS_NAN */
} zf_mantissas;

ZF_INLINE void zf_add_exactly(zf_mantissas *restrict m, double sum) {
    const uint64_t one = (uint64_t)1 << 52;
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    unsigned exponent = (unsigned)(bits >> 52), at = exponent - ZF_LEAST_EXPONENT;
    if (at < ZF_EXPONENTS) m->of[at] += (bits & (one - 1)) | one;
    else if (exponent) m->special |= sum == sum ? ZF_HAS_INF : ZF_HAS_NAN; /* else zero */
}

/* Move them to the parts of a sum. */
ZF_INLINE void zf_carry(zf_mantissas *restrict m, int64_t *restrict part) {
    for (unsigned at = 0; at < ZF_EXPONENTS; at++) {
        uint64_t low = (m->of[at] & UINT32_MAX) << at % 32, high = (m->of[at] >> 32) << at % 32;
        if (!m->of[at]) continue;
        part[at / 32] += (int64_t)(low & UINT32_MAX);
        part[at / 32 + 1] += (int64_t)((low >> 32) + (high & UINT32_MAX));
        part[at / 32 + 2] += (int64_t)(high >> 32);
        m->of[at] = 0;
    }
}

ZF_INLINE void zf_sum_blocks(const zf_sum_args *a, zf_mantissas *m, size_t at, size_t n, int isa) {
    float scratch[64 * ZF_TOGETHER] __attribute__((aligned(64)));
    double sum[ZF_TOGETHER];
    const float *g = zf_load(scratch, a->grad, a->grad_type, at, n, isa);
    if (a->acc) {
        float *restrict acc = a->acc + at;
        if (a->first) memcpy(acc, g, n * sizeof(float));
        else
            for (size_t i = 0; i < n; i++) acc[i] = acc[i] + g[i];
        g = acc;
    }
    if (n < 64 * ZF_TOGETHER) {
        if (g != scratch) memcpy(scratch, g, n * sizeof(float));
        memset(scratch + n, 0, (64 * ZF_TOGETHER - n) * sizeof(float));
        g = scratch;
    }
    zf_squares(sum, g);
    for (size_t b = 0; b < ZF_TOGETHER; b++) zf_add_exactly(m, sum[b]);
}

ZF_INLINE void zf_sum_body(const void *args, size_t begin, size_t end, int isa) {
    const zf_sum_args *a = (const zf_sum_args *)args;
    const size_t unit = 64 * ZF_TOGETHER;
    zf_mantissas mantissas = {{0}, 0};
    int64_t part[ZF_PARTS] = {0};
    for (size_t at = begin; at < end;) {
        size_t stop = end - at < ZF_CHUNK ? end : at + ZF_CHUNK;
        for (; at + unit <= stop; at += unit) zf_sum_blocks(a, &mantissas, at, unit, isa);
        if (at < stop) zf_sum_blocks(a, &mantissas, at, stop - at, isa), at = stop;
        zf_carry(&mantissas, part);
    }
    for (size_t i = 0; i < ZF_PARTS; i++) __atomic_fetch_add(&a->part[i], part[i], __ATOMIC_RELAXED);
    __atomic_fetch_or(a->special, mantissas.special, __ATOMIC_RELAXED);
}

/* The yardstick: the loads and stores of a step with a 16-bit gradient, and no arithmetic. */
ZF_INLINE void zf_touch(char *restrict x, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) {
        size_t stop = bytes - line < 64 ? bytes : line + 64;
        zf_prefetch(x + line, ZF_AHEAD * 4);
        for (size_t i = line; i < stop; i++) x[i] = (char)~x[i];
    }
}

ZF_INLINE void zf_skeleton_block(const zf_skeleton_args *s, size_t at, size_t n) {
    for (int k = 0; k < 4 && s->width[k]; k++) zf_touch((char *)s->state[k] + at * s->width[k], n * s->width[k]);
    if (s->out) {
        zf_store(s->out + at, s->in + at, n * sizeof(uint16_t), s->stream);
        return;
    }
    uint16_t *restrict first = (uint16_t *)s->state[0] + at;
    const uint16_t *restrict in = s->in + at;
    for (size_t i = 0; i < n; i++) first[i] ^= in[i];
}

ZF_INLINE void zf_skeleton_body(const void *args, size_t begin, size_t end, int isa) {
    const zf_skeleton_args *s = (const zf_skeleton_args *)args;
    size_t at = begin;
    (void)isa;
    for (; at + ZF_BLOCK <= end; at += ZF_BLOCK) zf_skeleton_block(s, at, ZF_BLOCK);
    if (at < end) zf_skeleton_block(s, at, end - at);
    zf_fence(s->stream);
}

/* ---- the copies per instruction set --------------------------------------------------------------- */

typedef void (*zf_range)(const void *args, size_t begin, size_t end);

#define ZF_COPY(kind, name, isa, target)                                                                  \
    target static void zf_##kind##_##name(const void *args, size_t begin, size_t end) {                  \
        zf_##kind##_body(args, begin, end, isa);                                                         \
    }
#define ZF_COPIES(name, isa, target)                                                                     \
    ZF_COPY(adam, name, isa, target)                                                                     \
    ZF_COPY(sum, name, isa, target)                                                                      \
    ZF_COPY(skeleton, name, isa, target)

ZF_COPIES(baseline, ZF_BASELINE, )
#if defined(__x86_64__)
ZF_COPIES(avx2, ZF_AVX2, __attribute__((target("avx2,f16c"))))
ZF_COPIES(avx512, ZF_AVX512, __attribute__((target(ZF_TARGET_AVX512))))
#define ZF_TABLE(kind) {zf_##kind##_baseline, zf_##kind##_avx2, zf_##kind##_avx512}
#else
#define ZF_TABLE(kind) {zf_##kind##_baseline, zf_##kind##_baseline, zf_##kind##_baseline}
#endif

static const zf_range zf_adam_table[ZF_NUM_ISA] = ZF_TABLE(adam);
static const zf_range zf_sum_table[ZF_NUM_ISA] = ZF_TABLE(sum);
static const zf_range zf_skeleton_table[ZF_NUM_ISA] = ZF_TABLE(skeleton);

/* Can this CPU (and its operating system) run the copies of this instruction set? */
static int zf_supports(int isa) {
    if (isa == ZF_BASELINE) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return 0; /* F16C is older, and clang 14 cannot ask for it */
    if (isa == ZF_AVX2) return 1;
    if (isa == ZF_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return 0;
}

/* ---- the caller's float modes ----------------------------------------------------------------------- */

/* Flushing of denormal numbers is a mode of each thread, so the bits would depend on which one an element falls to.
 * A sweep runs with it off, and puts it back. */
static uint64_t zf_plain_modes(void) {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before & ~0x8040u); /* FTZ and DAZ */
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before & ~((uint64_t)1 << 24))); /* FZ */
    return before;
#else
    return 0;
#endif
}

static void zf_restore_modes(uint64_t before) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

static void zf_in_plain_modes(zf_range range, const void *args, size_t begin, size_t end) {
    uint64_t before = zf_plain_modes();
    range(args, begin, end);
    zf_restore_modes(before);
}

/* ---- threads -------------------------------------------------------------------------------------- */

/* Each thread has a part of its own, a run of whole units, from which it takes pieces; with none left it takes those
 * of the others. So a thread whose core is busy with something else delays a sweep by one piece, not by its part. A
 * team smaller than asked for still covers everything; of a larger one some have nothing to do, because a team that
 * changes its size loses threads and where they were bound. */
static void zf_run(zf_range range, const void *args, size_t n, size_t unit, int threads) {
    if (threads <= 1 || n < ZF_FORK_MIN) {
        zf_in_plain_modes(range, args, 0, n);
        return;
    }
#ifdef _OPENMP
    const size_t units = (n + unit - 1) / unit, piece = unit < ZF_PIECE ? ZF_PIECE / unit : 1;
    struct { size_t taken; char rest_of_line[64 - sizeof(size_t)]; } parts[threads];
    memset(parts, 0, sizeof parts);
#pragma omp parallel num_threads(threads)
    {
        const size_t team = (size_t)omp_get_num_threads(), rank = (size_t)omp_get_thread_num();
        for (size_t i = rank; i < rank + team; i++) {
            const size_t part = i % team, last = units * (part + 1) / team;
            for (;;) {
                size_t from, to;
#pragma omp atomic capture
                { from = parts[part].taken; parts[part].taken += piece; }
                from += units * part / team, to = from + piece < last ? from + piece : last;
                if (from >= last) break;
                zf_in_plain_modes(range, args, from * unit, to * unit < n ? to * unit : n);
            }
        }
    }
#else
    zf_in_plain_modes(range, args, 0, n);
#endif
}

/* Whole blocks are whole lines then. */
static int zf_on_lines(const zf_state *s) {
    uintptr_t any = (uintptr_t)s->master | (uintptr_t)s->low | (uintptr_t)s->exp_avg | (uintptr_t)s->exp_avg_sq;
    return any % 64 == 0;
}

static void zf_adam(zf_adam_args *a, size_t n, int threads, int isa) {
    a->stream = a->out_type != ZF_NONE && n >= ZF_STREAM_MIN;
    a->stream_state = !zf_in_place(a) && n >= ZF_STREAM_MIN && zf_on_lines(&a->into);
    zf_run(zf_adam_table[isa], a, n, ZF_BLOCK, threads);
}

/* The sum of squares as ZF_PARTS numbers: part i is a multiple of 2^(32 i - 352), below 2^32 of them. So parts are
 * added without rounding, and where elements were cut into calls and threads changes no bit of the total. */
static void zf_sum(zf_sum_args *a, size_t n, int threads, int isa, double *parts) {
    int64_t part[ZF_PARTS] = {0}, carry = 0;
    int special = 0;
    double unit = 0x1p-352;
    a->part = part, a->special = &special;
    zf_run(zf_sum_table[isa], a, n, ZF_BLOCK, threads);
    for (size_t i = 0; i < ZF_PARTS; i++, unit *= 0x1p32) {
        part[i] += carry;
        carry = part[i] >> 32;
        parts[i] = (double)(part[i] & UINT32_MAX) * unit;
    }
    if (special) parts[0] = special & ZF_HAS_NAN ? NAN : INFINITY;
}

static void zf_skeleton(zf_skeleton_args *s, size_t n, int threads, int isa) {
    s->stream = s->out && n >= ZF_STREAM_MIN;
    zf_run(zf_skeleton_table[isa], s, n, ZF_BLOCK, threads);
}

#endif
