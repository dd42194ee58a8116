/* Adafactor on the host: three reads of a gradient, and one of its weights, before the sweep that updates them.
 *
 * The meaning is adafactor_reference.py, and the rules about bits are those of _adam_kernel.h. A parameter is `rows` by
 * `columns`, once or several times in a row. Its sums are of doubles that were rounded so that sums of them are exact:
 * threads, vector units and ranks may add them in any order. */
#ifndef ZFUNC_ADAFACTOR_KERNEL_H
#define ZFUNC_ADAFACTOR_KERNEL_H

#include "_adam_kernel.h"

#define ZF_TILE 512 /* columns whose sums are in L1 while rows go by */

typedef struct {
    void *master; /* [n] fp32, or bf16: the high half of a split master */
    int16_t *low; /* [n] the low half, or NULL */
} zf_weights;

typedef struct {
    const void *grad;                             /* IN    [n] of grad_type */
    int grad_type;
    size_t rows, columns;                         /* of each matrix */
    size_t first;                                 /* number of element 0 in its parameter: third and fourth sweep */
    float grad_scale, grad_floor;
    float *row_largest, *column_largest;          /* OUT   sizes of gradients, 0 before: first sweep */
    const double *row_unit, *column_unit;         /* IN    what rounds a square: second sweep */
    double *row_sum, *column_sum;                 /* OUT   0 before */
    const float *left, *right;                    /* IN    factors of rows and of columns: third and fourth sweep */
    float limit;                                  /* IN    of their product */
    double *direction_squares, *weight_squares;   /* OUT   [ceil(n / 64)]: third sweep */
    zf_weights weights, into;                     /* `into`: OUT, the same buffers or others: fourth sweep */
    void *out;                                    /* OUT   [n] of out_type, or NULL */
    int out_type, decays;
    float rate, decay;
    int stream, stream_state;
} zf_factor_args;

/* ---- rows and columns ------------------------------------------------------------------------------- */

/* At most ZF_TILE gradients, as an update takes them; those `ahead` elements further on are fetched. */
ZF_INLINE void zf_scaled(const zf_factor_args *a, float *restrict g, size_t at, size_t n, size_t ahead, int isa) {
    const size_t width = a->grad_type == ZF_FP32 ? 4 : 2;
    const uint16_t *restrict h = (const uint16_t *)a->grad + at;
    const float scale = a->grad_scale;
    const int32_t floor = (int32_t)zf_bits(a->grad_floor);
    zf_prefetch_lines((const char *)a->grad + at * width, n, width, ahead);
    if (a->grad_type == ZF_BF16) {
        for (size_t i = 0; i < n; i++) g[i] = zf_flush(zf_from_bf16(h[i]), floor) * scale;
        return;
    }
    float wide[ZF_TILE] __attribute__((aligned(64)));
    const float *restrict grad = zf_load(wide, a->grad, a->grad_type, at, n, isa);
    for (size_t i = 0; i < n; i++) g[i] = zf_flush(grad[i], floor) * scale;
}

/* Sizes as integers, in their order; NaN is the largest. */
ZF_INLINE void zf_largest_tile(int32_t *restrict of, int32_t *restrict row, const float *restrict g, size_t n) {
    int32_t most = *row;
    for (size_t i = 0; i < n; i++) {
        const int32_t size = (int32_t)(zf_bits(g[i]) & 0x7fffffff);
        of[i] = size > of[i] ? size : of[i];
        most = size > most ? size : most;
    }
    *row = most;
}

/* Added to its unit a square loses the bits below; the sums of what is left are exact. */
ZF_INLINE void zf_sum_tile(double *restrict sum, double *restrict row, const double *restrict unit, double row_unit,
                           const float *restrict g, size_t n) {
    double lane[16] = {0};
    size_t i;
    for (i = 0; i + 16 <= n; i += 16)
        for (size_t j = 0; j < 16; j++) {
            const double square = (double)g[i + j] * (double)g[i + j];
            sum[i + j] += (square + unit[i + j]) - unit[i + j];
            lane[j] += (square + row_unit) - row_unit;
        }
    for (; i < n; i++) {
        const double square = (double)g[i] * (double)g[i];
        sum[i] += (square + unit[i]) - unit[i];
        lane[0] += (square + row_unit) - row_unit;
    }
    for (size_t j = 1; j < 16; j++) lane[0] += lane[j];
    *row += lane[0];
}

