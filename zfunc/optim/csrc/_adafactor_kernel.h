/* Adafactor on the host: three reads of a gradient, and one of its weights, before the sweep that updates them.
 *
 * The meaning is adafactor.py, and the rules about bits are those of _sweeps.h. A parameter is `rows` by
 * `columns`, once or several times in a row. Its sums are of doubles that were rounded so that sums of them are exact:
 * threads, vector units and ranks may add them in any order. */
#ifndef ZFUNC_ADAFACTOR_KERNEL_H
#define ZFUNC_ADAFACTOR_KERNEL_H

#include "_sums_kernel.h"

#define ZF_TILE 1024 /* columns whose sums are in L1 while rows go by */
#define ZF_ROWS 4    /* rows that go by together */

typedef struct {
    void *master; /* [n] fp32, or bf16: the high half of a split master */
    int16_t *low; /* [n] the low half, or NULL */
} zf_weights;

typedef struct {
    const void *grad;                             /* IN    [n] of grad_type */
    float *row_largest, *column_largest;          /* INOUT sizes of gradients: first sweep */
    const double *row_unit, *column_unit;         /* IN    what rounds a square, or a sum that is infinite or NaN */
    double *row_sum, *column_sum;                 /* INOUT second sweep */
    const float *left, *right;                    /* IN    factors of rows and of columns: third and fourth sweep */
    double *direction_squares, *weight_squares;   /* OUT   [ceil(n / 64)]: third sweep */
    zf_weights weights, into;                     /* `into`: OUT, the same buffers or others: fourth sweep */
    void *out;                                    /* OUT   [n] of out_type, or NULL */
    size_t rows, columns;                         /* of each matrix */
    int grad_type, out_type, decays;
    float grad_scale, grad_floor, limit, rate, decay; /* limit: of the product of left and right */
    int stream, stream_state;
} zf_factor_args;

/* ---- rows and columns ------------------------------------------------------------------------------- */

/* At most ZF_TILE gradients, as an update takes them. */
ZF_INLINE void zf_scaled(const zf_factor_args *a, float *restrict g, const void *grad, size_t at, size_t n, int isa) {
    const uint16_t *restrict h = (const uint16_t *)grad + at;
    const float scale = a->grad_scale;
    const int32_t floor = (int32_t)zf_bits(a->grad_floor);
    if (a->grad_type == ZF_BF16) {
        for (size_t i = 0; i < n; i++) g[i] = zf_flush(zf_from_bf16(h[i]), floor) * scale;
        return;
    }
    float wide[ZF_TILE] __attribute__((aligned(64)));
    const float *restrict all = zf_load(wide, grad, a->grad_type, at, n, isa);
    for (size_t i = 0; i < n; i++) g[i] = zf_flush(all[i], floor) * scale;
}

/* The largest sizes in a column and in each of some rows, which begin at `from`. As they are stored their order is that
 * of integers, and NaN is the largest. Buffers of other types are read through these types, so they may alias. */
typedef int16_t zf_size_16 __attribute__((may_alias));
typedef int32_t zf_size_32 __attribute__((may_alias));
#define ZF_LARGEST_OF(bits)                                                                                \
    ZF_INLINE void zf_largest_##bits(zf_size_##bits *restrict of, zf_size_##bits *restrict row,            \
                                     const zf_size_##bits *restrict grad, const size_t *from, size_t n) {  \
        zf_size_##bits most[ZF_ROWS] = {row[0], row[1], row[2], row[3]};                                   \
        const size_t start[ZF_ROWS] = {from[0], from[1], from[2], from[3]};                                \
        for (size_t i = 0; i < n; i++) {                                                                   \
            zf_size_##bits largest = of[i];                                                                \
            for (int r = 0; r < ZF_ROWS; r++) {                                                            \
                const zf_size_##bits size = (zf_size_##bits)(grad[start[r] + i] & INT##bits##_MAX);        \
                largest = size > largest ? size : largest;                                                 \
                most[r] = size > most[r] ? size : most[r];                                                 \
            }                                                                                              \
            of[i] = largest;                                                                               \
        }                                                                                                  \
        for (int r = 0; r < ZF_ROWS; r++) row[r] = most[r];                                                \
    }
ZF_LARGEST_OF(16)
ZF_LARGEST_OF(32)

/* Sizes that are stored like gradients are scaled only now: that keeps their order. */
ZF_INLINE void zf_sizes(const zf_factor_args *a, int32_t *restrict size, const void *stored, size_t n, int isa) {
    float g[ZF_TILE] __attribute__((aligned(64)));
    zf_scaled(a, g, stored, 0, n, isa);
    for (size_t i = 0; i < n; i++) size[i] = (int32_t)(zf_bits(g[i]) & 0x7fffffff);
}

ZF_INLINE void zf_keep_larger(float *largest, const int32_t *restrict size, size_t n) {
    int32_t *restrict of = (int32_t *)largest;
    for (size_t i = 0; i < n; i++) of[i] = size[i] > of[i] ? size[i] : of[i];
}

