// Absorbed batched matrix product for few rows: weights stream from memory once, straight into registers.
//
// Compiled by NVRTC behind absorb_common.cuh, with the macros of that file and WP_COLS (columns of one block), WP_WK,
// WP_WN (warps along K and along N), WP_LOOP (whether a block computes more than one tile of 16 rows), WP_PREFETCH,
// WP_LOADS_FIRST (issue all loads of a block before waiting for any).
//
// A quantization group of 128 columns is spread over a cluster of 128 / WP_COLS blocks, so that few heads still fill
// the GPU; the blocks tell each other their maxima through distributed shared memory.

#define THREADS (32 * WP_WK * WP_WN)
#define CLUSTER (WP_OUT == 1 ? 128 / WP_COLS : 1)
#define CLUSTERED (WP_OUT == 1 && WP_COLS < 128)
#define CHUNKS (WP_K / (64 * WP_WK))
#define TILES (WP_COLS / (8 * WP_WN))
#define ROWS 16
#define BUFFERS (WP_LOOP ? 2 : 1)
#define LANES_PER_ROW (WP_COLS / 4)
#define ROWS_PER_PASS (THREADS / LANES_PER_ROW)
#define PASSES ((ROWS + ROWS_PER_PASS - 1) / ROWS_PER_PASS)
#define PITCH (WP_COLS + 4)

// 16 consecutive k of the rows `row` and `row + 8` for every chunk; rows past the end are zero.
__device__ __forceinline__ void load_rows(uint4 (&a)[CHUNKS][2][2], const u16* x, int x_m, int row, int rows) {
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4* p = (const uint4*)(x + (long long)(row + 8 * half) * x_m + 64 * j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[j][half][i] = make_uint4(0, 0, 0, 0);
#if WP_LOADS_FIRST
        if (row + 8 * half < rows) a[j][half][i] = load_units(p + i);
#else
        if (row + 8 * half < rows) a[j][half][i] = __ldg(p + i);
#endif
      }
    }
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Strides are in elements. x and w are contiguous along k, out along n. `w_scale` is one float32 (read for e4m3fn
// only), `mx_scale` e8m0 bytes (H, WP_K / 32, WP_N), `scales` the scales of the quantized output (rows, groups).
// A block computes `tiles` tiles of 16 rows; the widened weights stay in its registers.
extern "C" __global__ void
#if CLUSTERED
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS)
absorb_decode(const u16* __restrict__ x, int x_m, int x_h, const u8* __restrict__ w, const float* __restrict__ w_scale,
              const u8* __restrict__ mx_scale, void* __restrict__ out, void* __restrict__ scales, int w_h, int w_n,
              int s_h, int s_k, int s_n, int o_m, int o_h, int q_m, int q_g, int rows, int tiles) {
  __shared__ float partial[BUFFERS][WP_WK][ROWS][PITCH];
  const int head = blockIdx.y, column0 = blockIdx.x * WP_COLS, row0 = blockIdx.z * tiles * ROWS;
  const u8* w_base = w + (long long)head * w_h;
#if CLUSTERED
  // Two buffers: a block may be one tile ahead of its slowest peer, never two.
  __shared__ float maxima[BUFFERS][CLUSTER][ROWS];
  __shared__ alignas(8) unsigned long long arrived[BUFFERS];
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < BUFFERS; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived[i])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
#if WP_PREFETCH
  begin_early(w_base + (long long)column0 * w_n, w_n, WP_COLS);
#endif
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int warp_k = warp % WP_WK, local0 = warp / WP_WK * 8 * TILES;
  const int k0 = warp_k * 64 * CHUNKS + 16 * t;

  Raw raw[CHUNKS][TILES];
#if WP_WEIGHT == 1
  u32 mx[CHUNKS][TILES];
#endif
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const long long n = column0 + local0 + 8 * i + g;
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
      const int k = k0 + 64 * j;
#if WP_WEIGHT == 0
      raw[j][i] = load_weight(w_base + n * w_n + k);
#else
      raw[j][i] = load_weight(w_base + n * w_n + k / 2);
      mx[j][i] = load_byte(mx_scale + (long long)head * s_h + (long long)(k / 32) * s_k + n * s_n);
#endif
    }
  }
  const float weight_scale = WP_WEIGHT ? 1.0f : load_float(w_scale);

  uint4 a[CHUNKS][2][2];
  const u16* x_base = x + (long long)head * x_h + k0;
  load_rows(a, x_base, x_m, row0 + g, rows);
#if WP_LOADS_FIRST
  // ptxas cannot place the wait for the first loads before the last ones.
  __syncthreads();
#endif

  u32 b[CHUNKS][TILES][8];
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j)
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#if WP_WEIGHT == 0
      widen(raw[j][i], 0, b[j][i]);
#else
      widen(raw[j][i], e8m0_pair(mx[j][i]), b[j][i]);
#endif
    }

  const int part = threadIdx.x % LANES_PER_ROW, first = threadIdx.x / LANES_PER_ROW;
