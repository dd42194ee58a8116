/* Fletcher's checksum of blocks of a disk, of 64-bit words modulo 2^64; free of torch and of Python.
 *
 * Of the words w[0] to w[511] of a block: the sum of w[i], and the sum of (512 - i) w[i]. So words that change places
 * are found, and flipped bits that cancel each other in a plain sum. No rounding: the order of additions, and so the
 * instruction set, changes no bit.
 *
 * Some blocks go side by side: one stream of loads alone leaves the memory waiting. */
#ifndef ZFUNC_BLOCK_SUMS_H
#define ZFUNC_BLOCK_SUMS_H

#include "_sweeps.h"

#define ZF_DISK_BLOCK 4096 /* bytes */
#define ZF_SIDE_BY_SIDE 4  /* blocks */

/* `count` blocks in lanes of `width` words: every lane has a sum, and the sum of its sums, in which a word counts once
 * for every row from its own to the last. */
#define ZF_FLETCHER(width)                                                                               \
    typedef uint64_t zf_words_##width __attribute__((vector_size(8 * width), aligned(1), may_alias));    \
    ZF_INLINE void zf_fletcher_##width(const char *data, uint64_t *sums, const size_t count) {           \
        zf_words_##width sum[ZF_SIDE_BY_SIDE], sums_of[ZF_SIDE_BY_SIDE];                                 \
        for (size_t k = 0; k < count; k++) sum[k] = sums_of[k] = (zf_words_##width){0};                  \
        for (size_t at = 0; at < ZF_DISK_BLOCK; at += 8 * width)                                         \
            for (size_t k = 0; k < count; k++) {                                                         \
                sum[k] += *(const zf_words_##width *)(data + k * ZF_DISK_BLOCK + at);                    \
                sums_of[k] += sum[k];                                                                    \
            }                                                                                            \
        for (size_t k = 0; k < count; k++) {                                                             \
            uint64_t plain = 0, weighted = 0;                                                            \
            for (uint64_t lane = 0; lane < width; lane++) {                                              \
                plain += sum[k][lane];                                                                   \
                weighted += width * sums_of[k][lane] - lane * sum[k][lane];                              \
            }                                                                                            \
            sums[2 * k] = plain, sums[2 * k + 1] = weighted;                                             \
        }                                                                                                \
    }                                                                                                    \
    ZF_INLINE void zf_fletcher_all_##width(const char *data, size_t blocks, uint64_t *sums) {            \
        size_t b = 0;                                                                                    \
        for (; b + ZF_SIDE_BY_SIDE <= blocks; b += ZF_SIDE_BY_SIDE)                                      \
            zf_fletcher_##width(data + b * ZF_DISK_BLOCK, sums + 2 * b, ZF_SIDE_BY_SIDE);                \
        for (; b < blocks; b++) zf_fletcher_##width(data + b * ZF_DISK_BLOCK, sums + 2 * b, 1);          \
    }

ZF_FLETCHER(2)
static void zf_block_sums_baseline(const char *data, size_t blocks, uint64_t *sums) {
    zf_fletcher_all_2(data, blocks, sums);
}
#if defined(__x86_64__)
ZF_FLETCHER(4)
__attribute__((target("avx2"))) static void zf_block_sums_avx2(const char *data, size_t blocks, uint64_t *sums) {
    zf_fletcher_all_4(data, blocks, sums);
}
#endif

/* IN data [blocks] of 4,096 bytes, OUT sums [blocks][2]. With AVX-512 as with AVX2: memory is the limit. */
static void zf_block_sums(const char *data, size_t blocks, uint64_t *sums, int isa) {
#if defined(__x86_64__)
    if (isa != ZF_BASELINE) {
        zf_block_sums_avx2(data, blocks, sums);
        return;
    }
#endif
    (void)isa;
    zf_block_sums_baseline(data, blocks, sums);
}

#endif
