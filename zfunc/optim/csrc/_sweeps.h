/* What every sweep over memory has: constants, loads and stores, the copies for instruction sets, and threads.
 *
 * Free of torch and of Python. The meaning of what is computed is Python's (optim/rules.py, formats.py, adafactor.py):
 * the same operations in the same order, each rounded once to float, so they agree to the bit. Compile with
 * -ffp-contract=off (an FMA rounds once where the reference rounds twice) and -fno-math-errno (else sqrtf is a call),
 * and never with -ffast-math.
 *
 * Every loop is plain C in always_inline bodies, compiled once per instruction set; elements never meet (or, in the
 * sums, meet without rounding), so the instruction set and the thread count cannot change a bit. The payload of a NaN
 * is not promised. */
#ifndef ZFUNC_SWEEPS_H
#define ZFUNC_SWEEPS_H

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
#define ZF_PIECE 65536     /* elements that a thread takes at a time */
#define ZF_FORK_MIN 32768  /* below this many elements a second thread costs more than it saves */
#define ZF_ROOM 2048      /* elements of new state that stream out at a time */
#define ZF_STREAM_MIN 262144 /* from this many elements on, the copy bypasses the caches */

enum { ZF_NONE = 0, ZF_FP32 = 1, ZF_BF16 = 2, ZF_FP16 = 3 };          /* element types */
enum { ZF_NO_DECAY = 0, ZF_DECOUPLED = 1, ZF_L2 = 2 };                /* weight decay */

/* ---- loads and stores ------------------------------------------------------------------------------- */

/* Divisions and square roots fill the reorder window and loads would wait behind them, so lines are
 * fetched ahead, one by one: in a burst they queue. Past the end is harmless, a prefetch cannot fault. */
ZF_INLINE void zf_prefetch(const void *at, size_t bytes_ahead) {
    __builtin_prefetch((const void *)((uintptr_t)at + bytes_ahead), 0, 3);
}

/* As many lines as `n` elements of `width` bytes have, `ahead` elements further on. */
ZF_INLINE void zf_prefetch_lines(const void *at, size_t n, size_t width, size_t ahead) {
    for (size_t line = 0; line < n * width; line += 64) zf_prefetch((const char *)at + line, ahead * width);
}

/* The same for elements of 1, 2 or 4 bytes: where `n` is a constant, so is the number of lines, and there is no loop;
 * loops took 2 to 6 % of an update in the caches. */
ZF_INLINE void zf_prefetch_elements(const void *from, size_t at, size_t n, size_t width) {
    const void *start = (const void *)((uintptr_t)from + at * width); /* from may be NULL: C has no offsets of that */
    if (width == 4) zf_prefetch_lines(start, n, 4, ZF_AHEAD);
    else if (width == 2) zf_prefetch_lines(start, n, 2, ZF_AHEAD);
    else if (width == 1) zf_prefetch_lines(start, n, 1, ZF_AHEAD);
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

/* ---- the copies per instruction set --------------------------------------------------------------- */

typedef void (*zf_range)(const void *args, size_t begin, size_t end);

#define ZF_COPY(kind, name, isa, target)                                                                  \
    target static void zf_##kind##_##name(const void *args, size_t begin, size_t end) {                  \
        zf_##kind##_body(args, begin, end, isa);                                                         \
    }
#if defined(__x86_64__)
#if defined(__clang__)
#define ZF_TARGET_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,f16c"
#else
#define ZF_TARGET_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512"
#endif
#endif
#if defined(__x86_64__)
#define ZF_COPIES(kind)                                                            \
    ZF_COPY(kind, baseline, ZF_BASELINE, )                                         \
    ZF_COPY(kind, avx2, ZF_AVX2, __attribute__((target("avx2,f16c"))))             \
    ZF_COPY(kind, avx512, ZF_AVX512, __attribute__((target(ZF_TARGET_AVX512))))    \
    static const zf_range zf_##kind##_table[ZF_NUM_ISA] = {zf_##kind##_baseline, zf_##kind##_avx2, zf_##kind##_avx512};
#else
#define ZF_COPIES(kind)                    \
    ZF_COPY(kind, baseline, ZF_BASELINE, ) \
    static const zf_range zf_##kind##_table[ZF_NUM_ISA] = {zf_##kind##_baseline, zf_##kind##_baseline, zf_##kind##_baseline};
#endif

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
#endif
