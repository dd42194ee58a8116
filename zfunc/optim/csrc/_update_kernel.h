/* An element-wise update on the host, one sweep over memory, of every rule of _rules.h and every format of a state.
 *
 * A block of ZF_BLOCK elements lies in L1 while it is widened, updated and rounded: several loops instead of one avoid a
 * product of types, formats and rules. AdamW's time goes to the loops of _update_vectors.h; what they leave goes
 * through the plain ones here. */
#ifndef ZFUNC_UPDATE_KERNEL_H
#define ZFUNC_UPDATE_KERNEL_H

#include "_sweeps.h"
#ifndef ZF_RULES /* of one's own: zfunc/optim/rules_in_c.py */
#define ZF_RULES "_rules.h"
#define ZF_WITH_VECTORS 1
#endif
#ifndef ZF_MOMENTS
#define ZF_MOMENTS 2
#endif
#include ZF_RULES

/* How weights are kept between steps: not at all, in fp32, or in two halves, whose ties go to even where the sign of
 * exp_avg_sq says which way. */
enum { ZF_NO_WEIGHTS = 0, ZF_MASTER = 1, ZF_HALVES = 2, ZF_HALVES_TO_EVEN = 3 };
/* How a moment is: as 0, in fp32, in bf16, in codes without a sign or with one, or in codes beside the next one's. */
enum { ZF_KEPT_NONE = 0, ZF_KEPT_FP32 = 1, ZF_KEPT_BF16 = 2, ZF_UNSIGNED = 3, ZF_SIGNED = 4, ZF_BESIDE = 5 };

typedef struct {
    void *master;               /* [n] fp32, or bf16: the high half of a split master; NULL without weights */
    int16_t *low;               /* [n] the low half, or NULL */
    void *moment[ZF_MOMENTS];   /* [n] each, or NULL */
    int16_t *scale[ZF_MOMENTS]; /* [ceil(n / ZF_SHARED)] of codes that have one, or NULL */
} zf_state;

typedef struct {
    zf_state state;   /* IN    */
    zf_state into;    /* OUT   the very same buffers, or others that overlap with none here */
    const void *grad; /* IN    [n] of grad_type */
    void *out;        /* OUT   [n] of out_type, or NULL: the new weights, or the result of a rule without weights */
    int rule, grad_type, out_type, decay_mode, weights, kept[ZF_MOMENTS];
    uint32_t dither[ZF_MOMENTS]; /* of a block's first element */
    zf_factors k;
    int moments;              /* that are kept, and at least 1: SGD without momentum reads one of zeros */
    int stream, stream_state; /* whether the copy, and state that goes elsewhere, bypass the caches */
} zf_update_args;

/* What rounding adds to each element, from the highest bit on: a period, and so much more that a block may begin
 * anywhere in it. */
typedef struct {
    uint32_t of[ZF_MOMENTS][ZF_SHARED + ZF_BLOCK] __attribute__((aligned(64)));
} zf_dithers;

ZF_INLINE int zf_in_place(const zf_update_args *a) {
    return a->into.master == a->state.master && a->into.moment[0] == a->state.moment[0];
}

/* Bytes of a moment. */
ZF_INLINE size_t zf_width(int kept) {
    return kept == ZF_KEPT_NONE ? 0 : kept == ZF_KEPT_FP32 ? 4 : kept == ZF_KEPT_BF16 ? 2 : 1;
}

/* ---- one block ---------------------------------------------------------------------------------------- */

/* A moment as fp32, `m` having room for it. `moments` is a constant of the inlined call: a lone one has no codes beside
 * another's, whose branch took 5 % of a block. */
