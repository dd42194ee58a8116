/* SSE2, which every x86-64 CPU has: 4 floats a vector. What it lacks is made of comparisons and selections. */
#undef ZF_SET
#undef ZF_LANES
#undef ZF_V
#undef ZF_ISA
#define ZF_SET sse2
#define ZF_LANES 4
#define ZF_V
#define ZF_ISA ZF_BASELINE
#include "_vectors.h"

typedef __m128i v_bits;

ZF_V_INLINE vf v_sqrt(vf x) { return (vf)_mm_sqrt_ps((__m128)x); }
ZF_V_INLINE vu v_min_u32(vu a, vu b) { return (a & (vu)(a < b)) | (b & ~(vu)(a < b)); }
ZF_V_INLINE vu v_max_u32(vu a, vu b) { return (a & (vu)(a > b)) | (b & ~(vu)(a > b)); }

ZF_V_INLINE vf v_flush(vf x, vu size, vu floor) { return (vf)((vu)x & ~(vu)((vi)floor > (vi)((vu)x & size))); }
ZF_V_INLINE vh v_flush_16(vh x, vu size, vh floor) { return x & ~(vh)((vs)floor > (vs)(x & (vh)size)); }
ZF_V_INLINE vf v_unless_equal(vf x, vu a, vu b) { return (vf)((vu)x & ~(vu)(a == b)); }

ZF_V_INLINE int v_ordered(const vf *x) {
    const __m128 first = _mm_cmpunord_ps((__m128)x[0], (__m128)x[1]);
    return !_mm_movemask_ps(_mm_or_ps(first, _mm_cmpunord_ps((__m128)x[2], (__m128)x[3])));
}
ZF_V_INLINE int v_any_byte(const uint8_t *from, uint8_t byte) {
    const __m128i all = _mm_set1_epi8((char)byte);
    __m128i found = _mm_setzero_si128();
    for (int i = 0; i < ZF_SHARED; i += 16) found = _mm_or_si128(found, _mm_cmpeq_epi8((__m128i)v_load(from + i), all));
    return _mm_movemask_epi8(found) != 0;
}

ZF_V_INLINE vu v_halves(vu low, vu high) { return (low & 0xffff) | (high & 0xffff0000); }
ZF_V_INLINE void v_zip(vh low, vh high, vu *first, vu *second) {
    *first = (vu)_mm_unpacklo_epi16((__m128i)low, (__m128i)high);
    *second = (vu)_mm_unpackhi_epi16((__m128i)low, (__m128i)high);
}
ZF_V_INLINE vh v_upper(vu first, vu second) { /* with signs: then nothing is out of range */
    return (vh)_mm_packs_epi32((__m128i)((vi)first >> 16), (__m128i)((vi)second >> 16));
}
ZF_V_INLINE vh v_lower(vu first, vu second) { return v_upper(first << 16, second << 16); }
ZF_V_INLINE void v_even_odd(vf *a, vf *b) {
    const __m128 first = (__m128)*a, second = (__m128)*b;
    *a = (vf)_mm_shuffle_ps(first, second, 0x88), *b = (vf)_mm_shuffle_ps(first, second, 0xdd);
}
ZF_V_INLINE void v_in_order(vf *a, vf *b) {
    const __m128 even = (__m128)*a, odd = (__m128)*b;
    *a = (vf)_mm_unpacklo_ps(even, odd), *b = (vf)_mm_unpackhi_ps(even, odd);
}

ZF_V_INLINE vf v_from_fp16(const uint16_t *from) {
    return (vf){zf_from_fp16(from[0]), zf_from_fp16(from[1]), zf_from_fp16(from[2]), zf_from_fp16(from[3])};
}
ZF_V_INLINE void v_store(void *to, vu x) { _mm_storeu_si128((__m128i *)to, (__m128i)x); }
ZF_V_INLINE void v_stream(void *to, vu x) { _mm_stream_si128((__m128i *)to, (__m128i)x); }

ZF_V_INLINE vh v_set_16(uint16_t x) { return (vh)_mm_set1_epi16((int16_t)x); }
ZF_V_INLINE v_bits v_number(int bits) { return _mm_cvtsi32_si128(bits); }
ZF_V_INLINE vh v_shift_left_16(vh x, v_bits by) { return (vh)_mm_sll_epi16((__m128i)x, by); }
ZF_V_INLINE vh v_shift_right_16(vh x, v_bits by) { return (vh)_mm_sra_epi16((__m128i)x, by); }
ZF_V_INLINE vh v_max_16(vh a, vh b) { return (vh)_mm_max_epi16((__m128i)a, (__m128i)b); }
ZF_V_INLINE vh v_from_bytes(const uint8_t *from) {
    return (vh)_mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)from), _mm_setzero_si128());
}
ZF_V_INLINE vu v_to_bytes(vh a, vh b) { return (vu)_mm_packus_epi16((__m128i)a, (__m128i)b); }
ZF_V_INLINE vh v_sign_to_byte(vh x) { return (x & 0x7f) | (x >> 5 & 0x80); }

/* As zf_decode: the smaller of two readings. */
enum { ZF_DECODED = 0 };
ZF_V_INLINE void v_decode(vf *m, const uint8_t *codes) {
    const vu both = (vu)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)codes), _mm_setzero_si128());
    const vu code[2] = {both & 0xff, both >> 8};
    for (int i = 0; i < 2; i++) {
        const vu shifted = ((code[i] & 127) << ZF_CUT) + ZF_NORMAL;
        const vu linear = (vu)((vf)shifted - zf_float(ZF_NORMAL)), size = v_min_u32(linear, shifted - (1u << 23));
        m[i] = (vf)(size | code[i] >> 7 << 31);
    }
}
ZF_V_INLINE vf v_clip(vf x, vf limit) { return (vf)_mm_max_ps(_mm_min_ps((__m128)x, (__m128)limit), (__m128)-limit); }
ZF_V_INLINE void v_range(vu large, vu small, uint32_t *range) {
    range[0] = large[0], range[1] = small[0];
    for (int i = 1; i < ZF_LANES; i++) {
        range[0] = large[i] > range[0] ? large[i] : range[0];
        range[1] = small[i] < range[1] ? small[i] : range[1];
    }
}
