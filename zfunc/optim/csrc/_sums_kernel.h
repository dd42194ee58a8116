/* Sums of squares without rounding, accumulation, and the loop that only moves bytes: the yardstick of benchmarks. */
#ifndef ZFUNC_SUMS_KERNEL_H
#define ZFUNC_SUMS_KERNEL_H

#include "_sweeps.h"

#define ZF_TOGETHER 4      /* blocks of 64 whose squares are summed at a time; no slice cuts through one */
#define ZF_PARTS 21        /* of an exact sum, each of 32 bits, from 2^-352 on */
#define ZF_CHUNK 65536     /* elements whose sums, 1,024 mantissas of 53 bits, are added in 64 */
#define ZF_LEAST_EXPONENT 723 /* of a double whose last bit is 2^-352; that of the least square, 2^-298, is 725 */
#define ZF_EXPONENTS 608   /* from that one on; the largest sum, below 2^263, has 1285 */

enum { ZF_HAS_INF = 1, ZF_HAS_NAN = 2 }; /* what no exact sum has */

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

ZF_COPIES(sum)
ZF_COPIES(skeleton)

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