ZF_INLINE void zf_unpack(const zf_update_args *a, int j, float *m, size_t at, size_t n, const int moments) {
    const int kept = a->kept[j];
    const void *from = a->state.moment[j];
    if (kept == ZF_KEPT_FP32) memcpy(m, (const float *)from + at, n * sizeof(float));
    else if (kept == ZF_KEPT_BF16) zf_unpack_bf16(m, (const uint16_t *)from + at, n);
    else if (kept == ZF_KEPT_NONE) memset(m, 0, n * sizeof(float));
    else
        for (size_t i = 0; i < n; i += ZF_SHARED) {
            const size_t few = n - i < ZF_SHARED ? n - i : ZF_SHARED, block = (at + i) / ZF_SHARED;
            const uint8_t *codes = (const uint8_t *)from + at + i;
            if (kept == ZF_UNSIGNED) zf_decode(m + i, codes, a->state.scale[j][block], few, 0);
            else if (moments == 1 || kept == ZF_SIGNED) zf_decode(m + i, codes, a->state.scale[j][block], few, 1);
#if ZF_MOMENTS > 1
            else
                zf_decode_beside(m + i, codes, (const uint8_t *)a->state.moment[1] + at + i, a->state.scale[1][block], few);
#endif
        }
}

/* And back, the last moment first: codes beside others need these. */
ZF_INLINE void zf_pack(const zf_update_args *a, const zf_dithers *d, int j, const float *m, size_t at, size_t n, const int moments) {
    const int kept = a->kept[j];
    if (kept == ZF_KEPT_NONE) return;
    void *to = (char *)a->into.moment[j] + zf_width(kept) * at;
    if (kept == ZF_KEPT_FP32) {
        memcpy(to, m, n * sizeof(float));
        return;
    }
    if (kept == ZF_KEPT_BF16) {
        zf_pack_bf16((uint16_t *)to, m, n, d->of[j] + at % ZF_SHARED);
        return;
    }
    for (size_t i = 0; i < n; i += ZF_SHARED) {
        const size_t few = n - i < ZF_SHARED ? n - i : ZF_SHARED, block = (at + i) / ZF_SHARED;
        uint8_t *codes = (uint8_t *)to + i;
        if (kept == ZF_UNSIGNED) a->into.scale[j][block] = zf_encode(codes, m + i, few, d->of[j], 0);
        else if (moments == 1 || kept == ZF_SIGNED) a->into.scale[j][block] = zf_encode(codes, m + i, few, d->of[j], 1);
#if ZF_MOMENTS > 1
        else
            zf_encode_beside(codes, m + i, (const uint8_t *)a->into.moment[1] + at + i, a->into.scale[1][block], few,
                             d->of[j]);
#endif
    }
}

/* The rule, for a decay that is a constant of the inlined call. */
#define ZF_BY_DECAY(rule, ...)                                                                          \
    do {                                                                                               \
        if (a->decay_mode == ZF_DECOUPLED) rule(&a->k, ZF_DECOUPLED, n, g, __VA_ARGS__);                \
        else if (a->decay_mode == ZF_L2) rule(&a->k, ZF_L2, n, g, __VA_ARGS__);                         \
        else rule(&a->k, ZF_NO_DECAY, n, g, __VA_ARGS__);                                               \
    } while (0)

/* What lies in fp32 where it is updated is updated there; the rest has room here. `moments` is a constant of the
 * inlined call: with it in a register, rules of one moment were 4 to 14 % slower in the caches. */
