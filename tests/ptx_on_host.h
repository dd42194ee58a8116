/* Registers of PTX on the CPU: each has 64 bits, of which an instruction reads those of its type. */
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef uint8_t u8, b8; typedef uint16_t u16, b16; typedef uint32_t u32, b32; typedef uint64_t u64, b64;
typedef int8_t s8; typedef int16_t s16; typedef int32_t s32; typedef int64_t s64; typedef bool pred;
typedef float f32; typedef double f64;
template <class T> static inline T of(u64 x) { T y; memcpy(&y, &x, sizeof y); return y; }
template <> inline pred of<pred>(u64 x) { return x; }
template <class T> static inline u64 as(T x) { return (u64)x; } /* a signed one is extended */
template <> inline u64 as<f32>(f32 x) { u32 y; memcpy(&y, &x, 4); return y; }
template <> inline u64 as<f64>(f64 x) { u64 y; memcpy(&y, &x, 8); return y; }
template <class T> static inline T least(T a, T b) { return a < b ? a : b; }
template <class T> static inline T most(T a, T b) { return a > b ? a : b; }
/* Shifts by more than there are bits leave zeros, or signs. */
template <class T> static inline T shl(T x, T n) { return (u64)n < 8 * sizeof x ? x << n : 0; }
template <class T> static inline T shr(T x, T n) { return (u64)n < 8 * sizeof x ? x >> n : x < 0 ? -1 : 0; }
