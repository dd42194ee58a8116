/* AVX2 with F16C: 8 floats a vector. Its shuffles stay inside 16 bytes: what they bring together is put in order by
 * v_ordered_halves before or after. */
#undef ZF_SET
#undef ZF_LANES
#undef ZF_V
#undef ZF_ISA
#define ZF_SET avx2
#define ZF_LANES 8
#define ZF_V __attribute__((target("avx2,f16c")))
#define ZF_ISA ZF_AVX2
#include "_vectors.h"

typedef __m128i v_bits;

ZF_V_INLINE vf v_sqrt(vf x) { return (vf)_mm256_sqrt_ps((__m256)x); }
ZF_V_INLINE vu v_min_u32(vu a, vu b) { return (vu)_mm256_min_epu32((__m256i)a, (__m256i)b); }
ZF_V_INLINE vu v_max_u32(vu a, vu b) { return (vu)_mm256_max_epu32((__m256i)a, (__m256i)b); }

ZF_V_INLINE vf v_flush(vf x, vu size, vu floor) { return (vf)((vu)x & ~(vu)((vi)floor > (vi)((vu)x & size))); }
ZF_V_INLINE vh v_flush_16(vh x, vu size, vh floor) { return x & ~(vh)((vs)floor > (vs)(x & (vh)size)); }
ZF_V_INLINE vf v_unless_equal(vf x, vu a, vu b) { return (vf)((vu)x & ~(vu)(a == b)); }

ZF_V_INLINE int v_ordered(const vf *x) {
    const __m256 first = _mm256_cmp_ps((__m256)x[0], (__m256)x[1], _CMP_UNORD_Q);
    const __m256 second = _mm256_cmp_ps((__m256)x[2], (__m256)x[3], _CMP_UNORD_Q);
    return !_mm256_movemask_ps(_mm256_or_ps(first, second));
}
ZF_V_INLINE int v_any_byte(const uint8_t *from, uint8_t byte) {
    const __m256i all = _mm256_set1_epi8((char)byte);
    const __m256i first = _mm256_cmpeq_epi8((__m256i)v_load(from), all);
    return _mm256_movemask_epi8(_mm256_or_si256(first, _mm256_cmpeq_epi8((__m256i)v_load(from + 32), all))) != 0;
}

ZF_V_INLINE vu v_halves(vu low, vu high) { return (vu)_mm256_blend_epi16((__m256i)low, (__m256i)high, 0xaa); }

ZF_V_INLINE __m256i v_ordered_halves(__m256i x) {
    return _mm256_permute4x64_epi64(x, 0xd8);
}
ZF_V_INLINE void v_zip(vh low, vh high, vu *first, vu *second) {
    const __m256i l = v_ordered_halves((__m256i)low), h = v_ordered_halves((__m256i)high);
    *first = (vu)_mm256_unpacklo_epi16(l, h);
    *second = (vu)_mm256_unpackhi_epi16(l, h);
}
ZF_V_INLINE vh v_lower(vu first, vu second) {
    const __m256i zero = _mm256_setzero_si256();
    return (vh)v_ordered_halves(_mm256_packus_epi32(_mm256_blend_epi16((__m256i)first, zero, 0xaa),
                                                    _mm256_blend_epi16((__m256i)second, zero, 0xaa)));
}
ZF_V_INLINE vh v_upper(vu first, vu second) {
    return (vh)v_ordered_halves(_mm256_packus_epi32((__m256i)(first >> 16), (__m256i)(second >> 16)));
}
ZF_V_INLINE void v_even_odd(vf *a, vf *b) {
    const __m256 first = (__m256)*a, second = (__m256)*b;
    *a = (vf)v_ordered_halves((__m256i)_mm256_shuffle_ps(first, second, 0x88));
    *b = (vf)v_ordered_halves((__m256i)_mm256_shuffle_ps(first, second, 0xdd));
}
ZF_V_INLINE void v_in_order(vf *a, vf *b) {
    const __m256 low = _mm256_unpacklo_ps((__m256)*a, (__m256)*b), high = _mm256_unpackhi_ps((__m256)*a, (__m256)*b);
    *a = (vf)_mm256_permute2f128_ps(low, high, 0x20);
    *b = (vf)_mm256_permute2f128_ps(low, high, 0x31);
}

ZF_V_INLINE vf v_from_fp16(const void *from) {
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
ZF_V_INLINE void v_store(void *to, vu x) { _mm256_storeu_si256((__m256i *)to, (__m256i)x); }
ZF_V_INLINE void v_stream(void *to, vu x) { _mm256_stream_si256((__m256i *)to, (__m256i)x); }

ZF_V_INLINE vh v_set_16(uint16_t x) { return (vh)_mm256_set1_epi16((int16_t)x); }
ZF_V_INLINE v_bits v_number(int bits) { return _mm_cvtsi32_si128(bits); }
ZF_V_INLINE vh v_shift_left_16(vh x, v_bits by) { return (vh)_mm256_sll_epi16((__m256i)x, by); }
ZF_V_INLINE vh v_shift_right_16(vh x, v_bits by) { return (vh)_mm256_sra_epi16((__m256i)x, by); }
ZF_V_INLINE vh v_max_16(vh a, vh b) { return (vh)_mm256_max_epi16((__m256i)a, (__m256i)b); }
ZF_V_INLINE vh v_from_bytes(const uint8_t *from) {
    return (vh)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
}
ZF_V_INLINE vu v_to_bytes(vh a, vh b) { return (vu)v_ordered_halves(_mm256_packus_epi16((__m256i)a, (__m256i)b)); }
/* The lower byte and 8 times the upper one. */
ZF_V_INLINE vh v_sign_to_byte(vh x) { return (vh)_mm256_maddubs_epi16((__m256i)x, _mm256_set1_epi16(0x0801)); }

/* With zeros around it a code is a number in fp16, subnormal if the code is. */
enum { ZF_DECODED = 12 };
ZF_V_INLINE void v_decode(vf *m, const uint8_t *codes) {
    const __m128i both = _mm_loadu_si128((const __m128i *)codes), number = _mm_set1_epi16((int16_t)0x9fc0);
    m[0] = (vf)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(both, 8), 2), number));
    m[1] = (vf)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(both, 2), number));
}
ZF_V_INLINE vf v_clip(vf x, vf limit) {
    return (vf)_mm256_max_ps(_mm256_min_ps((__m256)x, (__m256)limit), (__m256)-limit);
}
ZF_V_INLINE void v_range(vu large, vu small, uint32_t *range) {
    small = ~small; /* so that the largest of both is wanted */
    const __m256i both = _mm256_max_epu32(_mm256_unpacklo_epi32((__m256i)large, (__m256i)small),
                                          _mm256_unpackhi_epi32((__m256i)large, (__m256i)small));
    const __m128i few = _mm_max_epu32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storel_epi64((__m128i *)range, _mm_max_epu32(few, _mm_unpackhi_epi64(few, few)));
    range[1] = ~range[1];
}