/* Added to its unit, a power of two above the sum of all, a square loses the bits below. What is left is a multiple of
 * the unit's last bit, so bits of such doubles are added as integers. */
ZF_INLINE uint64_t zf_rounded(double square, double unit) {
    const double sum = square + unit;
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return bits;
}

/* From the sum of `count` such bits. */
ZF_INLINE double zf_exact(uint64_t sum, double unit, uint64_t count) {
    double x;
    sum -= (count - 1) * zf_rounded(0, unit);
    memcpy(&x, &sum, sizeof x);
    return unit - unit == 0 ? x - unit : unit;
}

/* Rows that are not there are zeros. */
ZF_INLINE void zf_sum_block(uint64_t *restrict of, uint64_t *restrict row, const double *restrict unit,
                            const double *restrict row_unit, const float (*restrict g)[ZF_BLOCK], size_t n) {
    uint64_t sums[ZF_ROWS] = {0};
    double units[ZF_ROWS];
    memcpy(units, row_unit, sizeof units);
    for (size_t i = 0; i < n; i++) {
        uint64_t sum = of[i];
        for (int r = 0; r < ZF_ROWS; r++) {
            const double square = (double)g[r][i] * (double)g[r][i];
            sum += zf_rounded(square, unit[i]);
            sums[r] += zf_rounded(square, units[r]);
        }
        of[i] = sum;
    }
    for (int r = 0; r < ZF_ROWS; r++) row[r] += sums[r];
}

/* The next rows' lines, some at a time: in a burst they would queue. */
ZF_INLINE void zf_prefetch_rows(const zf_factor_args *a, size_t at, size_t rows, size_t n) {
    const size_t width = a->grad_type == ZF_FP32 ? 4 : 2;
    for (size_t end = at + rows * a->columns; at < end; at += a->columns)
        zf_prefetch_lines((const char *)a->grad + at * width, n, width, ZF_ROWS * a->columns);
}

/* `few` rows of a tile, from element `at` on. */
ZF_INLINE void zf_largest_rows(const zf_factor_args *a, void *of, size_t at, size_t row, size_t few, size_t n,
                               int isa) {
    size_t from[ZF_ROWS];
    zf_size_32 most[ZF_ROWS];
    int32_t size[ZF_ROWS];
    memset(most, 0, sizeof most);
    for (size_t r = 0; r < ZF_ROWS; r++) from[r] = at + (r < few ? r : 0) * a->columns;
    for (size_t i = 0; i < n; i += ZF_BLOCK) {
        const size_t part = n - i < ZF_BLOCK ? n - i : ZF_BLOCK;
        zf_prefetch_rows(a, at + i, few, part);
        if (a->grad_type == ZF_FP32)
            zf_largest_32((zf_size_32 *)of + i, most, (const zf_size_32 *)a->grad + i, from, part);
        else
            zf_largest_16((zf_size_16 *)of + i, (zf_size_16 *)most, (const zf_size_16 *)a->grad + i, from, part);
    }
    zf_sizes(a, size, most, few, isa);
    zf_keep_larger(a->row_largest + row, size, few);
}

ZF_INLINE void zf_sum_rows(const zf_factor_args *a, uint64_t *of, const double *unit, size_t at, size_t row, size_t few,
                           size_t n, int isa) {
    float g[ZF_ROWS][ZF_BLOCK] __attribute__((aligned(64)));
    double row_unit[ZF_ROWS] = {0};
    uint64_t sums[ZF_ROWS] = {0};
    memcpy(row_unit, a->row_unit + row, few * sizeof *row_unit);
    if (few < ZF_ROWS) memset(g, 0, sizeof g);
    for (size_t i = 0; i < n; i += ZF_BLOCK) {
        const size_t part = n - i < ZF_BLOCK ? n - i : ZF_BLOCK;
        zf_prefetch_rows(a, at + i, few, part);
        if (part == ZF_BLOCK) {
            for (size_t r = 0; r < few; r++) zf_scaled(a, g[r], a->grad, at + i + r * a->columns, ZF_BLOCK, isa);
            zf_sum_block(of + i, sums, unit + i, row_unit, g, ZF_BLOCK);
        } else {
            for (size_t r = 0; r < few; r++) zf_scaled(a, g[r], a->grad, at + i + r * a->columns, part, isa);
            zf_sum_block(of + i, sums, unit + i, row_unit, g, part);
        }
    }
    for (size_t r = 0; r < few; r++) a->row_sum[row + r] += zf_exact(sums[r], row_unit[r], n);
}

ZF_INLINE void zf_keep_columns(const zf_factor_args *a, size_t to, const double *sum, const int32_t *size, size_t n,
                               int sums) {
    if (!sums) zf_keep_larger(a->column_largest + to, size, n);
    else
        for (size_t i = 0; i < n; i++) a->column_sum[to + i] += sum[i];
}

