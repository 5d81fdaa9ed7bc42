// Absorbed batched matrix product for many rows: transposed, so that the weights are wgmma's register operand.
//
// Compiled by NVRTC behind absorb_common.cuh, with the macros of that file and WP_ROWS (rows of one block: 8, 16, 32, 64,
// 128 or 256), WP_GROUPS (warpgroups; each has 64 columns), WP_DEPTH (chunks of 64 k in flight), WP_MIN_BLOCKS (blocks
// that must fit one multiprocessor), WP_PREFETCH.
//
// out^T (columns x rows) = W^T X^T: each weight is read and widened to bf16 once per block, in the registers from which
// wgmma takes it. Activations lie in shared memory for all of K, in the order of k that absorb_common.cuh describes:
// each chunk of 64 k is a tile of WP_ROWS x 128 bytes, swizzled by 128 bytes.

#define THREADS (128 * WP_GROUPS)
#define COLS (64 * WP_GROUPS)
#define CHUNKS (WP_K / 64)
#define WIDTH (WP_ROWS < 64 ? WP_ROWS : 64)
#define PARTS (WP_ROWS / WIDTH)
#define UNITS (WP_ROWS * 8)
#define UNITS_PER_THREAD ((UNITS + THREADS - 1) / THREADS)
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

// Strides are in elements. x and w are contiguous along k, out along n. `w_scale` is one float32 (read for e4m3fn
// only), `mx_scale` e8m0 bytes (H, WP_K / 32, WP_N), `scales` the scales of the quantized output (rows, groups).
extern "C" __global__ void __launch_bounds__(THREADS, WP_MIN_BLOCKS)
absorb_wgmma(const u16* __restrict__ x, const u8* __restrict__ w, const float* __restrict__ w_scale,
             const u8* __restrict__ mx_scale, void* __restrict__ out, void* __restrict__ scales, int x_m, int x_h,
             int w_h, int w_n, int s_h, int s_k, int s_n, int o_m, int o_h, int q_m, int q_g, int rows) {
  const int head = blockIdx.y, column0 = blockIdx.x * COLS, row0 = blockIdx.z * WP_ROWS;
  const u8* w_block = w + (long long)head * w_h + (long long)column0 * w_n;
#if WP_PREFETCH
  begin_early(w_block, w_n, COLS);
#endif
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // The first of this warp's 16 columns.
  const int warp_column = threadIdx.x / 32 * 16;

  Raw raw[CHUNKS][2];
#if WP_WEIGHT == 1
  u32 mx[CHUNKS][2];
#endif
  uint4 staged[CHUNKS][UNITS_PER_THREAD];
  const u8* w_lane = w_block + (long long)(warp_column + g) * w_n + (WP_WEIGHT ? 8 : 16) * t;
  const u16* x_head = x + (long long)head * x_h;
  auto load = [&](int j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raw[j][half] = load_weight(w_lane + (long long)(8 * half) * w_n + (WP_WEIGHT ? 32 : 64) * j);
#if WP_WEIGHT == 1
      mx[j][half] = mx_scale[(long long)head * s_h + (long long)((64 * j + 16 * t) / 32) * s_k +
                             (long long)(column0 + warp_column + g + 8 * half) * s_n];
#endif
    }
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
      const int unit = threadIdx.x + i * THREADS, row = row0 + unit / 8;
      const bool inside = (UNITS % THREADS == 0 || unit < UNITS) && row < rows;
      uint4& to = staged[j][i];
      to = make_uint4(0, 0, 0, 0);
      if (inside)
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                     : "l"((const uint4*)(x_head + (long long)row * x_m + 64 * j) + unit % 8) : "memory");
    }
  };
  // Physical pair of k number 8 * t + 2 * s + i of a row becomes word t of its 16-byte unit 2 * s + i.
  auto store = [&](int j) {
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
      const int unit = threadIdx.x + i * THREADS, row = unit / 8, part = unit % 8;
      if (UNITS % THREADS && unit >= UNITS) continue;
      const u32 words[4] = {staged[j][i].x, staged[j][i].y, staged[j][i].z, staged[j][i].w};
      u8* line = shared + (j * WP_ROWS + row) * 128 + part / 2 * 4;
#pragma unroll
      for (int q = 0; q < 4; ++q) *(u32*)(line + ((part % 2 * 4 + q) ^ (row % 8)) * 16) = words[q];
    }
  };

#pragma unroll
  for (int j = 0; j < WP_DEPTH && j < CHUNKS; ++j) load(j);
  // Keeps ptxas from placing the wait for the first loads before the last ones.
  __syncthreads();
#if WP_WEIGHT == 0
  const float weight_scale = *w_scale;
#else
  const float weight_scale = 1.0f;
#endif

  float acc[PARTS][WIDTH / 2];
  u32 a[2][4][4];
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) {
    store(j);
    // Ordinary stores must be visible to the asynchronous proxy, through which wgmma reads.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    u32 wide[2][8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#if WP_WEIGHT == 0
      widen(raw[j][half], 0, wide[half]);
#else
      widen(raw[j][half], e8m0_pair(mx[j][half]), wide[half]);
#endif
    }
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[j % 2][s][i] = wide[i % 2][2 * s + i / 2];
    if (j + WP_DEPTH < CHUNKS) load(j + WP_DEPTH);
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        wgmma(acc[part], a[j % 2][s],
              descriptor(shared_address(shared) + (j * WP_ROWS + part * WIDTH) * 128 + 32 * s), j + s);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    // The fragments of the chunk before this one are free again.
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");

  // Every warp is done with the activations: their memory takes the result in bf16, as rows of COLS columns.
  __syncthreads();
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
#pragma unroll
    for (int i = 0; i < WIDTH / 8; ++i) {
      u32 pair[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
            : "=r"(pair[half])
            : "f"(acc[part][4 * i + 2 * half + 1] * weight_scale), "f"(acc[part][4 * i + 2 * half] * weight_scale));
      const int row = part * WIDTH + 8 * i + lane % 8, column = warp_column + lane / 8 % 2 * 8;
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                   :: "r"(shared_address(shared) + row * PITCH + 2 * column), "r"(pair[0]), "r"(pair[1]) : "memory");
    }
  __syncthreads();

  const int part = threadIdx.x % LANES_PER_ROW;
#pragma unroll 4
  for (int row = threadIdx.x / LANES_PER_ROW; row < WP_ROWS && row0 + row < rows; row += THREADS / LANES_PER_ROW) {
    const uint4 pairs = *(const uint4*)(shared + row * PITCH + 16 * part);
    const long long m = row0 + row;
#if WP_OUT == 0
    *(uint4*)((u16*)out + m * o_m + (long long)head * o_h + column0 + 8 * part) = pairs;
#else
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    float v[8], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
      amax = fmaxf(amax, fabsf(v[i]));
    }
    // The lanes of one row are all here or all gone, so each shuffle's group is complete.
    const u32 lanes = __activemask();
#pragma unroll
    for (int step = WP_OUT == 1 ? 8 : 2; step; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, step));
    const int column = head * WP_N + column0 + 8 * part;
#if WP_OUT == 1
    const float scale = fp8_scale(amax), inverse = __fdiv_rn(1.0f, scale);
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
