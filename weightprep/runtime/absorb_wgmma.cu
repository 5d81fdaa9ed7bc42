// Absorbed batched matrix product for many rows: transposed, so that the weights are wgmma's register operand.
//
// Compiled by NVRTC behind absorb_common.cuh, with the macros of that file and WP_ROWS (rows of one tile: 8, 16, 32, 64 or
// 128), WP_GROUPS (warpgroups; each has 64 columns), WP_LOOP (whether a block computes more than one tile), WP_DEPTH
// (chunks of 64 k of the weights in flight), WP_MIN_BLOCKS (blocks that must fit one multiprocessor), WP_PREFETCH.
//
// out^T (columns x rows) = W^T X^T: each weight is read and widened to bf16 once per block, in the registers from which
// wgmma takes it, and stays there for all tiles. Activations lie in shared memory for all of K, as chunks of 64 k: a
// tile of WP_ROWS x 128 bytes each, swizzled by 128 bytes. The next tile's are copied while this one is computed.

#define THREADS (128 * WP_GROUPS)
#define COLS (64 * WP_GROUPS)
#define CHUNKS (WP_K / 64)
#define WIDTH (WP_ROWS < 64 ? WP_ROWS : 64)
#define PARTS (WP_ROWS / WIDTH)
#define UNITS (WP_ROWS * 8)
#define UNITS_PER_THREAD ((UNITS + THREADS - 1) / THREADS)
#define TILE_BYTES (WP_ROWS * WP_K * 2)
#define PITCH (2 * COLS + 16)
#define LANES_PER_ROW (COLS / 8)
#define FRAGMENTS (WP_LOOP ? CHUNKS : 2)

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
// Chunk j of the activations of rows row0 to row0 + WP_ROWS, asynchronously; rows past the end become zero.
__device__ __forceinline__ void copy_chunk(u32 to, const u16* x, int x_m, int row0, int rows, int j) {
#pragma unroll
  for (int i = 0; i < UNITS_PER_THREAD; ++i) {
    const int unit = threadIdx.x + i * THREADS, row = unit / 8, part = unit % 8;
    if (UNITS % THREADS && unit >= UNITS) continue;
    const bool inside = row0 + row < rows;
    const u16* from = x + (long long)(inside ? row0 + row : 0) * x_m + 64 * j + 8 * part;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to + (j * WP_ROWS + row) * 128 + ((part ^ (row % 8)) * 16)), "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
  }
}

// wgmma's register operand for 64 k of two columns. A lane has read 16 consecutive k of each, but owns k = 2 * (lane % 4)
// and the next, plus 0 and 8, in each of four steps of 16 k: the four lanes of a column exchange through `scratch`.
__device__ __forceinline__ void fragments(u32 (&a)[4][4], const Raw (&raw)[2], u32 mx, u8* scratch) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#if WP_WEIGHT == 0
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32* q = raw[half].q;
    // For lane d of the four, bytes of k 2d, 2d + 8, 2d + 1, 2d + 9: every other byte then forms a pair.
    *(uint4*)(scratch + 512 * half + g * 64 + (t ^ (g / 2)) * 16) =
        make_uint4(__byte_perm(q[0], q[2], 0x5140), __byte_perm(q[0], q[2], 0x7362), __byte_perm(q[1], q[3], 0x5140),
                   __byte_perm(q[1], q[3], 0x7362));
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const u32 q = *(const u32*)(scratch + 512 * half + g * 64 + (s ^ (g / 2)) * 16 + 4 * t);
      a[s][half] = e4m3_bytes_1_and_3(q << 8);
      a[s][half + 2] = e4m3_bytes_1_and_3(q);
    }
#else
  const u32 *q = raw[0].q, *r = raw[1].q;
  u32 words[4];
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const u32 pick = d | (4 + d) << 4;
    words[d] = __byte_perm(__byte_perm(q[0], q[1], pick), __byte_perm(r[0], r[1], pick), 0x5410);
  }
  *(uint4*)(scratch + g * 64 + (t ^ (g / 2)) * 16) = make_uint4(words[0], words[1], words[2], words[3]);
  // Lane t of the four has read the scale of group t % 2 of column t / 2.
  u32 scale[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i / 2][i % 2] = e8m0_pair(__shfl_sync(0xFFFFFFFFu, mx, lane / 4 * 4 + i));
  __syncwarp();
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const u32 word = *(const u32*)(scratch + g * 64 + (s ^ (g / 2)) * 16 + 4 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[s][i / 2 + i % 2 * 2] = e2m1_pair(word, 0x0404 | i * 0x1010, scale[i / 2][s / 2]);
  }
#endif
  __syncwarp();
}