/* Whole rows from element `begin` to `end`. Columns of a matrix that another thread has rows of too are joined. */
ZF_INLINE void zf_factor_rows(const zf_factor_args *a, size_t begin, size_t end, int isa, int sums) {
    float g[ZF_TILE] __attribute__((aligned(64)));
    double sum[ZF_TILE] __attribute__((aligned(64)));
    int32_t most[ZF_TILE] __attribute__((aligned(64)));
    const size_t last = end / a->columns;
    for (size_t row = begin / a->columns, stop; row < last; row = stop) {
        const size_t matrix = row / a->rows;
        stop = (matrix + 1) * a->rows < last ? (matrix + 1) * a->rows : last;
        const int shared = stop - row < a->rows;
        for (size_t c = 0; c < a->columns; c += ZF_TILE) {
            const size_t n = a->columns - c < ZF_TILE ? a->columns - c : ZF_TILE, to = matrix * a->columns + c;
            memset(sum, 0, n * sizeof *sum);
            memset(most, 0, n * sizeof *most);
            for (size_t r = row; r < stop; r++) {
                zf_scaled(a, g, r * a->columns + c, n, a->columns, isa);
                if (sums) zf_sum_tile(sum, a->row_sum + r, a->column_unit + to, a->row_unit[r], g, n);
                else zf_largest_tile(most, (int32_t *)a->row_largest + r, g, n);
            }
            if (sums && !shared) memcpy(a->column_sum + to, sum, n * sizeof *sum);
            else if (!shared) memcpy(a->column_largest + to, most, n * sizeof *most);
            else {
#ifdef _OPENMP
#pragma omp critical(zf_factor)
#endif
                {
                    int32_t *largest = (int32_t *)a->column_largest + to;
                    if (sums)
                        for (size_t i = 0; i < n; i++) a->column_sum[to + i] += sum[i];
                    else
                        for (size_t i = 0; i < n; i++) largest[i] = most[i] > largest[i] ? most[i] : largest[i];
                }
            }
        }
    }
}

ZF_INLINE void zf_largest_body(const void *args, size_t begin, size_t end, int isa) {
    zf_factor_rows((const zf_factor_args *)args, begin, end, isa, 0);
}

ZF_INLINE void zf_factor_sum_body(const void *args, size_t begin, size_t end, int isa) {
    zf_factor_rows((const zf_factor_args *)args, begin, end, isa, 1);
}

/* ---- the direction of an update ---------------------------------------------------------------------- */

ZF_INLINE void zf_direct(float *restrict u, const float *restrict right, float left, float limit, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float factor = left * right[i];
        u[i] = u[i] * (factor > limit ? limit : factor);
    }
}

/* Elements `at` to `at` + n, over the ends of rows. */
ZF_INLINE void zf_direction(const zf_factor_args *a, float *restrict u, size_t at, size_t n, int isa) {
    size_t row = (a->first + at) / a->columns, column = (a->first + at) % a->columns;
    zf_scaled(a, u, at, n, ZF_AHEAD, isa);
    for (size_t i = 0; i < n; row++, column = 0) {
        const size_t few = n - i < a->columns - column ? n - i : a->columns - column;
        zf_direct(u + i, a->right + row / a->rows * a->columns + column, a->left[row], a->limit, few);
        i += few;
    }
}

/* Weights as fp32: where they lie, or joined in the scratch. */
ZF_INLINE const float *zf_weights_at(const zf_weights *w, float *restrict p, size_t at, size_t n) {
    const size_t width = w->low ? 2 : 4;
    zf_prefetch_lines((const char *)w->master + at * width, n, width, ZF_AHEAD);
    if (!w->low) return (const float *)w->master + at;
    zf_prefetch_lines(w->low + at, n, 2, ZF_AHEAD);
    zf_join(p, (const uint16_t *)w->master + at, w->low + at, n);
    return p;
}