#if WP_LOOP
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
#else
  constexpr int tile = 0;
  {
#endif
    const int tile_row = row0 + tile * ROWS, buffer = tile % BUFFERS;
    if (tile_row >= rows) return;
#if CLUSTERED
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                   :: "r"(shared_address(&arrived[buffer])), "r"(4 * CLUSTER * min(ROWS, rows - tile_row)) : "memory");
#endif
    float acc[TILES][4] = {};
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
      // Tiles innermost: consecutive instructions then do not wait for each other's accumulators.
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint4 low = a[j][0][s], high = a[j][1][s];
#pragma unroll
        for (int i = 0; i < TILES; ++i) mma(acc[i], low.x, high.x, low.y, high.y, b[j][i][4 * s], b[j][i][4 * s + 1]);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
          mma(acc[i], low.z, high.z, low.w, high.w, b[j][i][4 * s + 2], b[j][i][4 * s + 3]);
      }
    }
#if WP_LOOP
    if (tile + 1 < tiles) load_rows(a, x_base, x_m, tile_row + ROWS + g, rows);
#endif
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int column = local0 + 8 * i + 2 * t;
      *(float2*)&partial[buffer][warp_k][g][column] = make_float2(acc[i][0], acc[i][1]);
      *(float2*)&partial[buffer][warp_k][g + 8][column] = make_float2(acc[i][2], acc[i][3]);
    }
    __syncthreads();

    float v[PASSES][4];
    float amax[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const int row = first + p * ROWS_PER_PASS;
#pragma unroll
      for (int c = 0; c < 4; ++c) v[p][c] = 0.0f;
      if (row < ROWS) {
#pragma unroll
        for (int s = 0; s < WP_WK; ++s) {
          const float4 f = *(const float4*)&partial[buffer][s][row][4 * part];
          v[p][0] += f.x, v[p][1] += f.y, v[p][2] += f.z, v[p][3] += f.w;
        }
      }
      amax[p] = 0.0f;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        v[p][c] = round_bf16(v[p][c] * weight_scale);
        amax[p] = fmaxf(amax[p], fabsf(v[p][c]));
      }
#if WP_OUT == 1
#pragma unroll
      for (int step = LANES_PER_ROW / 2; step; step /= 2)
        amax[p] = fmaxf(amax[p], __shfl_xor_sync(0xFFFFFFFFu, amax[p], step));
#elif WP_OUT == 2
#pragma unroll
      for (int step = 4; step; step /= 2) amax[p] = fmaxf(amax[p], __shfl_xor_sync(0xFFFFFFFFu, amax[p], step));
#endif
    }

#if CLUSTERED
    // The peers have initialized their barriers.
    if (tile == 0) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const int row = first + p * ROWS_PER_PASS;
      if (row < ROWS && tile_row + row < rows) {
#pragma unroll
        for (int peer = part; peer < CLUSTER; peer += LANES_PER_ROW)
          asm volatile("{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, %0, %2;"
                       " mapa.shared::cluster.u32 bar, %1, %2;"
                       " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [bar]; }"
                       :: "r"(shared_address(&maxima[buffer][rank][row])), "r"(shared_address(&arrived[buffer])),
                          "r"(peer), "f"(amax[p]) : "memory");
      }
    }
    // All maxima of this tile are here once the barrier has seen their bytes; none comes later, so a block may exit.
    asm volatile("{ .reg .pred done; wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;"
                 " @!done bra wait; }" :: "r"(shared_address(&arrived[buffer])), "r"(tile / BUFFERS % 2) : "memory");
#endif

#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const int row = first + p * ROWS_PER_PASS;
      if (row >= ROWS || tile_row + row >= rows) continue;
      const long long m = tile_row + row;
#if WP_OUT == 0
      u16* o = (u16*)out + m * o_m + (long long)head * o_h + column0 + 4 * part;
      *(uint2*)o = make_uint2((__float_as_uint(v[p][0]) >> 16) | (__float_as_uint(v[p][1]) & 0xFFFF0000u),
                              (__float_as_uint(v[p][2]) >> 16) | (__float_as_uint(v[p][3]) & 0xFFFF0000u));
#elif WP_OUT == 1
      float group_max = amax[p];
#if CLUSTERED
#pragma unroll
      for (int peer = 0; peer < CLUSTER; ++peer) group_max = fmaxf(group_max, maxima[buffer][peer][row]);
#endif
      const float scale = fp8_scale(group_max);
      const int column = head * WP_N + column0 + 4 * part;
      *(u32*)((u8*)out + m * o_m + column) = fp8x4(v[p], reciprocal(scale));
      if (column % 128 == 0) ((float*)scales)[m * q_m + (long long)(column / 128) * q_g] = scale;
#else
      const int exponent = mxfp4_exponent(amax[p]);
      const int column = head * WP_N + column0 + 4 * part;
      *(u16*)((u8*)out + m * o_m + column / 2) = e2m1x4(v[p], exponent);
      if (column % 32 == 0) ((u8*)scales)[m * q_m + (long long)(column / 32) * q_g] = (u8)(exponent + 127);
#endif
    }
  }
}
