// What the two kernels for many rows share: out^T (columns x rows) = W^T X^T on wgmma, with the weights as the register
// operand, and the way out of the accumulators.
//
// Prepended to each kernel's source, behind absorb_common.cuh. Macros: WP_ROWS (rows of one tile: 8, 16, 32, 64 or 128),
// WP_GROUPS (warpgroups; each has 64 columns). Activations lie in shared memory for all of K, as chunks of 64 k: a tile
// of WP_ROWS x 128 bytes each, swizzled by 128 bytes.

#define THREADS (128 * WP_GROUPS)
#define COLS (64 * WP_GROUPS)
#define CHUNKS (WP_K / 64)
#define WIDTH (WP_ROWS < 64 ? WP_ROWS : 64)
#define PARTS (WP_ROWS / WIDTH)
#define CHUNK_BYTES (WP_ROWS * 128)
#define PITCH (2 * COLS + 16)
#define LANES_PER_ROW (COLS / 8)

extern __shared__ __align__(1024) u8 shared[];

// d (64 columns x WIDTH rows) = a (64 x 16, registers) * b (16 x WIDTH, shared memory), plus d if `accumulate`.
__device__ __forceinline__ void wgmma(float (&d)[WIDTH / 2], const u32* a, u64 b, int accumulate) {
#if WIDTH == 64
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
               "{%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#elif WIDTH == 32
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
               "{%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#elif WIDTH == 16
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7}, "
               "{%8,%9,%10,%11}, %12, p, 1, 1, 0; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#else
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3}, "
               "{%4,%5,%6,%7}, %8, p, 1, 1, 0; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#endif
}

// Tile with rows of 128 bytes, eight rows apart by 1024, swizzle of 128 bytes: the descriptor of PTX's wgmma.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// d += the products of one chunk: four steps of 16 k, for all rows of the tile at `tile`.
__device__ __forceinline__ void multiply(float (&d)[PARTS][WIDTH / 2], const u32 (&a)[4][4], u32 tile, int j) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int s = 0; s < 4; ++s)
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      wgmma(d[part], a[s], descriptor(tile + j * CHUNK_BYTES + part * WIDTH * 128 + 32 * s), j + s);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The accumulators times `scale` in bf16, as rows of COLS columns at `result`.
__device__ __forceinline__ void write_result(u8* result, const float (&acc)[PARTS][WIDTH / 2], float scale) {
  const int lane = threadIdx.x % 32, warp_column = threadIdx.x / 32 * 16;
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
#pragma unroll
    for (int i = 0; i < WIDTH / 8; ++i) {
      u32 pair[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
            : "=r"(pair[half])
            : "f"(acc[part][4 * i + 2 * half + 1] * scale), "f"(acc[part][4 * i + 2 * half] * scale));
      const int row = part * WIDTH + 8 * i + lane % 8, column = warp_column + lane / 8 % 2 * 8;
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                   :: "r"(shared_address(result) + row * PITCH + 2 * column), "r"(pair[0]), "r"(pair[1]) : "memory");
    }
}

// The larger of each half; NaN only where both are.
__device__ __forceinline__ u32 max_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// The rows at `result` to memory, quantized. row0 is the first one's number, column0 the block's first column in the head.
__device__ __forceinline__ void write_rows(const u8* result, int row0, int rows, int head, int column0, void* out, int o_m,
                                           int o_h, void* scales, int q_m, int q_g) {
  const int part = threadIdx.x % LANES_PER_ROW;
#pragma unroll 4
  for (int row = threadIdx.x / LANES_PER_ROW; row < WP_ROWS && row0 + row < rows; row += THREADS / LANES_PER_ROW) {
    const uint4 pairs = *(const uint4*)(result + row * PITCH + 16 * part);
    const long long m = row0 + row;
#if WP_OUT == 0
    *(uint4*)((u16*)out + m * o_m + (long long)head * o_h + column0 + 8 * part) = pairs;
#else
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) top = max_bf16x2(top, words[i] & 0x7FFF7FFFu);
    // The lanes of one row are all here or all gone, so each shuffle's group is complete.
    const u32 lanes = __activemask();
#pragma unroll
    for (int step = WP_OUT == 1 ? 8 : 2; step; step /= 2) top = max_bf16x2(top, __shfl_xor_sync(lanes, top, step));
    const float amax = fmaxf(__uint_as_float(top << 16), __uint_as_float(top & 0xFFFF0000u));
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
    const int column = head * WP_N + column0 + 8 * part;
#if WP_OUT == 1
    const float scale = fp8_scale(amax), inverse = reciprocal(scale);
    *(uint2*)((u8*)out + m * o_m + column) = make_uint2(fp8x4(v, inverse), fp8x4(v + 4, inverse));
    if (column % 128 == 0) ((float*)scales)[m * q_m + (long long)(column / 128) * q_g] = scale;
#else
    const int exponent = mxfp4_exponent(amax);
    *(u32*)((u8*)out + m * o_m + column / 2) = e2m1x4(v, exponent) | ((u32)e2m1x4(v + 4, exponent) << 16);
    if (column % 32 == 0) ((u8*)scales)[m * q_m + (long long)(column / 32) * q_g] = (u8)(exponent + 127);
#endif
#endif
  }
}