ZF_INLINE void zf_factor_squares_body(const void *args, size_t begin, size_t end, int isa) {
    const zf_factor_args *a = (const zf_factor_args *)args;
    const size_t unit = 64 * ZF_TOGETHER;
    float x[64 * ZF_TOGETHER] __attribute__((aligned(64)));
    double sum[ZF_TOGETHER];
    for (size_t at = begin; at < end; at += unit) {
        const size_t n = end - at < unit ? end - at : unit, blocks = (n + 63) / 64;
        zf_direction(a, x, at, n, isa);
        memset(x + n, 0, (unit - n) * sizeof(float));
        zf_squares(sum, x);
        memcpy(a->direction_squares + at / 64, sum, blocks * sizeof(double));
        const float *p = zf_weights_at(&a->weights, x, at, n);
        if (n < unit) {
            if (p != x) memcpy(x, p, n * sizeof(float));
            memset(x + n, 0, (unit - n) * sizeof(float));
            p = x;
        }
        zf_squares(sum, p);
        memcpy(a->weight_squares + at / 64, sum, blocks * sizeof(double));
    }
}

ZF_INLINE void zf_factored_body(const void *args, size_t begin, size_t end, int isa) {
    const zf_factor_args *a = (const zf_factor_args *)args;
    float u[ZF_BLOCK] __attribute__((aligned(64))), p[ZF_BLOCK] __attribute__((aligned(64)));
    uint16_t high[ZF_BLOCK] __attribute__((aligned(64)));
    int16_t low[ZF_BLOCK] __attribute__((aligned(64)));
    const float rate = a->rate, decay = a->decay;
    for (size_t at = begin; at < end; at += ZF_BLOCK) {
        const size_t n = end - at < ZF_BLOCK ? end - at : ZF_BLOCK;
        zf_direction(a, u, at, n, isa);
        const float *old = zf_weights_at(&a->weights, p, at, n);
        if (a->decays)
            for (size_t i = 0; i < n; i++) p[i] = old[i] - (rate * u[i] + decay * old[i]);
        else
            for (size_t i = 0; i < n; i++) p[i] = old[i] - rate * u[i];
        if (a->into.low) {
            zf_split(high, low, p, n);
            zf_store((uint16_t *)a->into.master + at, high, n * sizeof *high, a->stream_state);
            zf_store(a->into.low + at, low, n * sizeof *low, a->stream_state);
        } else {
            zf_store((float *)a->into.master + at, p, n * sizeof(float), a->stream_state);
        }
        if (a->out_type != ZF_NONE) zf_round(a->out, a->out_type, p, at, n, a->stream, isa);
    }
    zf_fence(a->stream || a->stream_state);
}

#define ZF_FACTOR_COPIES(name, isa, target)    \
    ZF_COPY(largest, name, isa, target)        \
    ZF_COPY(factor_sum, name, isa, target)     \
    ZF_COPY(factor_squares, name, isa, target) \
    ZF_COPY(factored, name, isa, target)

ZF_FACTOR_COPIES(baseline, ZF_BASELINE, )
#if defined(__x86_64__)
ZF_FACTOR_COPIES(avx2, ZF_AVX2, __attribute__((target("avx2,f16c"))))
ZF_FACTOR_COPIES(avx512, ZF_AVX512, __attribute__((target(ZF_TARGET_AVX512))))
#endif
static const zf_range zf_largest_table[ZF_NUM_ISA] = ZF_TABLE(largest);
static const zf_range zf_factor_sum_table[ZF_NUM_ISA] = ZF_TABLE(factor_sum);
static const zf_range zf_factor_squares_table[ZF_NUM_ISA] = ZF_TABLE(factor_squares);
static const zf_range zf_factored_table[ZF_NUM_ISA] = ZF_TABLE(factored);

static void zf_largest(zf_factor_args *a, size_t n, int threads, int isa) {
    zf_run(zf_largest_table[isa], a, n, a->columns, threads);
}

static void zf_factor_sums(zf_factor_args *a, size_t n, int threads, int isa) {
    zf_run(zf_factor_sum_table[isa], a, n, a->columns, threads);
}

static void zf_factor_squares(zf_factor_args *a, size_t n, int threads, int isa) {
    zf_run(zf_factor_squares_table[isa], a, n, 64 * ZF_TOGETHER, threads);
}

static void zf_factored(zf_factor_args *a, size_t n, int threads, int isa) {
    const int in_place = a->into.master == a->weights.master;
    a->stream = a->out_type != ZF_NONE && n >= ZF_STREAM_MIN;
    a->stream_state = !in_place && n >= ZF_STREAM_MIN && ((uintptr_t)a->into.master | (uintptr_t)a->into.low) % 64 == 0;
    zf_run(zf_factored_table[isa], a, n, ZF_BLOCK, threads);
}

#endif
