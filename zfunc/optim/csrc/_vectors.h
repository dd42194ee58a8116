/* Vectors of one instruction set under names that all share; included once by each _vectors_*.h.
 *
 * Such a file names its set, the floats a vector holds, and the target of its functions, and defines the operations
 * that operators of C do not express. Loops written with these names are compiled once for each set: in C every name
 * is the set's own, by ZF_OF_SET. */
#ifndef ZFUNC_VECTORS_H
#define ZFUNC_VECTORS_H

#define ZF_JOIN_(a, b) a##_##b
#define ZF_JOIN(a, b) ZF_JOIN_(a, b)
#define ZF_OF_SET(name) ZF_JOIN(name, ZF_SET)
#define ZF_V_INLINE ZF_V static inline ZF_INLINED

/* Lanes of float, of uint32_t and int32_t, and twice as many of uint16_t and int16_t; a number of bits to shift by. */
#define vf ZF_OF_SET(vf)
#define vu ZF_OF_SET(vu)
#define vi ZF_OF_SET(vi)
#define vh ZF_OF_SET(vh)
#define vs ZF_OF_SET(vs)
#define v_bits ZF_OF_SET(v_bits)

/* Operations of every set, below. */
#define v_load ZF_OF_SET(v_load)
#define v_set ZF_OF_SET(v_set)
#define v_setf ZF_OF_SET(v_setf)

/* Operations that each set defines by its own instructions. `size` has all bits but the signs'. */
#define v_sqrt ZF_OF_SET(v_sqrt)
#define v_min_u32 ZF_OF_SET(v_min_u32)
#define v_max_u32 ZF_OF_SET(v_max_u32)
#define v_flush ZF_OF_SET(v_flush)                   /* 0 where |x| is below the floor, as zf_flush */
#define v_flush_16 ZF_OF_SET(v_flush_16)             /* the same of bfloat16 */
#define v_unless_equal ZF_OF_SET(v_unless_equal)     /* x, but 0 where a and b are the same */
#define v_ordered ZF_OF_SET(v_ordered)               /* whether no lane of both is NaN */
#define v_any_byte ZF_OF_SET(v_any_byte)             /* whether a byte of ZF_SHARED in memory is this one */
#define v_halves ZF_OF_SET(v_halves)                 /* lower halves of the lanes of one, upper halves of the other */
#define v_zip ZF_OF_SET(v_zip)                       /* lower and upper halves, in order, to two vectors */
#define v_lower ZF_OF_SET(v_lower)                   /* and back: the lower halves of two vectors */
#define v_upper ZF_OF_SET(v_upper)                   /* the upper ones */
#define v_even_odd ZF_OF_SET(v_even_odd)             /* two vectors in order to their even and their odd elements */
#define v_in_order ZF_OF_SET(v_in_order)             /* and back */
#define v_from_fp16 ZF_OF_SET(v_from_fp16)           /* from memory to a vector of floats */
#define v_store ZF_OF_SET(v_store)                   /* anywhere */
#define v_stream ZF_OF_SET(v_stream)                 /* past the caches, to whole vectors of memory */
#define v_set_16 ZF_OF_SET(v_set_16)
#define v_number ZF_OF_SET(v_number)                 /* of bits, for the next two */
#define v_shift_left_16 ZF_OF_SET(v_shift_left_16)
#define v_shift_right_16 ZF_OF_SET(v_shift_right_16) /* with the sign */
#define v_max_16 ZF_OF_SET(v_max_16)                 /* signed */
#define v_from_bytes ZF_OF_SET(v_from_bytes)         /* from memory, in order, to 16-bit lanes */
#define v_to_bytes ZF_OF_SET(v_to_bytes)             /* and back, from two vectors; lanes are below 256 */
#define v_sign_to_byte ZF_OF_SET(v_sign_to_byte)     /* bit 12 of 16 to bit 7, where bits 7 to 11 are 0 */
#define v_decode ZF_OF_SET(v_decode)                 /* exp_avg's codes in memory, even and odd ones, as numbers */
#define v_clip ZF_OF_SET(v_clip)                     /* to -limit..limit; no lane is NaN */
#define v_range ZF_OF_SET(v_range)                   /* the largest lane of one and the smallest of the other */
#define ZF_DECODED ZF_OF_SET(ZF_DECODED)             /* such a number is 2^ZF_DECODED times too small */

#endif

typedef float vf __attribute__((vector_size(4 * ZF_LANES), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * ZF_LANES), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * ZF_LANES), may_alias));
typedef uint16_t vh __attribute__((vector_size(4 * ZF_LANES), may_alias));
typedef int16_t vs __attribute__((vector_size(4 * ZF_LANES), may_alias));

ZF_V_INLINE vu v_load(const void *from) {
    vu x;
    memcpy(&x, from, sizeof x);
    return x;
}

ZF_V_INLINE vu v_set(uint32_t x) { return x - (vu){0}; }
ZF_V_INLINE vf v_setf(float x) { return (vf)v_set(zf_bits(x)); }
