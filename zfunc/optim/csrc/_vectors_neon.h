/* NEON, which every AArch64 CPU has: 4 floats a vector. */
#undef ZF_SET
#undef ZF_LANES
#undef ZF_V
#undef ZF_ISA
#define ZF_SET neon
#define ZF_LANES 4
#define ZF_V
#define ZF_ISA ZF_BASELINE
#include "_vectors.h"

typedef int16x8_t v_bits;

ZF_V_INLINE vf v_sqrt(vf x) { return (vf)vsqrtq_f32((float32x4_t)x); }
ZF_V_INLINE vu v_min_u32(vu a, vu b) { return (vu)vminq_u32((uint32x4_t)a, (uint32x4_t)b); }
ZF_V_INLINE vu v_max_u32(vu a, vu b) { return (vu)vmaxq_u32((uint32x4_t)a, (uint32x4_t)b); }

ZF_V_INLINE vf v_flush(vf x, vu size, vu floor) { return (vf)((vu)x & ~(vu)((vi)floor > (vi)((vu)x & size))); }
ZF_V_INLINE vh v_flush_16(vh x, vu size, vh floor) { return x & ~(vh)((vs)floor > (vs)(x & (vh)size)); }
ZF_V_INLINE vf v_unless_equal(vf x, vu a, vu b) { return (vf)((vu)x & ~(vu)(a == b)); }

ZF_V_INLINE int v_ordered(const vf *x) {
    const vi ordered = (x[0] == x[0]) & (x[1] == x[1]) & (x[2] == x[2]) & (x[3] == x[3]);
    return vminvq_u32((uint32x4_t)ordered) != 0;
}
ZF_V_INLINE int v_any_byte(const uint8_t *from, uint8_t byte) {
    const uint8x16_t all = vdupq_n_u8(byte);
    uint8x16_t found = vdupq_n_u8(0);
    for (int i = 0; i < ZF_SHARED; i += 16) found = vorrq_u8(found, vceqq_u8(vld1q_u8(from + i), all));
    return vmaxvq_u8(found) != 0;
}

ZF_V_INLINE vu v_halves(vu low, vu high) {
    return (vu)vbslq_u32(vdupq_n_u32(0xffff), (uint32x4_t)low, (uint32x4_t)high);
}
ZF_V_INLINE void v_zip(vh low, vh high, vu *first, vu *second) {
    *first = (vu)vzip1q_u16((uint16x8_t)low, (uint16x8_t)high);
    *second = (vu)vzip2q_u16((uint16x8_t)low, (uint16x8_t)high);
}
ZF_V_INLINE vh v_lower(vu first, vu second) { return (vh)vuzp1q_u16((uint16x8_t)first, (uint16x8_t)second); }
ZF_V_INLINE vh v_upper(vu first, vu second) { return (vh)vuzp2q_u16((uint16x8_t)first, (uint16x8_t)second); }
ZF_V_INLINE void v_even_odd(vf *a, vf *b) {
    const float32x4_t first = (float32x4_t)*a, second = (float32x4_t)*b;
    *a = (vf)vuzp1q_f32(first, second), *b = (vf)vuzp2q_f32(first, second);
}
ZF_V_INLINE void v_in_order(vf *a, vf *b) {
    const float32x4_t even = (float32x4_t)*a, odd = (float32x4_t)*b;
    *a = (vf)vzip1q_f32(even, odd), *b = (vf)vzip2q_f32(even, odd);
}

ZF_V_INLINE vf v_from_fp16(const uint16_t *from) {
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}
ZF_V_INLINE void v_store(void *to, vu x) {
    memcpy(to, &x, sizeof x);
}
ZF_V_INLINE void v_stream(void *to, vu x) { v_store(to, x); }

ZF_V_INLINE vh v_set_16(uint16_t x) { return (vh)vdupq_n_u16(x); }
ZF_V_INLINE v_bits v_number(int bits) { return vdupq_n_s16((int16_t)bits); }
ZF_V_INLINE vh v_shift_left_16(vh x, v_bits by) { return (vh)vshlq_u16((uint16x8_t)x, by); }
ZF_V_INLINE vh v_shift_right_16(vh x, v_bits by) { return (vh)vshlq_s16((int16x8_t)x, vnegq_s16(by)); }
ZF_V_INLINE vh v_max_16(vh a, vh b) { return (vh)vmaxq_s16((int16x8_t)a, (int16x8_t)b); }
ZF_V_INLINE vh v_from_bytes(const uint8_t *from) { return (vh)vmovl_u8(vld1_u8(from)); }
ZF_V_INLINE vu v_to_bytes(vh a, vh b) {
    return (vu)vcombine_u8(vmovn_u16((uint16x8_t)a), vmovn_u16((uint16x8_t)b));
}
ZF_V_INLINE vh v_sign_to_byte(vh x) { return (x & 0x7f) | (x >> 5 & 0x80); }

/* With zeros around it a code is a number in fp16, subnormal if the code is. */
enum { ZF_DECODED = 12 };
ZF_V_INLINE void v_decode(vf *m, const uint8_t *codes) {
    const int16x4_t both = vreinterpret_s16_u8(vld1_u8(codes)), number = vdup_n_s16((int16_t)0x9fc0);
    const int16x4_t even = vand_s16(vshr_n_s16(vshl_n_s16(both, 8), 2), number);
    const int16x4_t odd = vand_s16(vshr_n_s16(both, 2), number);
    m[0] = (vf)vcvt_f32_f16(vreinterpret_f16_s16(even));
    m[1] = (vf)vcvt_f32_f16(vreinterpret_f16_s16(odd));
}
ZF_V_INLINE vf v_clip(vf x, vf limit) {
    return (vf)vmaxq_f32(vminq_f32((float32x4_t)x, (float32x4_t)limit), (float32x4_t)-limit);
}
ZF_V_INLINE void v_range(vu large, vu small, uint32_t *range) {
    range[0] = vmaxvq_u32((uint32x4_t)large), range[1] = vminvq_u32((uint32x4_t)small);
}