/* Whole rows from element `begin` to `end`. Columns of a matrix that another thread has rows of too are joined. */
ZF_INLINE void zf_factor_rows(const zf_factor_args *a, size_t begin, size_t end, int isa, int sums) {
    uint64_t of[ZF_TILE] __attribute__((aligned(64)));
    double sum[ZF_TILE] __attribute__((aligned(64)));
    int32_t size[ZF_TILE] __attribute__((aligned(64)));
    const size_t last = end / a->columns, width = a->grad_type == ZF_FP32 ? 4 : 2;
    for (size_t row = begin / a->columns, stop; row < last; row = stop) {
        const size_t matrix = row / a->rows;
        stop = (matrix + 1) * a->rows < last ? (matrix + 1) * a->rows : last;
        for (size_t c = 0; c < a->columns; c += ZF_TILE) {
            const size_t n = a->columns - c < ZF_TILE ? a->columns - c : ZF_TILE, to = matrix * a->columns + c;
            size_t taken = 0;
            memset(of, 0, n * (sums ? sizeof *of : width));
            for (size_t r = row; r < stop; r += ZF_ROWS, taken += ZF_ROWS) {
                const size_t at = r * a->columns + c, few = stop - r < ZF_ROWS ? stop - r : ZF_ROWS;
                if (sums) zf_sum_rows(a, of, a->column_unit + to, at, r, few, n, isa);
                else zf_largest_rows(a, of, at, r, few, n, isa);
            }
            if (!sums) zf_sizes(a, size, of, n, isa);
            else
                for (size_t i = 0; i < n; i++) sum[i] = zf_exact(of[i], a->column_unit[to + i], taken);
            if (stop - row == a->rows) zf_keep_columns(a, to, sum, size, n, sums);
            else {
#ifdef _OPENMP
#pragma omp critical(zf_factor)
#endif
                zf_keep_columns(a, to, sum, size, n, sums);
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
    const size_t width = a->grad_type == ZF_FP32 ? 4 : 2;
    size_t row = at / a->columns, column = at % a->columns;
    const float *right = a->right + row / a->rows * a->columns;
    zf_prefetch_lines((const char *)a->grad + at * width, n, width, ZF_AHEAD);
    zf_scaled(a, u, a->grad, at, n, isa);
    if (n <= a->columns - column) {
        zf_direct(u, right + column, a->left[row], a->limit, n);
        return;
    }
    for (size_t i = 0, few; i < n; i += few, row++, column = 0) {
        few = n - i < a->columns - column ? n - i : a->columns - column;
        right = a->right + row / a->rows * a->columns;
        zf_direct(u + i, right + column, a->left[row], a->limit, few);
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

ZF_INLINE void zf_factor_squares_blocks(const zf_factor_args *a, size_t at, size_t n, int isa) {
    const size_t unit = 64 * ZF_TOGETHER, blocks = (n + 63) / 64;
    float x[64 * ZF_TOGETHER] __attribute__((aligned(64)));
    double sum[ZF_TOGETHER];
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

ZF_INLINE void zf_factor_squares_body(const void *args, size_t begin, size_t end, int isa) {
    const zf_factor_args *a = (const zf_factor_args *)args;
    const size_t unit = 64 * ZF_TOGETHER;
    size_t at = begin;
    for (; at + unit <= end; at += unit) zf_factor_squares_blocks(a, at, unit, isa);
    if (at < end) zf_factor_squares_blocks(a, at, end - at, isa);
}

ZF_INLINE void zf_factored_block(const zf_factor_args *a, size_t at, size_t n, int isa) {
    float u[ZF_BLOCK] __attribute__((aligned(64))), p[ZF_BLOCK] __attribute__((aligned(64)));
    uint16_t high[ZF_BLOCK] __attribute__((aligned(64)));
    int16_t low[ZF_BLOCK] __attribute__((aligned(64)));
    const float rate = a->rate, decay = a->decay;
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

ZF_INLINE void zf_factored_body(const void *args, size_t begin, size_t end, int isa) {
    const zf_factor_args *a = (const zf_factor_args *)args;
    size_t at = begin;
    for (; at + ZF_BLOCK <= end; at += ZF_BLOCK) zf_factored_block(a, at, ZF_BLOCK, isa);
    if (at < end) zf_factored_block(a, at, end - at, isa);
    zf_fence(a->stream || a->stream_state);
}

ZF_COPIES(largest)
ZF_COPIES(factor_sum)
ZF_COPIES(factor_squares)
ZF_COPIES(factored)

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

/* A sweep by its number, its arguments as arrays in the order of zf_factor_args. */
static void zf_factor_from(int sweep, const uintptr_t *addresses, const size_t *sizes, const int *how,
                           const float *factors, size_t n, int threads, int isa) {
    void (*const sweeps[])(zf_factor_args *, size_t, int, int) = {zf_largest, zf_factor_sums, zf_factor_squares, zf_factored};
    zf_factor_args a;
    memset(&a, 0, sizeof a);
    memcpy(&a, addresses, offsetof(zf_factor_args, rows));
    a.rows = sizes[0], a.columns = sizes[1];
    a.grad_type = how[0], a.out_type = how[1], a.decays = how[2];
    memcpy(&a.grad_scale, factors, 5 * sizeof(float));
    sweeps[sweep](&a, n, threads, isa);
}

#endif