// d += the products of one chunk: four steps of 16 k, for all rows of the tile at `tile`.
__device__ __forceinline__ void multiply(float (&d)[PARTS][WIDTH / 2], const u32 (&a)[4][4], u32 tile, int j) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int s = 0; s < 4; ++s)
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      wgmma(d[part], a[s], descriptor(tile + (j * WP_ROWS + part * WIDTH) * 128 + 32 * s), j + s);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait for this block's copies, but for the last `pending` groups of them, 1 to 8.
__device__ __forceinline__ void copies_done(int pending) {
  switch (pending) {
#define WAIT(n) \
  case n: asm volatile("cp.async.wait_group " #n ";" ::: "memory"); break;
    WAIT(1) WAIT(2) WAIT(3) WAIT(4) WAIT(5) WAIT(6) WAIT(7) WAIT(8)
#undef WAIT
  }
  // What the copies wrote must be visible to the asynchronous proxy, through which wgmma reads, of every warp.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
}

// Strides are in elements. x and w are contiguous along k, out along n. `w_scale` is one float32 (read for e4m3fn
// only), `mx_scale` e8m0 bytes (H, WP_K / 32, WP_N), `scales` the scales of the quantized output (rows, groups).
extern "C" __global__ void __launch_bounds__(THREADS, WP_MIN_BLOCKS)
absorb_wgmma(const u16* __restrict__ x, const u8* __restrict__ w, const float* __restrict__ w_scale,
             const u8* __restrict__ mx_scale, void* __restrict__ out, void* __restrict__ scales, int x_m, int x_h,
             int w_h, int w_n, int s_h, int s_k, int s_n, int o_m, int o_h, int q_m, int q_g, int rows, int tiles) {
  const int head = blockIdx.y, column0 = blockIdx.x * COLS, row0 = blockIdx.z * tiles * WP_ROWS;
  const u8* w_block = w + (long long)head * w_h + (long long)column0 * w_n;
#if WP_PREFETCH
  begin_early(w_block, w_n, COLS);
#endif
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // The first of this warp's 16 columns.
  const int warp_column = threadIdx.x / 32 * 16;
  const u16* x_head = x + (long long)head * x_h;
  const u32 activations = shared_address(shared);
  // Behind the tiles of activations: the result as rows of COLS columns in bf16, then 1 KiB for each warp's exchange.
  u8* result = shared + (1 + WP_LOOP) * TILE_BYTES;
  u8* scratch = result + WP_ROWS * PITCH + threadIdx.x / 32 * 1024;

  Raw raw[CHUNKS][2];
  u32 mx[CHUNKS];
  const u8* w_lane = w_block + (long long)(warp_column + g) * w_n + (WP_WEIGHT ? 8 : 16) * t;
  auto load = [&](int j) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      raw[j][half] = load_weight(w_lane + (long long)(8 * half) * w_n + (WP_WEIGHT ? 32 : 64) * j);
#if WP_WEIGHT == 1
    mx[j] = mx_scale[(long long)head * s_h + (long long)(2 * j + t % 2) * s_k +
                     (long long)(column0 + warp_column + g + t / 2 * 8) * s_n];
#else
    mx[j] = 0;
#endif
  };
#pragma unroll
  for (int j = 0; j < WP_DEPTH && j < CHUNKS; ++j) load(j);
  // Weights come from memory, activations more often from L2: ptxas may not move the longer wait behind the shorter one.
  __syncthreads();
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) {
    copy_chunk(activations, x_head, x_m, row0, rows, j);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
#if WP_LOOP
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j)
    if (tiles > 1) copy_chunk(activations + TILE_BYTES, x_head, x_m, row0 + WP_ROWS, rows, j);
#endif
  asm volatile("cp.async.commit_group;" ::: "memory");
#if WP_WEIGHT == 0
  const float weight_scale = *w_scale;
#else
  const float weight_scale = 1.0f;
#endif

  float acc[PARTS][WIDTH / 2];
  u32 a[FRAGMENTS][4][4];
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) {
    fragments(a[j % FRAGMENTS], raw[j], mx[j], scratch);
    if (j + WP_DEPTH < CHUNKS) load(j + WP_DEPTH);
    copies_done(CHUNKS - j);
    multiply(acc, a[j % FRAGMENTS], activations, j);
    // With two sets of fragments, those of the chunk before this one must be free again.
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");

#if WP_LOOP
#pragma unroll 1
#endif
  for (int tile = 0; tile < tiles && row0 + tile * WP_ROWS < rows; ++tile) {
    const int tile_row = row0 + tile * WP_ROWS;
#if WP_LOOP
    const u32 buffer = activations + tile % 2 * TILE_BYTES;
    if (tile) {
      copies_done(1);
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) multiply(acc, a[j], buffer, j);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
#endif
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
                     :: "r"(shared_address(result) + row * PITCH + 2 * column), "r"(pair[0]), "r"(pair[1]) : "memory");
      }
    __syncthreads();
#if WP_LOOP
    // Every warp is done with this tile's activations: the tile after the next one takes their place.
    if (tile + 2 < tiles)
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) copy_chunk(buffer, x_head, x_m, tile_row + 2 * WP_ROWS, rows, j);
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif

    const int part = threadIdx.x % LANES_PER_ROW;
#pragma unroll 4
    for (int row = threadIdx.x / LANES_PER_ROW; row < WP_ROWS && tile_row + row < rows; row += THREADS / LANES_PER_ROW) {
      const uint4 pairs = *(const uint4*)(result + row * PITCH + 16 * part);
      const long long m = tile_row + row;
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
}