ZF_INLINE void zf_update_block(const zf_update_args *a, const zf_dithers *d, size_t at, size_t n, int isa,
                               const int moments) {
    float p[ZF_BLOCK] __attribute__((aligned(64))), room[ZF_MOMENTS][ZF_BLOCK] __attribute__((aligned(64)));
    float scratch[ZF_BLOCK] __attribute__((aligned(64))), *m[ZF_MOMENTS] = {room[0]};
    const int here = zf_in_place(a), halves = a->weights >= ZF_HALVES, to_even = a->weights == ZF_HALVES_TO_EVEN;
    const uint16_t *high = halves ? (const uint16_t *)a->state.master + at : NULL;
    const size_t grad_width = a->grad_type == ZF_FP32 ? 4 : 2, width = halves ? 2 : 4;
    float *weights = here && a->weights == ZF_MASTER ? (float *)a->state.master + at : p;
    if (a->weights) zf_prefetch_elements(a->state.master, at, n, width);
    if (halves) zf_prefetch_elements(a->state.low, at, n, 2);
    zf_prefetch_elements(a->grad, at, n, grad_width);
    if (a->weights == ZF_HALVES) zf_join(p, high, a->state.low + at, n);
    for (int j = 0; j < moments; j++) {
        const size_t bytes = zf_width(a->kept[j]);
        const int own = here && a->kept[j] == ZF_KEPT_FP32 && !(to_even && j == 1);
        zf_prefetch_elements(a->state.moment[j], at, n, bytes);
        m[j] = own ? (float *)a->state.moment[j] + at : room[j];
        if (!own && !(to_even && j == 1)) zf_unpack(a, j, m[j], at, n, moments);
    }
#if ZF_MOMENTS > 1
    if (to_even) zf_join_even(p, m[1], high, a->state.low + at, (const float *)a->state.moment[1] + at, n);
#endif
    if (a->weights == ZF_MASTER && weights == p) memcpy(p, (const float *)a->state.master + at, n * sizeof(float));
    const float *g = zf_load(scratch, a->grad, a->grad_type, at, n, isa);
    ZF_APPLY(a, weights, m, g, n)
    for (int j = moments - 1; j >= 0; j--)
        if (m[j] == room[j] && !(to_even && j == 1)) zf_pack(a, d, j, m[j], at, n, moments);
#if ZF_MOMENTS > 1
    if (to_even)
        zf_split_even((uint16_t *)a->into.master + at, a->into.low + at, (float *)a->into.moment[1] + at, p, m[1], n);
#endif
    if (a->weights == ZF_HALVES) zf_split((uint16_t *)a->into.master + at, a->into.low + at, p, n);
    if (a->weights == ZF_MASTER && weights == p) memcpy((float *)a->into.master + at, p, n * sizeof(float));
    if (a->out_type != ZF_NONE) zf_round(a->out, a->out_type, weights, at, n, a->stream, isa);
}

/* ---- a range of blocks -------------------------------------------------------------------------------- */

#ifdef ZF_WITH_VECTORS
#define ZF_RULES_OF_VECTORS
#if defined(__x86_64__)
#include "_vectors_sse2.h"
#include "_update_vectors.h"
#include "_vectors_avx2.h"
#include "_update_vectors.h"
#include "_vectors_avx512.h"
#include "_update_vectors.h"
#elif defined(__aarch64__)
#include "_vectors_neon.h"
#include "_update_vectors.h"
#endif
#endif

/* Whole blocks have constant trip counts. */
ZF_INLINE void zf_update_elements(const zf_update_args *a, const zf_dithers *d, size_t at, size_t end, int isa) {
#if defined(ZF_WITH_VECTORS) && defined(__x86_64__)
    if (a->rule == ZF_ADAMW) {
        if (isa == ZF_BASELINE) at = v_update_sse2(a, d, at, end);
        if (isa == ZF_AVX2) at = v_update_avx2(a, d, at, end);
        if (isa == ZF_AVX512) at = v_update_avx512(a, d, at, end);
    }
#elif defined(ZF_WITH_VECTORS) && defined(__aarch64__)
    if (a->rule == ZF_ADAMW) at = v_update_neon(a, d, at, end);
#endif
    if (a->moments == 1)
        for (; at + ZF_BLOCK <= end; at += ZF_BLOCK) zf_update_block(a, d, at, ZF_BLOCK, isa, 1);
    for (; at + ZF_BLOCK <= end; at += ZF_BLOCK) zf_update_block(a, d, at, ZF_BLOCK, isa, ZF_MOMENTS);
    if (at < end) zf_update_block(a, d, at, end - at, isa, ZF_MOMENTS);
}

/* New state that goes elsewhere passes through `room`, from where each buffer streams out in one piece: streaming
 * stores to three or four buffers in turn, a few lines each, took up to eight times as long on an AMD EPYC. */
