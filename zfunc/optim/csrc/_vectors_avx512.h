/* AVX-512 (F, BW, DQ and VL): 16 floats a vector. Its packs and unpacks stay inside 16 bytes, as those of AVX2. */
#undef ZF_SET
#undef ZF_LANES
#undef ZF_V
#undef ZF_ISA
#define ZF_SET avx512
#define ZF_LANES 16
#define ZF_V __attribute__((target(ZF_TARGET_AVX512)))
#define ZF_ISA ZF_AVX512
#include "_vectors.h"

typedef __m128i v_bits;

ZF_V_INLINE vf v_sqrt(vf x) { return (vf)_mm512_sqrt_ps((__m512)x); }
ZF_V_INLINE vu v_min_u32(vu a, vu b) { return (vu)_mm512_min_epu32((__m512i)a, (__m512i)b); }
ZF_V_INLINE vu v_max_u32(vu a, vu b) { return (vu)_mm512_max_epu32((__m512i)a, (__m512i)b); }

ZF_V_INLINE vf v_flush(vf x, vu size, vu floor) {
    return (vf)_mm512_maskz_mov_ps(_mm512_cmpge_epi32_mask((__m512i)((vu)x & size), (__m512i)floor), (__m512)x);
}
ZF_V_INLINE vh v_flush_16(vh x, vu size, vh floor) {
    return (vh)_mm512_maskz_mov_epi16(_mm512_cmpge_epu16_mask((__m512i)(x & (vh)size), (__m512i)floor), (__m512i)x);
}
ZF_V_INLINE vf v_unless_equal(vf x, vu a, vu b) {
    return (vf)_mm512_maskz_mov_ps(_mm512_cmpneq_epi32_mask((__m512i)a, (__m512i)b), (__m512)x);
}

ZF_V_INLINE int v_ordered(const vf *x) {
    const __mmask16 first = _mm512_cmp_ps_mask((__m512)x[0], (__m512)x[1], _CMP_ORD_Q);
    return _mm512_mask_cmp_ps_mask(first, (__m512)x[2], (__m512)x[3], _CMP_ORD_Q) == 0xffff;
}
ZF_V_INLINE int v_any_byte(const uint8_t *from, uint8_t byte) {
    return _mm512_cmpeq_epi8_mask((__m512i)v_load(from), _mm512_set1_epi8((char)byte)) != 0;
}

ZF_V_INLINE vu v_halves(vu low, vu high) {
    return (vu)_mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), (__m512i)low, (__m512i)high, 0xca);
}

/* Of the 64-bit lanes of two vectors in one, those of the first in every even place, and back. */
ZF_V_INLINE __m512i v_places(__m512i x, int back) {
    return _mm512_permutexvar_epi64(back ? _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7)
                                         : _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x);
}
ZF_V_INLINE void v_zip(vh low, vh high, vu *first, vu *second) {
    const __m512i l = v_places((__m512i)low, 0), h = v_places((__m512i)high, 0);
    *first = (vu)_mm512_unpacklo_epi16(l, h);
    *second = (vu)_mm512_unpackhi_epi16(l, h);
}
ZF_V_INLINE vh v_upper(vu first, vu second) {
    return (vh)v_places(_mm512_packus_epi32((__m512i)(first >> 16), (__m512i)(second >> 16)), 1);
}
ZF_V_INLINE vh v_lower(vu first, vu second) { return v_upper(first << 16, second << 16); }
ZF_V_INLINE void v_even_odd(vf *a, vf *b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 first = (__m512)*a, second = (__m512)*b;
    *a = (vf)_mm512_permutex2var_ps(first, even, second);
    *b = (vf)_mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second);
}
ZF_V_INLINE void v_in_order(vf *a, vf *b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512 even = (__m512)*a, odd = (__m512)*b;
    *a = (vf)_mm512_permutex2var_ps(even, low, odd);
    *b = (vf)_mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd);
}

ZF_V_INLINE vf v_from_fp16(const void *from) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
ZF_V_INLINE void v_store(void *to, vu x) { _mm512_storeu_si512(to, (__m512i)x); }
ZF_V_INLINE void v_stream(void *to, vu x) { _mm512_stream_si512((__m512i *)to, (__m512i)x); }

ZF_V_INLINE vh v_set_16(uint16_t x) { return (vh)_mm512_set1_epi16((int16_t)x); }
ZF_V_INLINE v_bits v_number(int bits) { return _mm_cvtsi32_si128(bits); }
ZF_V_INLINE vh v_shift_left_16(vh x, v_bits by) { return (vh)_mm512_sll_epi16((__m512i)x, by); }
ZF_V_INLINE vh v_shift_right_16(vh x, v_bits by) { return (vh)_mm512_sra_epi16((__m512i)x, by); }
ZF_V_INLINE vh v_max_16(vh a, vh b) { return (vh)_mm512_max_epi16((__m512i)a, (__m512i)b); }
ZF_V_INLINE vh v_from_bytes(const uint8_t *from) {
    return (vh)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from));
}
ZF_V_INLINE vu v_to_bytes(vh a, vh b) { return (vu)v_places(_mm512_packus_epi16((__m512i)a, (__m512i)b), 1); }
/* The lower byte and 8 times the upper one. */
ZF_V_INLINE vh v_sign_to_byte(vh x) { return (vh)_mm512_maddubs_epi16((__m512i)x, _mm512_set1_epi16(0x0801)); }

/* As with AVX2, in fp16. */
enum { ZF_DECODED = 12 };
ZF_V_INLINE void v_decode(vf *m, const uint8_t *codes) {
    const __m256i both = _mm256_loadu_si256((const __m256i *)codes), number = _mm256_set1_epi16((int16_t)0x9fc0);
    m[0] = (vf)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 2), number));
    m[1] = (vf)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(both, 2), number));
}
ZF_V_INLINE vf v_clip(vf x, vf limit) {
    return (vf)_mm512_max_ps(_mm512_min_ps((__m512)x, (__m512)limit), (__m512)-limit);
}
ZF_V_INLINE void v_range(vu large, vu small, uint32_t *range) {
    small = ~small; /* so that the largest of both is wanted */
    const __m512i all = _mm512_max_epu32(_mm512_unpacklo_epi32((__m512i)large, (__m512i)small),
                                         _mm512_unpackhi_epi32((__m512i)large, (__m512i)small));
    const __m256i both = _mm256_max_epu32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    const __m128i few = _mm_max_epu32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storel_epi64((__m128i *)range, _mm_max_epu32(few, _mm_unpackhi_epi64(few, few)));
    range[1] = ~range[1];
}
