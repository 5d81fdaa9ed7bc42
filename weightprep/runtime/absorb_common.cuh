// What the absorb kernels share: fp8 and MXFP4 weights widened to bf16, and the two quantizations of the output.
//
// Prepended to each kernel's source.
//
// Macros: WP_K, WP_N (contraction, columns per head), WP_WEIGHT (0 e4m3fn, 1 MXFP4), WP_OUT (0 bf16, 1 e4m3fn groups of
// 128, 2 MXFP4 groups of 32).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// The kernel before us may still run: nothing may be read yet, but weights can travel to the L2 cache, which is
// coherent. Then wait until that kernel has finished and its writes are visible.
__device__ __forceinline__ void begin_early(const u8* w, int w_n, int columns) {
  if (threadIdx.x < columns)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 :: "l"(w + (long long)threadIdx.x * w_n), "n"(WP_WEIGHT ? WP_K / 2 : WP_K));
  asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ float round_bf16(float x) {
  u16 bits;
  float y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  asm("mov.b32 %0, {%1, %2};" : "=f"(y) : "h"((u16)0), "h"(bits));
  return y;
}

__device__ __forceinline__ u32 e8m0_pair(u32 byte) {
  u32 bits = byte == 0 ? 0x0040u : byte == 255 ? 0x7FC0u : byte << 7;
  return bits | (bits << 16);
}

// What is read early is loaded with plain `ld.global`: ptxas moves `.nc` loads behind later barriers, next to their use.
__device__ __forceinline__ float load_float(const float* p) {
  float f;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(f) : "l"(p) : "memory");
  return f;
}

__device__ __forceinline__ uint4 load_units(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_byte(const u8* p) {
  u32 byte;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte) : "l"(p) : "memory");
  return byte;
}

#if WP_WEIGHT == 0
// 16 consecutive k of one weight column.
struct Raw { u32 q[4]; };

__device__ __forceinline__ Raw load_weight(const u8* p) {
  Raw r;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.q[0]), "=r"(r.q[1]), "=r"(r.q[2]), "=r"(r.q[3]) : "l"(p) : "memory");
  return r;
}

// The 7 bits of an e4m3 magnitude placed in bf16's exponent and mantissa are the value times 2^-120.
__device__ __forceinline__ u32 e4m3_bytes_1_and_3(u32 q) {
  return mul_bf16x2((q & 0x80008000u) | ((q >> 4) & 0x07F007F0u), 0x7B807B80u);
}

// 16 weights as pairs of bf16. The order of k inside a dot product is free as long as both operands agree: step s of a
// chunk of 64 k multiplies k = 16 * (lane % 4) + 4 * s + {0, 1, 2, 3}, so that a lane needs no weights of its neighbours.
__device__ __forceinline__ void widen(const Raw& r, u32, u32 (&b)[8]) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    b[2 * s] = e4m3_bytes_1_and_3(__byte_perm(r.q[s], 0, 0x1404));
    b[2 * s + 1] = e4m3_bytes_1_and_3(__byte_perm(r.q[s], 0, 0x3424));
  }
}
#else
struct Raw { u32 q[2]; };

__device__ __forceinline__ Raw load_weight(const u8* p) {
  Raw r;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(r.q[0]), "=r"(r.q[1]) : "l"(p) : "memory");
  return r;
}

// The 3 bits of an e2m1 magnitude placed in bf16's exponent and mantissa are the value times 2^-126.
__device__ __forceinline__ u32 e2m1_pair(u32 q, u32 selector, u32 scale) {
  u32 t = __byte_perm(q, 0, selector);
  u32 bits = ((t << 4) & 0x8000u) | ((t >> 2) & 0x01C0u) | (t & 0x80000000u) | ((t >> 6) & 0x01C00000u);
  return mul_bf16x2(mul_bf16x2(bits, 0x7E807E80u), scale);
}

__device__ __forceinline__ void widen(const Raw& r, u32 scale, u32 (&b)[8]) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    u32 q = r.q[s / 2];
    b[2 * s] = e2m1_pair(q, s % 2 ? 0x2424 : 0x0404, scale);
    b[2 * s + 1] = e2m1_pair(q, s % 2 ? 0x3434 : 0x1414, scale);
  }
}
#endif

#if WP_OUT == 1
// Correctly rounded quotient and reciprocal, as __fdiv_rn and __frcp_rn give them, without the calls that those make for
// operands which do not occur here: amax is a bf16 value, so the quotient and all remainders are normal, or infinity.
__device__ __forceinline__ float fp8_scale(float amax) {
  const float a = fmaxf(amax, 1e-10f), quotient = a * (1.0f / 448.0f);
  return a > 3.4e38f ? a : fmaf(fmaf(-448.0f, quotient, a), 1.0f / 448.0f, quotient);
}

__device__ __forceinline__ float reciprocal(float scale) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(scale));
  return scale > 3.4e38f ? 0.0f : fmaf(y, fmaf(-scale, y, 1.0f), y);
}

__device__ __forceinline__ u32 fp8x4(const float* v, float inverse) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1] * inverse), "f"(v[0] * inverse));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3] * inverse), "f"(v[2] * inverse));
  return low | ((u32)high << 16);
}
#elif WP_OUT == 2
__device__ __forceinline__ int mxfp4_exponent(float amax) {
  return min(max((int)((__float_as_uint(amax) + 0x200000u) >> 23) - 129, -127), 127);
}

__device__ __forceinline__ u32 e2m1_code(float x) {
  float a = fabsf(x);
  u32 code = (a >= 0.25f) + (a >= 0.75f) + (a >= 1.25f) + (a >= 1.75f) + (a >= 2.5f) + (a >= 3.5f) + (a >= 5.0f);
  return code | ((__float_as_uint(x) >> 28) & 8u);
}

__device__ __forceinline__ u16 e2m1x4(const float* v, int exponent) {
  // 2^-exponent in two factors: one alone is not representable for the smallest exponents.
  const int half = exponent >> 1;
  const float f0 = __uint_as_float((u32)(127 - half) << 23);
  const float f1 = __uint_as_float((u32)(127 - exponent + half) << 23);
  u32 packed = 0;
#pragma unroll
  for (int c = 0; c < 4; ++c) packed |= e2m1_code(v[c] * f0 * f1) << (4 * c);
  return (u16)packed;
}
#endif