ZF_INLINE void zf_update_body(const void *args, size_t begin, size_t end, int isa) {
    enum { BUFFERS = 2 + ZF_MOMENTS };
    const zf_update_args *a = (const zf_update_args *)args;
    const size_t most = a->stream_state ? ZF_ROOM : end - begin;
    size_t widths[BUFFERS] = {a->weights == ZF_MASTER ? 4 : a->weights ? 2 : 0, a->weights >= ZF_HALVES ? 2 : 0};
    char *to[BUFFERS] = {(char *)a->into.master, (char *)a->into.low};
    char room[BUFFERS][4 * ZF_ROOM] __attribute__((aligned(64)));
    zf_update_args part = *a;
    zf_dithers d;
    for (int j = 0; j < ZF_MOMENTS; j++) {
        widths[2 + j] = zf_width(a->kept[j]), to[2 + j] = (char *)a->into.moment[j];
        for (uint32_t i = 0; i < ZF_SHARED + ZF_BLOCK; i++) d.of[j][i] = a->dither[j] + i % ZF_SHARED * ZF_SPREAD;
    }
    for (size_t at = begin; at < end; at += most) {
        const size_t n = end - at < most ? end - at : most;
        if (a->stream_state) {
            part.into.master = widths[0] ? zf_shifted(room[0], widths[0] * at) : NULL;
            part.into.low = (int16_t *)zf_shifted(room[1], widths[1] * at);
            for (int j = 0; j < ZF_MOMENTS; j++) part.into.moment[j] = zf_shifted(room[2 + j], widths[2 + j] * at);
        }
        zf_update_elements(&part, &d, at, at + n, isa);
        for (int j = 0; j < BUFFERS; j++)
            if (a->stream_state && widths[j]) zf_store(to[j] + widths[j] * at, room[j], n * widths[j], 1);
    }
    zf_fence(a->stream || a->stream_state);
}

ZF_COPIES(update)

/* Whole blocks are whole lines then. */
static int zf_on_lines(const zf_state *s) {
    uintptr_t any = (uintptr_t)s->master | (uintptr_t)s->low;
    for (int j = 0; j < ZF_MOMENTS; j++) any |= (uintptr_t)s->moment[j];
    return any % 64 == 0;
}

static void zf_update(zf_update_args *a, size_t n, int threads, int isa) {
    a->moments = 1;
    for (int j = 1; j < ZF_MOMENTS; j++)
        if (a->kept[j] != ZF_KEPT_NONE) a->moments = j + 1;
    a->stream = a->out_type != ZF_NONE && n >= ZF_STREAM_MIN;
    a->stream_state = !zf_in_place(a) && n >= ZF_STREAM_MIN && zf_on_lines(&a->into);
    zf_run(zf_update_table[isa], a, n, ZF_BLOCK, threads);
}

/* The arguments as arrays, of what has a number each: `addresses` of grad, out, and the buffers of `state` and `into`,
 * each as zf_state has them; `how` is rule, types of grad and out, decay, how weights and moments are kept. */
static void zf_update_from(const uintptr_t *addresses, const int *how, const uint32_t *dither, const float *factors,
                           size_t n, int threads, int isa) {
    zf_update_args a;
    memset(&a, 0, sizeof a);
    memcpy(&a.state, addresses + 2, sizeof a.state);
    memcpy(&a.into, addresses + 2 + sizeof a.state / sizeof *addresses, sizeof a.into);
    a.grad = (const void *)addresses[0], a.out = (void *)addresses[1];
    a.rule = how[0], a.grad_type = how[1], a.out_type = how[2], a.decay_mode = how[3], a.weights = how[4];
    memcpy(a.kept, how + 5, sizeof a.kept);
    memcpy(a.dither, dither, sizeof a.dither);
    memcpy(&a.k, factors, sizeof a.k);
    zf_update(&a, n, threads, isa);
}

#endif
