// Absorbed batched matrix product for many rows: a block computes one tile of rows.
//
// Compiled by NVRTC behind absorb_common.cuh and absorb_wgmma.cuh, with their macros and WP_DEPTH (chunks of 64 k in
// flight), WP_MIN_BLOCKS (blocks that must fit one multiprocessor), WP_PREFETCH.
//
// Weights go straight to registers, activations through registers into shared memory in the order of k that `widen`
// gives. For one tile that is faster than the copy engine, which starts later.

#define UNITS (WP_ROWS * 8)
#define UNITS_PER_THREAD ((UNITS + THREADS - 1) / THREADS)

// Strides are in elements. x and w are contiguous along k, out along n. `w_scale` is one float32 (read for e4m3fn
// only), `mx_scale` e8m0 bytes (H, WP_K / 32, WP_N), `scales` the scales of the quantized output (rows, groups).
extern "C" __global__ void __launch_bounds__(THREADS, WP_MIN_BLOCKS)
absorb_tile(const u16* __restrict__ x, int x_m, int x_h, const u8* __restrict__ w, const float* __restrict__ w_scale,
            const u8* __restrict__ mx_scale, void* __restrict__ out, void* __restrict__ scales, int w_h, int w_n, int s_h,
            int s_k, int s_n, int o_m, int o_h, int q_m, int q_g, int rows) {
  const int head = blockIdx.y, column0 = blockIdx.x * COLS, row0 = blockIdx.z * WP_ROWS;
  const u8* w_block = w + (long long)head * w_h + (long long)column0 * w_n;
#if WP_PREFETCH
  begin_early(w_block, w_n, COLS);
#endif
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // The first of this warp's 16 columns.
  const int warp_column = threadIdx.x / 32 * 16;

  Raw raw[CHUNKS][2];
  u32 mx[CHUNKS][2];
  uint4 staged[CHUNKS][UNITS_PER_THREAD];
  const u8* w_lane = w_block + (long long)(warp_column + g) * w_n + (WP_WEIGHT ? 8 : 16) * t;
  const u16* x_head = x + (long long)head * x_h;
  auto load = [&](int j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raw[j][half] = load_weight(w_lane + (long long)(8 * half) * w_n + (WP_WEIGHT ? 32 : 64) * j);
      mx[j][half] = WP_WEIGHT ? load_byte(mx_scale + (long long)head * s_h + (long long)((64 * j + 16 * t) / 32) * s_k +
                                          (long long)(column0 + warp_column + g + 8 * half) * s_n) : 0;
    }
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
      const int unit = threadIdx.x + i * THREADS, row = row0 + unit / 8;
      staged[j][i] = make_uint4(0, 0, 0, 0);
      if ((UNITS % THREADS == 0 || unit < UNITS) && row < rows)
        staged[j][i] = load_units((const uint4*)(x_head + (long long)row * x_m + 64 * j) + unit % 8);
    }
  };
  // Pair of k number 8 * t + 2 * s + i of a row becomes word t of the row's 16-byte unit 2 * s + i.
  auto store = [&](int j) {
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
      const int unit = threadIdx.x + i * THREADS, row = unit / 8, part = unit % 8;
      if (UNITS % THREADS && unit >= UNITS) continue;
      const u32 words[4] = {staged[j][i].x, staged[j][i].y, staged[j][i].z, staged[j][i].w};
      u8* line = shared + j * CHUNK_BYTES + row * 128 + part / 2 * 4;
#pragma unroll
      for (int q = 0; q < 4; ++q) *(u32*)(line + ((part % 2 * 4 + q) ^ (row % 8)) * 16) = words[q];
    }
  };

#pragma unroll
  for (int j = 0; j < WP_DEPTH; ++j) load(j);
  const float weight_scale = WP_WEIGHT ? 1.0f : load_float(w_scale);
  // ptxas cannot place the wait for the first loads before the last ones.
  __syncthreads();

  float acc[PARTS][WIDTH / 2];
  u32 a[2][4][4];
#pragma unroll
  for (int start = 0; start < CHUNKS; start += WP_DEPTH) {
    const int end = min(start + WP_DEPTH, CHUNKS);
#pragma unroll
    for (int j = start; j < end; ++j) store(j);
    // Ordinary stores must be visible to the asynchronous proxy, through which wgmma reads. ptxas precedes this fence with
    // a wait for all loads in flight, so the next ones start behind it.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll
    for (int j = end; j < min(end + WP_DEPTH, CHUNKS); ++j) load(j);
    __syncthreads();
#pragma unroll
    for (int j = start; j < end; ++j) {
      u32 wide[2][8];
#pragma unroll
      for (int half = 0; half < 2; ++half) widen(raw[j][half], WP_WEIGHT ? e8m0_pair(mx[j][half]) : 0, wide[half]);
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[j % 2][s][i] = wide[i % 2][2 * s + i / 2];
      multiply(acc, a[j % 2], shared_address(shared), j);
      // The fragments of the chunk before this one are free again.
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  // Every warp is done with the activations: their memory takes the result.
  __syncthreads();
  write_result(shared, acc, weight_scale);
  __syncthreads();
  write_rows(shared, row0, rows, head, column0, out, o_m, o_h, scales, q_m, q_g);
}
